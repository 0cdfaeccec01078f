"""Made-up secrets of every kind, put together here so that no scanner takes them for real."""

from __future__ import annotations

_ALNUM = "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8S9t0"
_UPPER = "Q7R8S9T0U1V2W3X4"
CORES = (_ALNUM[:16], _UPPER)  # no canary is without one of them
_PEM = f"{_ALNUM}{_ALNUM}\n{_ALNUM}"

CANARIES: list[tuple[str, str]] = [
    ("private-key", f"-----BEGIN RSA PRIVATE KEY-----\n{_PEM}\n-----END RSA PRIVATE KEY-----"),
    (
        "private-key",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\\n{_ALNUM}\\n-----END OPENSSH PRIVATE KEY-----",
    ),
    ("aws-key-id", "AKIA" + _UPPER),
    ("aws-key-id", "ASIA" + _UPPER),
    ("aws-secret-key", f"aws_secret_access_key = {_ALNUM}"),
    ("github-token", "ghp_" + _ALNUM[:36]),
    ("github-token", "ghs_" + _ALNUM[:36]),
    ("github-token", "github_pat_" + _ALNUM[:22] + "_" + _ALNUM),
    ("gitlab-token", "glpat-" + _ALNUM[:20]),
    ("api-key", "sk-" + _ALNUM),
    ("api-key", "sk-proj-" + _ALNUM + "_" + _ALNUM),
    ("api-key", "sk-ant-api03-" + _ALNUM + "-" + _ALNUM),
    ("stripe-key", "sk_live_" + _ALNUM[:24]),
    ("hf-token", "hf_" + _ALNUM[:34]),
    ("slack-token", "xoxb-" + "123456789012-1234567890123-" + _ALNUM[:24]),
    ("google-key", "AIza" + _ALNUM[:35]),
    ("npm-token", "npm_" + _ALNUM[:36]),
    ("pypi-token", "pypi-AgEI" + _ALNUM * 2),
    ("jwt", "eyJ" + _ALNUM + ".eyJ" + _ALNUM + "." + _ALNUM),
    ("modal-token", "ak-" + _ALNUM[:22]),
    ("modal-token", "as-" + _ALNUM[:22]),
    ("url-credentials", "https://someone:" + _ALNUM + "@example.org/x"),
    ("url-credentials", "postgres://:" + _ALNUM + "@db:5432/x"),
    ("authorization", "Authorization: Bearer " + _ALNUM),
    ("authorization", "authorization: Basic " + _ALNUM + "=="),
]
KINDS = [f"{index}-{kind}" for index, (kind, _) in enumerate(CANARIES)]

HARMLESS = [
    "sk-learn-style-names-without-digits-are-words",
    "risk-averse-2024-approach-to-everything-here",
    "as-is, ak-47",
    "see https://example.org:8080/path?user=a@b.c",
    "curl https://user:${PASSWORD}@host/ and https://user:<password>@host/",
    "the bearer of this message has nothing to declare",
    "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
    "eyJhbGciOiJIUzI1NiJ9 alone",
    "[REDACTED:api-key]",
    "uthorization and secret are words, hf_hub is a module",
]


def kinds_planted() -> set[str]:
    """Every kind that there is a canary of."""
    return {kind for kind, _ in CANARIES}
