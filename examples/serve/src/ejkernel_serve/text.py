"""Tokens of text and text of tokens. A token is a byte of UTF-8, or the mark before a document."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from ejkernel_serve.scheduler import Reason
from ejkernel_train.data import START


def tokens_of(text: str) -> tuple[int, ...]:
    """The mark, then the bytes, as the model was trained."""
    return (START, *text.encode())


def text_of(tokens: Sequence[int]) -> str:
    """Without marks; what is no UTF-8 becomes U+FFFD."""
    return _bytes_of(tokens).decode(errors="replace")


def _bytes_of(tokens: Sequence[int]) -> bytes:
    return bytes(token for token in tokens if token != START)


class Piece(NamedTuple):
    """Text that is certain now, and the tokens that it is from."""

    text: str
    tokens: tuple[int, ...]


class TextStream:
    """The text of a request while it is generated.

    A token is held back while it may be part of a stop sequence, which does not belong to the text, or of a character.
    """

    def __init__(self, stop: Sequence[tuple[int, ...]] = ()) -> None:
        self._stop = stop
        self._held: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int, reason: Reason | None) -> Piece:
        """What the token, the last one if there is a `reason`, makes certain."""
        self._held.append(token)
        kept = len(self._held)
        if reason is None:
            kept -= self._unsure()
        elif reason == "stop":
            kept -= 1 if token == START else max(len(stop) for stop in self._stop if self._ends_with(stop))
        certain, self._held = tuple(self._held[:kept]), self._held[kept:]
        return Piece(self._decoder.decode(_bytes_of(certain), final=reason is not None), certain)

    def _unsure(self) -> int:
        """How many of the last tokens begin a stop sequence."""
        sizes = (size for stop in self._stop for size in range(1, len(stop)) if self._ends_with(stop[:size]))
        return max(sizes, default=0)

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return tuple(self._held[-len(tokens) :]) == tokens
