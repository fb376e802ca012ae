"""Tokens of text and text of tokens. A token is a byte of UTF-8, or the mark before a document."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ejkernel_serve.scheduler import Reason
from ejkernel_serve.stops import StopMatcher
from ejkernel_train.data import START


def tokens_of(text: str) -> tuple[int, ...]:
    """The mark, then the bytes, as the model was trained."""
    return (START, *text.encode())


def text_of(tokens: Sequence[int]) -> str:
    """Without marks; what is no UTF-8 becomes U+FFFD."""
    return bytes(token for token in tokens if token != START).decode(errors="replace")


class Piece(NamedTuple):
    """Text that is certain now, and the tokens that it is from."""

    text: str
    tokens: tuple[int, ...]


class TextStream:
    """The text of a request while it is generated.

    A token is held back while it may be part of a stop sequence, which does not belong to the text, or of a character.

    Attributes:
        offsets: of each certain token, where in the text the character stands that it is of.
    """

    def __init__(self, stop: Sequence[tuple[int, ...]] = ()) -> None:
        self._stops = StopMatcher(stop)
        self._held: deque[int] = deque()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._written = 0  # characters
        self.offsets: list[int] = []

    def feed(self, token: int, reason: Reason | None) -> Piece:
        """What the token, the last one if there is a `reason`, makes certain."""
        self._stops.feed(token)
        self._held.append(token)
        unsure = 0
        if reason is None:
            unsure = self._stops.begun
        elif reason == "stop":
            unsure = 1 if token == START else self._stops.matched
        certain = tuple(self._held.popleft() for _ in range(len(self._held) - unsure))
        text = "".join(self._decode(each) for each in certain)
        return Piece(text if reason is None else text + self._decoder.decode(b"", final=True), certain)

    def _decode(self, token: int) -> str:
        text = "" if token == START else self._decoder.decode(bytes([token]))
        self._written += len(text)
        # the byte is of the last character here, unless one is begun
        completes = text and not self._decoder.getstate()[0]
        self.offsets.append(self._written - 1 if completes else self._written)
        return text
