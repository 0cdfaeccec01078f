"""Secrets are found by shape or because they are known, and leave no trace of themselves."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.errors import ConfigurationError, EvidenceError
from rl.evidence.dataset.scrub import SHAPES, Scrubber, known_secrets, redacted
from tests.unit.rl.evidence.dataset.canaries import CANARIES, CORES, HARMLESS, KINDS, kinds_planted


@pytest.mark.parametrize(("kind", "secret"), CANARIES, ids=KINDS)
@pytest.mark.parametrize("around", ["{}", "KEY={}\n", '{{"key": "{}"}}', "export A='{}'; ls"])
def test_each_kind_is_replaced_wherever_it_stands(kind: str, secret: str, around: str) -> None:
    text = around.format(secret)
    assert not Scrubber().clean(text)
    scrubbed, counts = Scrubber().scrub(text)
    assert counts == {kind: 1}
    assert redacted(kind) in scrubbed
    assert not any(core in scrubbed for core in CORES)


def test_every_shape_has_a_canary() -> None:
    assert {shape.kind for shape in SHAPES} == kinds_planted()


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_is_left_alone(text: str) -> None:
    assert Scrubber().scrub(text) == (text, {})


@given(st.lists(st.sampled_from([secret for _, secret in CANARIES]), max_size=4), st.text())
def test_scrubbing_twice_changes_nothing_more(secrets: list[str], text: str) -> None:
    once, _ = Scrubber().scrub(text.join(["", *secrets, ""]))
    assert Scrubber().scrub(once) == (once, {})


@given(st.text())
def test_text_that_is_clean_is_not_changed(text: str) -> None:
    scrubber = Scrubber({"hunter2hunter2": "environment"})
    if scrubber.clean(text):
        assert scrubber.scrub(text) == (text, {})


def test_a_cut_private_key_is_replaced_as_far_as_it_goes() -> None:
    text = "-----BEGIN PRIVATE KEY-----\nMIIEvAIBADANBgkqhkiG9w0BAQEFAASC\nMIIEvAIBADAN"
    assert Scrubber().scrub(f"$ cat k\n{text}")[0] == f"$ cat k\n{redacted('private-key')}"


def test_only_the_secret_part_of_a_url_is_replaced() -> None:
    text = "git clone https://ann:s3cr3t-pw@example.org/a.git"
    assert Scrubber().scrub(text)[0] == (
        f"git clone https://{redacted('url-credentials')}@example.org/a.git"
    )


def test_known_values_are_replaced_in_other_spellings_too() -> None:
    scrubber = Scrubber({'pa"ss/wo rd': "listed"})
    for spelling in ('pa"ss/wo rd', 'pa\\"ss/wo rd', "pa%22ss%2Fwo%20rd"):
        assert scrubber.scrub(f"<{spelling}>") == (f"<{redacted('listed')}>", {"listed": 1})


def test_environment_values_count_by_the_variables_name_and_length() -> None:
    environment = {
        "WANDB_API_KEY": "0123456789abcdef",
        "MY_TOKEN": "short",
        "DB_PASSWORD_FILE": "/run/secrets/db",
        "client_secret": "open sesame",
        "HOME": "/home/someone",
        "KEYBOARD": "de-latin1-nodeadkeys",
    }
    assert set(known_secrets(environment)) == {
        "0123456789abcdef",
        "/run/secrets/db",
        "open sesame",
    }


def test_listed_secrets_are_lines(tmp_path: Path) -> None:
    listed = tmp_path / "secrets.txt"
    listed.write_text("first one\n\n  second  \n")
    assert known_secrets({}, listed) == {"first one": "listed", "second": "listed"}


def test_a_list_that_can_not_be_used_is_refused(tmp_path: Path) -> None:
    listed = tmp_path / "secrets.txt"
    with pytest.raises(EvidenceError, match="cannot be read"):
        known_secrets({}, listed)
    listed.write_text("long enough\nabc\n")
    with pytest.raises(ConfigurationError, match=r"secrets.txt:2: a secret of fewer than 4"):
        known_secrets({}, listed)
    listed.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        known_secrets({}, listed)
