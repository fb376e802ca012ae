"""Texts that a grammar admits: which tokens may come next, as llguidance finds it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ejkernel_serve.device import TOKENS
from ejkernel_train.data import START


class _Bytes:
    """What llguidance asks of a tokenizer."""

    eos_token_id = START
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(START)), b"<|end|>")
    special_token_ids = (START,)

    def __call__(self, text: bytes) -> list[int]:
        return [*text]


@functools.cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), TOKENS)


class Guide:
    """Where a text stands in its grammar. The end of the text is a token of it."""

    def __init__(self, matcher: LLMatcher) -> None:
        """Raises:
        ValueError: the grammar is none, or too large.
        """
        if matcher.is_error():
            raise ValueError(matcher.get_error().partition("\n")[0])
        self._matcher = matcher

    @classmethod
    def of_schema(cls, schema: dict[str, Any]) -> Guide:
        """JSON of a schema, without spaces that say nothing.

        Raises:
            ValueError: as the constructor, or the schema has what llguidance does not follow.
        """
        return cls(
            LLMatcher(_tokenizer(), LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))
        )

    def copy(self) -> Guide:
        return Guide(self._matcher.deep_copy())

    def allowed(self) -> np.ndarray:
        """Bool `[TOKENS]`: the tokens that may come next."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(packed, count=TOKENS, bitorder="little").astype(bool)

    def advance(self, token: int) -> bool:
        """Go on with a token; False if it may not come next."""
        return self._matcher.consume_token(token)
