"""What tokens are: bytes, or those of a tokenizer. The engine asks how many there are and which of them end a text, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from ejkernel_train.data import START

TOKENS = START + 1
"""Bytes and the mark before a document. A model may have more; they are never drawn."""


class Vocabulary:
    """Text of tokens. Subclasses know the tokens of a text.

    Attributes:
        size: tokens that may be read and drawn, from 0 on.
        ends: those after which a text ends.
        spelling: the bytes of each; none of a mark, which is no text.
        possible: which tokens there are, for messages.
        stop_spelling: the bytes of which stop sequences are, of each token. None: tokens are such bytes themselves.
        variables: of chat templates, such as the texts of marks.
    """

    def __init__(
        self,
        spelling: Sequence[bytes],
        ends: Set[int],
        possible: str,
        *,
        stop_spelling: Sequence[bytes] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.size, self.spelling, self.ends, self.possible = len(spelling), spelling, frozenset(ends), possible
        self.stop_spelling, self.variables = stop_spelling, dict(variables or {})

    @property
    def first(self) -> int:
        """A token that a text may begin with."""
        return 0

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a document that begins with the text.

        Raises:
            ValueError: half a surrogate pair, which no bytes say.
        """
        raise NotImplementedError

    def encode_text(self, text: str) -> tuple[int, ...]:
        """The tokens of text within a document."""
        raise NotImplementedError

    def encode_chat(self, text: str) -> tuple[int, ...]:
        """The tokens of what a chat template has written, marks included."""
        return self.encode_text(text)

    def spelt(self, token: int, *, first: bool) -> bytes:
        """Its bytes, as the first of a text that have any, or after others."""
        return self.spelling[token]

    def text(self, tokens: Sequence[int]) -> str:
        """Of a document; what is no UTF-8 becomes U+FFFD. Tokens that are none are passed over."""
        spelt = [token for token in tokens if 0 <= token < self.size and self.spelling[token]]
        return b"".join(self.spelt(token, first=not place) for place, token in enumerate(spelt)).decode(errors="replace")

    def name(self, token: int) -> str:
        """The token's text; bytes that are no whole characters as OpenAI writes them."""
        spelt = self.spelling[token]
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


class Bytes(Vocabulary):
    """UTF-8, and the mark before a document, which ends the one before: what this project's trainer teaches."""

    def __init__(self) -> None:
        spelling = (*(bytes([byte]) for byte in range(START)), b"")
        super().__init__(spelling, {START}, f"bytes, or {START} before a document")

    @property
    def first(self) -> int:
        return START

    def encode(self, text: str) -> tuple[int, ...]:
        return (START, *text.encode())

    def encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_chat(self, text: str) -> tuple[int, ...]:
        return self.encode(text)

    def name(self, token: int) -> str:
        return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


BYTES = Bytes()
