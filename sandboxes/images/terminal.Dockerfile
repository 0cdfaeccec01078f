# What a terminal task finds on Modal: the counterpart of the host's /usr, which stands
# in for an image on this machine.  Everything is pinned: the base by digest, packages
# by exact version from Debian's archive as it was on one day.
FROM debian:bookworm-20251229-slim@sha256:d5d3f9c23164ea16f31852f95bd5959aad1c5e854332fe00f7b3a20fcc9f635c
RUN rm -f /etc/apt/sources.list.d/* \
 && for suite in "debian/20261128T030000Z bookworm" "debian-security/20261128T030000Z bookworm-security"; do \
      echo "deb [check-valid-until=no] http://snapshot.debian.org/archive/$suite main"; \
    done > /etc/apt/sources.list \
 && apt-get -o Acquire::Retries=5 update \
 && DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=5 install -y --no-install-recommends \
      bc=1.07.1-3+b1 \
      bzip2=1.0.8-5+b1 \
      file=1:5.44-3 \
      git=1:2.39.5-0+deb12u3 \
      jq=1.6-2.1+deb12u3 \
      patch=2.7.6-7+deb12u1 \
      procps=2:4.0.2-3 \
      psmisc=23.6-1 \
      python3=3.11.2-1+b1 \
      sqlite3=3.40.1-2+deb12u2 \
      unzip=6.0-28+deb12u1 \
      xz-utils=5.4.1-1+deb12u2 \
      zip=3.0-13+deb12u1 \
 && rm -rf /var/lib/apt/lists/*
