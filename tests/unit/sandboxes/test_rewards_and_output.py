"""Reward files and cut output."""

from __future__ import annotations

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.channel import Output
from sandboxes.grading import parse_reward_json, parse_reward_text
from sandboxes.guest.output import Stream
from sandboxes.shells import cut_text

FINITE = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**9), 10**9)


@given(FINITE)
def test_key_reward_or_the_only_key_counts(value: float) -> None:
    assert parse_reward_json(json.dumps({"reward": value, "other": 2}).encode()) == value
    assert parse_reward_json(json.dumps({"score": value}).encode()) == value
    assert parse_reward_text(f" {value!r}\n".encode()) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "[1]", "null", "{}", '{"a": 1, "b": 2}', '{"reward": "1"}', '{"reward": true}'),
        *('{"reward": NaN}', '{"reward": Infinity}', '{"reward": 1e999}', '{"reward": null}'),
        *('{"reward": {"x": 1}}', '{"reward": 1, "x": "y"}', "[" * 100_000, '{"reward": 1'),
        '{"reward": 1' + "0" * 400 + "}",
    ],
)
def test_other_json_is_no_reward(text: str) -> None:
    with pytest.raises(ValueError):
        parse_reward_json(text.encode())


@pytest.mark.parametrize("text", ["", "  ", "one", "nan", "inf", "-inf", "1 2", "1_0", "0x1"])
def test_other_text_is_no_reward(text: str) -> None:
    with pytest.raises(ValueError):
        parse_reward_text(text.encode())


@given(st.binary(max_size=200))
def test_any_bytes_give_a_finite_reward_or_a_value_error(content: bytes) -> None:
    for parse in (parse_reward_json, parse_reward_text):
        try:
            assert math.isfinite(parse(content))
        except ValueError:
            continue


@given(st.lists(st.binary(min_size=1, max_size=3000), max_size=30), st.integers(1, 5000))
def test_stream_keeps_head_and_tail_and_counts_the_rest(pieces: list[bytes], limit: int) -> None:
    read, write = os.pipe()
    try:
        stream = Stream(read, limit)
        for piece in pieces:
            os.write(write, piece)
            stream.read()
        head, cut, tail = stream.parts()
    finally:
        os.close(read)
        os.close(write)
    data = b"".join(pieces)
    assert len(head) + int(cut) + len(tail) == len(data)
    assert len(head) + len(tail) == min(limit, len(data))
    assert data.startswith(head)
    assert data.endswith(tail)


def test_output_says_what_is_cut() -> None:
    assert Output(b"ab\xff", 0, b"c").text() == "ab\ufffdc"
    assert Output(b"ab", 17, b"yz").text() == "ab\n[... 17 bytes cut ...]\nyz"


@given(st.text(max_size=300), st.integers(1, 100))
def test_cut_text_keeps_short_text_and_bounds_long(text: str, limit: int) -> None:
    data = text.encode("utf-8", errors="replace")
    result = cut_text(text, limit)
    if len(data) <= limit:
        assert result == text
    else:
        assert f"[... {len(data) - limit} bytes cut ...]" in result
