"""Bytes, characters and stop sequences."""

from __future__ import annotations

import pytest

from ejkernel_serve.text import TextStream
from ejkernel_serve.vocabulary import BYTES


def test_a_document_begins_with_the_mark():
    assert BYTES.encode("é") == (256, 0xC3, 0xA9)
    assert BYTES.text([256, 0xC3, 0xA9, 256, 0x41]) == "éA"


def pieces(text: str | bytes, stop: tuple[bytes, ...] = (), reason: str = "length") -> list[str]:
    tokens = text.encode() if isinstance(text, str) else text
    stream = TextStream(tuple(tuple(each) for each in stop))
    last = len(tokens) - 1
    return [stream.feed(token, reason if at == last else None).text for at, token in enumerate(tokens)]  # pyright: ignore[reportArgumentType]


def test_characters_come_whole():
    assert pieces("aé€b") == ["a", "", "é", "", "", "€", "b"]
    assert pieces(b"a\xe2\x82") == ["a", "", "\ufffd"]
    assert pieces(b"\xffa") == ["\ufffd", "a"]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abcd", (b"cd",), ["a", "b", "", ""]),
        ("accd", (b"cd",), ["a", "", "c", ""]),
        ("abab!", (b"ab!",), ["", "", "ab", "", ""]),
        ("xab", (b"b", b"abc"), ["x", "", "a"]),
        ("xabc", (b"c", b"abc"), ["x", "", "", ""]),
    ],
)
@pytest.mark.unsampled
def test_stop_sequences_are_held_back(text: str, stop: tuple[bytes, ...], expected: list[str]):
    assert pieces(text, stop, "stop") == expected


def test_what_was_held_back_comes_at_the_end():
    assert pieces("abc", (b"bcd",)) == ["a", "", "bc"]


def test_the_mark_is_no_text():
    stream = TextStream()
    assert stream.feed(0x41, None).text == "A"
    assert stream.feed(256, None) == ("", (256,))
    assert stream.feed(256, "stop") == ("", ())
    assert TextStream().feed(256, "length") == ("", (256,))
