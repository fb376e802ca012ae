"""Text of tokens while they come."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ejkernel_serve.scheduler import Reason
from ejkernel_serve.stops import StopMatcher
from ejkernel_serve.vocabulary import BYTES, Vocabulary


class Piece(NamedTuple):
    """Text that is certain now, and the tokens that it is from."""

    text: str
    tokens: tuple[int, ...]


class TextStream:
    """The text of a request while it is generated.

    A token is held back while it may be part of a stop sequence, which does not belong to the text, or of a character. Of a token
    in which a stop sequence begins, what stands before that is text.

    Attributes:
        offsets: of each certain token, where in the text the character stands that it is of, or the first one; and of `end`,
            where the text ends.
        end: the token that ended the text, if one did, which is none of it.
    """

    def __init__(self, stop: Sequence[tuple[int, ...]] = (), vocabulary: Vocabulary = BYTES, *, begins: bool = False) -> None:
        """`begins`: the tokens are those of a whole document, and not what comes after a prompt."""
        self._stops = StopMatcher(stop, vocabulary.stop_spelling)
        self._vocabulary, self._spelling, self._begins = vocabulary, vocabulary.spelling, begins
        self._held: deque[tuple[int, bytes]] = deque()
        self._left = 0  # bytes that are held
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._written = 0  # characters
        self.offsets: list[int] = []
        self.end: tuple[int, ...] = ()

    def feed(self, token: int, reason: Reason | None) -> Piece:
        """What the token, the last one if there is a `reason`, makes certain."""
        self._stops.feed(token)
        spelt = self._vocabulary.spelt(token, first=True) if self._begins else self._spelling[token]
        self._begins = self._begins and not self._spelling[token]
        if reason is None and not self._held and not self._stops.begun:  # as nearly always: at once
            return Piece(self._decode(spelt), (token,))
        stopped = reason == "stop"
        if stopped and token in self._vocabulary.ends:
            piece, self.end = self._certain(0, last=True), (token,)
            self.offsets.append(self._written)
            return piece
        self._held.append((token, spelt))
        self._left += len(spelt)
        if reason is None:
            return self._certain(self._stops.begun)
        return self._certain(self._stops.matched + self._stops.after if stopped else 0, last=True)

    def _certain(self, unsure: int, *, last: bool = False) -> Piece:
        """All but so many bytes at the end, and the tokens that these are of unless they are the last."""
        tokens, texts = list[int](), list[str]()
        while self._held and self._left - len(self._held[0][1]) >= unsure:
            token, spelt = self._held.popleft()
            self._left -= len(spelt)
            tokens.append(token)
            texts.append(self._decode(spelt))
        if last and self._left > unsure:
            token, spelt = self._held.popleft()
            tokens.append(token)
            texts.append(self._decode(spelt[: self._left - unsure]))
        if last:
            texts.append(self._decoder.decode(b"", final=True))
        return Piece("".join(texts), tuple(tokens))

    def _decode(self, spelt: bytes) -> str:
        text = self._decoder.decode(spelt if len(spelt) < 2 else spelt[:1])
        # the byte is of the last character here, unless one is begun
        completes = text and not self._decoder.getstate()[0]
        self.offsets.append(self._written + len(text) - bool(completes))
        if len(spelt) > 1:
            text += self._decoder.decode(spelt[1:])
        self._written += len(text)
        return text
