"""Stop sequences, found in time that is linear in the tokens however long the sequences are."""

from __future__ import annotations

import functools
from collections.abc import Sequence


class StopMatcher:
    """Reads tokens one at a time, and knows which stop sequences end or have begun there.

    Of each sequence it keeps how many of its tokens the last ones read are (Knuth, Morris and Pratt, "Fast pattern matching in
    strings", 1977). A token costs O(sequences) on average over the tokens read.

    Attributes:
        matched: tokens of the longest sequence that ends with the last token; 0 if none does.
        begun: tokens of the longest beginning of a sequence, short of the whole, that the last tokens are.
        after: see `spelling`.
    """

    def __init__(self, stops: Sequence[tuple[int, ...]] = (), spelling: Sequence[bytes] | None = None) -> None:
        """`spelling`: the bytes of each token, where sequences are of bytes, and begin and end within tokens. Then the attributes
        count bytes, and of the first sequence that ends in a token, `after` are those of the token after it, which are not read.
        """
        self._stops = [(stop, fallbacks(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._spelling = spelling
        self.matched = self.begun = self.after = 0

    def feed(self, token: int) -> None:
        if not self._stops:
            return
        if self._spelling is None:
            self._read(token)
            return
        self.matched = self.after = 0
        spelt = self._spelling[token]
        for place, byte in enumerate(spelt, 1):
            self._read(byte)
            if self.matched:
                self.after = len(spelt) - place
                return

    def _read(self, token: int) -> None:
        self.matched = self.begun = 0
        for place, (stop, fallback) in enumerate(self._stops):
            state = self._states[place]
            while state and stop[state] != token:
                state = fallback[state - 1]
            state += stop[state] == token
            if state == len(stop):
                self.matched = max(self.matched, state)
                state = fallback[state - 1]
            self._states[place] = state
            self.begun = max(self.begun, state)


@functools.lru_cache(maxsize=64)  # a request's choices, their scheduler and their text have the same sequences
def fallbacks(stop: tuple[int, ...]) -> tuple[int, ...]:
    """After each token, the tokens of the longest beginning of the sequence that ends there, short of everything so far."""
    found, state = [0], 0
    for token in stop[1:]:
        while state and stop[state] != token:
            state = found[state - 1]
        state += stop[state] == token
        found.append(state)
    return tuple(found)
