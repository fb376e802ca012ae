"""Drafts: guesses of what a request generates next, which a step checks all at once.

A guess is right if it is the token that would have been drawn. Tokens are drawn with keys of their own, so this holds at every
temperature, and drafts change how fast tokens come, never which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

NGRAM = 3
"""Tokens that a request must have generated or read before to guess that it goes on as it did then."""


class Draft(NamedTuple):
    """A node of a tree of guesses: a token, and the index of the draft before it; -1 after the request's last token."""

    token: int
    parent: int


def propose(tokens: Sequence[int], number: int) -> tuple[Draft, ...]:
    """At most so many drafts: what followed the last `NGRAM` tokens where they stood before, the latest place first.

    Other places add branches where they went on differently. The first place's tokens come first and one after the other.
    """
    drafts: list[Draft] = []
    for place in _places(tokens):
        parent = -1
        for token in tokens[place : place + max(number // 2, 1) if drafts else place + number]:
            known = children(drafts, parent)
            if token not in known:
                if len(drafts) == number:
                    return tuple(drafts)
                drafts.append(Draft(token, parent))
            parent = known.get(token, len(drafts) - 1)
    return tuple(drafts)


def propose_chain(tokens: Sequence[int], number: int) -> tuple[Draft, ...]:
    """Those of the latest place alone, one after the other."""
    drafts = propose(tokens, number)
    return drafts[: next((index for index, draft in enumerate(drafts) if draft.parent != index - 1), len(drafts))]


def children(drafts: Sequence[Draft], parent: int) -> dict[int, int]:
    """By token the drafts after `parent`."""
    return {draft.token: index for index, draft in enumerate(drafts) if draft.parent == parent}


def depths(drafts: Sequence[Draft]) -> list[int]:
    """How many tokens after the request's last one each draft stands."""
    found: list[int] = []
    for draft in drafts:
        found.append(1 if draft.parent < 0 else found[draft.parent] + 1)
    return found


def tree_bias(drafts: Sequence[Draft], size: int) -> np.ndarray:
    """float32 `[size, size]` from the last token of a request (row 0) and its drafts to each other: -inf but to ancestors."""
    bias = np.zeros((size, size), np.float32)
    for row, draft in enumerate(drafts, start=1):
        bias[row, 1:row] = -np.inf
        if draft.parent >= 0:
            bias[row, : draft.parent + 2] = bias[draft.parent + 1, : draft.parent + 2]
            bias[row, draft.parent + 1] = 0
    return bias


def _places(tokens: Sequence[int]) -> Iterator[int]:
    """Where the last `NGRAM` tokens ended before, the latest first."""
    text = "".join(map(chr, tokens))
    end, tail = len(text) - 1, text[-NGRAM:]
    while len(text) > NGRAM and (found := text.rfind(tail, 0, end)) >= 0:
        yield found + NGRAM
        end = found + NGRAM - 1
