"""Texts that a grammar admits: which tokens may come next, as llguidance finds it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ejkernel_serve.vocabulary import BYTES, Vocabulary


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        ends = sorted(vocabulary.ends)
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted({*ends, *(token for token, spelt in enumerate(vocabulary.spelling) if not spelt)})
        marks = {token: f"<|{token}|>".encode() for token in self.special_token_ids}
        self.tokens = [marks.get(token, spelt) for token, spelt in enumerate(vocabulary.spelling)]
        self._vocabulary = vocabulary
        self._by_bytes = {spelt: token for token, spelt in enumerate(vocabulary.spelling) if spelt}
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Of bytes that a grammar leaves no choice of, and of no others: not of a space that the tokenizer puts before them."""
        found = self._vocabulary.encode_text(text.decode(errors="replace"))
        if b"".join(self.tokens[token] for token in found) == text:
            return [*found]
        tokens, at = list[int](), 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._by_bytes), None)
            if end is None:  # no token is this byte
                break
            tokens.append(self._by_bytes[text[at:end]])
            at = end
        return tokens


@functools.cache
def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Raises:
    ValueError: no token ends a text.
    """
    if not vocabulary.ends:
        raise ValueError("the model has no token that ends a text, so none can follow a schema")
    return LLTokenizer(TokenizerWrapper(_Vocabulary(vocabulary)), vocabulary.size, eos_token=sorted(vocabulary.ends))


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
    def of_schema(cls, schema: dict[str, Any], vocabulary: Vocabulary = BYTES) -> Guide:
        """JSON of a schema, without spaces that say nothing.

        Raises:
            ValueError: as the constructor, or the schema has what llguidance does not follow, or no token ends a text.
        """
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        return cls(LLMatcher(_tokenizer(vocabulary), grammar))

    def copy(self) -> Guide:
        return Guide(self._matcher.deep_copy())

    def allowed(self) -> np.ndarray:
        """uint32 `[ceil(size / 32)]`: a bit for each token that may come next, the lowest first."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)

    def advance(self, token: int) -> bool:
        """Go on with a token; False if it may not come next."""
        return self._matcher.consume_token(token)
