#!/usr/bin/env bash
# Brings the Python environments up to date:  requirements/setup.sh PART...
#
#   main     .venv with the pinned requirements and this project, editable
#   dev      what `make test` and `make lint` add to it
#   bench    what `make bench` compares with
#   engine   .venv-engine with vLLM (the CPU build), and the tools a run needs
#   gpu      main and engine for NVIDIA GPUs; `engine` keeps to that afterwards
#   uv       only the installer (what `make pins` needs)
#
# Invariants:
# - A part whose stamp holds the digest of its requirement files is left alone,
#   so a second run ends within a fraction of a second.
# - A stamp is written last.  An environment whose installation was cut off is
#   recognised by its marker and made anew; downloads are kept in uv's cache.
# - Whatever a person can cure is one message with its remedy and exit code 2,
#   and what can be checked beforehand is checked before anything is installed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"

main=.venv
engine=.venv-engine
log=$main/.setup/log

# Disk space that an installation takes, MiB, measured and rounded up.  Installed
# files are hard links into uv's cache when both are on one file system.
linked_main_mb=6000 linked_engine_mb=1600
copied_main_mb=6000 copied_engine_mb=5600 cache_mb=6000
model_and_run_mb=2000

say() { printf '%s\n' "$*" >&2; }

refuse() { # WHAT REMEDY
  say "error: $1"
  say "  -> $2"
  exit 2
}

interrupted() {
  say "error: the set-up was interrupted"
  say "  -> run the same command again: what was downloaded is kept"
  exit 130
}
trap interrupted INT TERM

have() { command -v "$1" >/dev/null 2>&1; }

# --- what is up to date ------------------------------------------------------

digest() { cat -- "$@" | { if have sha256sum; then sha256sum; else shasum -a 256; fi; } | cut -d' ' -f1; }

stamped() { # ENVIRONMENT PART KEY
  [ -f "$1/.setup/$2" ] && [ "$(<"$1/.setup/$2")" = "$3" ]
}

stamp() { # ENVIRONMENT PART KEY
  printf '%s\n' "$3" >"$1/.setup/$2.new"
  mv -f "$1/.setup/$2.new" "$1/.setup/$2"
}

usable() { # ENVIRONMENT: whole, in the place it was made for, and its Python runs
  [ -f "$1/pyvenv.cfg" ] && [ ! -e "$1/.setup/unfinished" ] || return 1
  [ ! -f "$1/.setup/root" ] || [ "$(<"$1/.setup/root")" = "$root" ] || return 1
  "$1/bin/python" -c '' >/dev/null 2>&1
}

# --- Python ------------------------------------------------------------------

# Exits 0 for a Python that everything here works on, with the standard library whole.
probe='import sys, venv, ssl, ctypes, bz2, lzma, sqlite3
sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))'

find_python() { # prints the path of a suitable Python, or nothing
  local version candidate
  for version in 3.12 3.13; do
    for candidate in "python$version" \
      "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version"*/bin/"python$version" \
      python3 python; do
      # A pyenv shim may be on PATH for a version that is not selected: run it.
      if "$candidate" -c "$probe" >/dev/null 2>&1; then
        "$candidate" -c 'import sys; print(sys.executable)'
        return
      fi
    done
  done
}

uv_python() { # the same by uv, which may download one
  "$uv" python find --no-project '>=3.12,<3.14' 2>>"$log" && return
  "$uv" python install 3.12 >>"$log" 2>&1 || return 1
  "$uv" python find --no-project 3.12 2>>"$log"
}

refuse_python() { # [WHAT-ELSE-FAILED]
  refuse "no Python 3.12 or 3.13 that runs was found on PATH or among pyenv's versions${1:-}" \
    "install one: apt-get install python3.12 python3.12-venv, dnf install python3.12, pyenv install 3.12, or uv python install 3.12"
}

# --- the installer -----------------------------------------------------------

runs_uv() { # PATH-OF-UV: at least 0.5, whose options are used below
  local version
  version=$("$1" --version 2>/dev/null) || return 1
  [[ $version =~ ^uv\ ([0-9]+)\.([0-9]+) ]] || return 1
  ((BASH_REMATCH[1] > 0 || BASH_REMATCH[2] >= 5))
}

find_uv() { # sets uv, installing it beside the environment when there is none
  local python
  for uv in uv "$main/bin/uv" "$main/.setup/uv/bin/uv"; do
    runs_uv "$uv" && return
  done
  for python in "$@" python3; do
    "$python" -m pip --version >/dev/null 2>&1 || continue
    say "installing uv"
    "$python" -m pip install --quiet --disable-pip-version-check --require-hashes \
      --only-binary :all: --target "$main/.setup/uv" --upgrade \
      -r requirements/uv.txt >>"$log" 2>&1 || explain_failure "uv"
    uv=$main/.setup/uv/bin/uv
    runs_uv "$uv" || explain_failure "uv"
    return
  done
  [ -n "$*" ] || refuse_python
  refuse "neither uv nor pip was found, and one of them has to fetch the rest" \
    "install one: apt-get install python3-pip, dnf install python3-pip, or pipx install uv"
}

# --- installing --------------------------------------------------------------

explain_failure() { # WHAT: turns the installer's log into one message
  local last
  if grep -qiE 'no space left|os error 28' "$log"; then
    refuse "the disk became full while installing $1 (log: $log)" \
      "free some space and run the same command again"
  elif grep -qiE 'hash mismatch|hashes? .*(do not|did not) match|THESE PACKAGES DO NOT MATCH' "$log"; then
    refuse "a downloaded file of $1 differs from its pinned hash (log: $log)" \
      "run again; if it stays, the index or a proxy serves other files than the pinned ones"
  elif grep -qiE 'failed to fetch|error sending request|client error|dns error|connect(ion)? (error|refused|reset|broken)|timed? ?out|failed to establish|could not connect|name resolution|network is unreachable' "$log"; then
    refuse "the package index cannot be reached, so $1 cannot be installed (log: $log)" \
      "check the network, HTTPS_PROXY and UV_DEFAULT_INDEX (or PIP_INDEX_URL), then run the same command again"
  fi
  last=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1) || true
  refuse "$1 could not be installed: ${last:-no reason given} (log: $log)" \
    "read the log, then run the same command again"
}

with_uv() { # WHAT ARGUMENT...: runs uv, its whole output in the log, its progress here
  local what=$1
  shift
  "$uv" "$@" 2>&1 | tee -a "$log" |
    { grep --line-buffered -E '^ ?(Downloading|Downloaded|Prepared|Installed|Bytecode compiled) ' || true; } |
    sed -u 's/^ */  /' >&2 || explain_failure "$what"
}

make_environment() { # DIRECTORY
  if ! usable "$1"; then
    [ ! -e "$1/pyvenv.cfg" ] || say "$1 is unfinished or was made elsewhere: making it anew"
    # The log and an installer that was fetched moments ago stay.
    [ ! -d "$1" ] || find "$1" -mindepth 1 -maxdepth 1 ! -name .setup -exec rm -rf {} +
    find "$1/.setup" -mindepth 1 -maxdepth 1 ! -name uv ! -name log -delete 2>/dev/null || true
    mkdir -p "$1/.setup"
    : >"$1/.setup/unfinished"
    "$python" -m venv --without-pip "$1" >>"$log" 2>&1 || explain_failure "$1"
  fi
  mkdir -p "$1/.setup" # an environment that someone else made has none
  printf '%s\n' "$root" >"$1/.setup/root"
}

install_main() {
  make_environment "$main"
  say "installing the main environment ($main)"
  : >"$main/.setup/unfinished"
  rm -f "$main/.setup/project" "$main/.setup/dev" "$main/.setup/bench" "$main/.setup/gpu"
  # Compiled beforehand: every Ray actor imports a good part of it, all at the same time, and
  # where PYTHONDONTWRITEBYTECODE is set each would compile it again.
  with_uv "the main environment" pip sync --python "$main/bin/python" --require-hashes --no-build \
    --compile-bytecode requirements/main.txt
  # An installer that had to be fetched is part of the environment.
  [ ! -x "$main/.setup/uv/bin/uv" ] || ln -sf ../.setup/uv/bin/uv "$main/bin/uv"
  rm -f "$main/.setup/unfinished"
  stamp "$main" main "$main_key"
}

install_project() {
  # Compat mode leaves a plain path entry, which type checkers follow as well.
  with_uv "this project" pip install --python "$main/bin/python" --no-deps --no-build-isolation \
    --config-setting editable_mode=compat -e .
  rm -rf terminal_rl.egg-info
  stamp "$main" project "$project_key"
}

install_dev() {
  say "installing the development tools ($main)"
  : >"$main/.setup/unfinished"
  with_uv "the development tools" pip install --python "$main/bin/python" --no-deps --require-hashes \
    --no-build -r requirements/dev.txt
  rm -f "$main/.setup/unfinished"
  stamp "$main" dev "$dev_key"
}

install_bench() {
  say "installing what benchmarks compare with ($main)"
  : >"$main/.setup/unfinished"
  with_uv "what benchmarks compare with" pip install --python "$main/bin/python" --no-deps \
    --require-hashes --no-build -r requirements/bench.txt
  rm -f "$main/.setup/unfinished"
  stamp "$main" bench "$bench_key"
}

install_gpu() {
  say "installing torch's CUDA parts ($main)"
  : >"$main/.setup/unfinished"
  with_uv "torch's CUDA parts" pip install --python "$main/bin/python" --no-deps --require-hashes \
    --no-build -r requirements/gpu.txt
  rm -f "$main/.setup/unfinished"
  stamp "$main" gpu "$gpu_key"
}

install_engine() {
  make_environment "$engine"
  printf '%s\n' "$kind" >"$engine/.setup/kind"
  say "installing the engine environment ($engine)"
  : >"$engine/.setup/unfinished"
  # Compiled beforehand: it halves the time until a replica serves.
  with_uv "the engine environment" pip sync --python "$engine/bin/python" --require-hashes \
    --no-build --compile-bytecode "$engine_file"
  rm -f "$engine/.setup/unfinished"
  stamp "$engine" engine "$engine_key"
}

# --- checks ------------------------------------------------------------------

check_platform() {
  local platform
  platform="$(uname -s) $(uname -m)"
  [ "$platform" = "Linux x86_64" ] ||
    refuse "the engine environment needs Linux on x86_64, and this is $platform" \
      "run it on such a machine or in a Linux x86_64 container; \`make lint\` works here"
}

check_bubblewrap() {
  have bwrap || refuse "bubblewrap (bwrap), which runs the sandboxes, is not installed" \
    "install it: apt-get install bubblewrap, dnf install bubblewrap, or pacman -S bubblewrap"
}

free_mb() { df -Pk -- "$1" | awk 'NR == 2 { print int($4 / 1024) }'; }

device() { df -Pk -- "$1" | awk 'NR == 2 { print $6 }'; }

check_space() { # PATH NEED WHAT
  local free
  free=$(free_mb "$1")
  [ "$free" -ge "$2" ] || refuse \
    "too little disk space for $3: $2 MB are needed and $free MB are free on $(device "$1")" \
    "free some, or, if uv's cache already holds the packages, set TERMINAL_RL_MIN_FREE_MB=0 to go on anyway"
}

check_disk() {
  local cache need
  if [ -n "${TERMINAL_RL_MIN_FREE_MB:-}" ]; then
    check_space . "$TERMINAL_RL_MIN_FREE_MB" "the environments, the model and a run"
    return
  fi
  cache=${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-.}/.cache}/uv}
  while [ ! -d "$cache" ]; do cache=$(dirname "$cache"); done
  need=$model_and_run_mb
  if [ "$(device "$cache")" = "$(device .)" ]; then
    [ -z "$main_pending" ] || need=$((need + linked_main_mb))
    [ -z "$engine_pending" ] || need=$((need + linked_engine_mb))
  else
    [ -z "$main_pending" ] || need=$((need + copied_main_mb))
    [ -z "$engine_pending" ] || need=$((need + copied_engine_mb))
    check_space "$cache" "$cache_mb" "uv's cache"
  fi
  check_space . "$need" "the environments, the model and a run"
}

# --- the set-up --------------------------------------------------------------

wanted=" $* "
for part in "$@"; do
  case $part in
    main | dev | bench | engine | gpu | uv) ;;
    *) refuse "unknown part '$part'" "use one or more of: main dev bench engine gpu uv" ;;
  esac
done
wants() { [[ $wanted == *" $1 "* ]]; }
kind=cpu engine_file=requirements/engine.txt
if wants gpu || [ "$(cat "$engine/.setup/kind" 2>/dev/null)" = gpu ]; then
  kind=gpu engine_file=requirements/engine-gpu.txt
  linked_main_mb=6700 linked_engine_mb=4600
  copied_main_mb=6700 copied_engine_mb=9000 cache_mb=10000
fi

# One set-up at a time in a checkout.
if have flock; then
  exec 9<"${BASH_SOURCE[0]}"
  flock -n 9 || { say "waiting for another set-up in this checkout"; flock 9; }
fi

main_key=$(digest requirements/main.txt)
dev_key=$(digest requirements/main.txt requirements/dev.txt)
bench_key=$(digest requirements/main.txt requirements/bench.txt)
gpu_key=$(digest requirements/main.txt requirements/gpu.txt)
engine_key=$(digest "$engine_file")
project_key=$(digest pyproject.toml)

main_pending='' project_pending='' dev_pending='' bench_pending='' gpu_pending='' engine_pending=''
if wants main || wants dev || wants bench || wants gpu; then
  if usable "$main" && stamped "$main" main "$main_key"; then
    stamped "$main" project "$project_key" || project_pending=yes
  else
    main_pending=yes project_pending=yes
  fi
fi
if wants dev && { [ -n "$main_pending" ] || ! stamped "$main" dev "$dev_key"; }; then
  dev_pending=yes
fi
if wants bench && { [ -n "$main_pending" ] || ! stamped "$main" bench "$bench_key"; }; then
  bench_pending=yes
fi
if [ "$kind" = gpu ] && { [ -n "$main_pending" ] || ! stamped "$main" gpu "$gpu_key"; }; then
  gpu_pending=yes
fi
if wants engine || wants gpu; then
  check_platform
  check_bubblewrap
  { usable "$engine" && stamped "$engine" engine "$engine_key"; } || engine_pending=yes
fi

if [ -z "$main_pending$project_pending$dev_pending$bench_pending$gpu_pending$engine_pending" ] && ! wants uv; then
  exit 0
fi

began=$SECONDS
[ -z "$main_pending$engine_pending" ] || check_disk
mkdir -p "$main/.setup"
: >"$log"
python=$(find_python)
if [ -n "$python" ]; then
  find_uv "$python"
else
  find_uv
  python=$(uv_python) || refuse_python ", and uv could not fetch one (log: $log)"
fi
[ -z "$main_pending" ] || install_main
[ -z "$project_pending" ] || install_project
[ -z "$dev_pending" ] || install_dev
[ -z "$bench_pending" ] || install_bench
[ -z "$gpu_pending" ] || install_gpu
[ -z "$engine_pending" ] || install_engine
if wants uv; then printf '%s\n' "$uv"; else say "set-up done in $((SECONDS - began)) s"; fi
