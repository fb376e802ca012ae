"""Requests that come and go: who is in which slot, with which pages, and what every slot does in the next step."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass
class Request:
    """A prompt and the bytes that were generated after it, `count` in the end.

    Attributes:
        stored: tokens of prompt and answer whose keys are in the cache.
        pages: its pages, in order; empty before it joins and after it left.
    """

    prompt: bytes
    count: int
    answer: list[int] = dataclasses.field(default_factory=list)
    stored: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer]

    @property
    def done(self) -> bool:
        return len(self.answer) == self.count


def requests_from(text: bytes, *, seed: int, length: int, count: int = 7) -> list[Request]:
    """Prompts cut from the text, and numbers of bytes to generate, of different lengths; each fits the model's context."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        start, prompt, answer = rng.integers(0, len(text) - length), rng.integers(3, length // 2), rng.integers(4, length // 2)
        found.append(Request(text[start : start + prompt], int(answer)))
    return found


class Plan(NamedTuple):
    """One step: tokens and their positions `[N]`, and the description of the slots that paged attention reads."""

    tokens: np.ndarray
    positions: np.ndarray
    kv_lens: np.ndarray
    block_tables: np.ndarray
    query_start_loc: np.ndarray


class Scheduler:
    """Continuous batching over a fixed number of slots, tokens per step and pages.

    Slots that generate get one token of every step; prompts share the rest of it in chunks. A request joins when a slot and
    pages for all of its tokens are free.
    """

    def __init__(
        self, requests: Sequence[Request], *, slots: int, tokens: int, pages: int, page_size: int, entries: int
    ) -> None:
        self._waiting = deque(requests)
        self._slots: list[Request | None] = [None] * slots
        self._free = list(range(pages))
        self._tokens, self._page_size, self._entries = tokens, page_size, entries
        self._new = [0] * slots
        self.mixes: set[tuple[int, ...]] = set()

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(slot is not None for slot in self._slots)

    def plan(self) -> Plan:
        """Let requests join, and say what every slot does."""
        self._admit()
        missing = [len(r.tokens) - r.stored if r else 0 for r in self._slots]
        self._new = [min(one, 1) for one in missing]
        room = self._tokens - sum(self._new)
        for slot, one in enumerate(missing):
            more = min(one - self._new[slot], room)
            self._new[slot], room = self._new[slot] + more, room - more
        self.mixes.add(tuple(self._new))
        return self._described()

    def _admit(self) -> None:
        for slot, request in enumerate(self._slots):
            if request is None and self._waiting:
                need = -(-(len(self._waiting[0].prompt) + self._waiting[0].count) // self._page_size)
                if need <= len(self._free):
                    joining = self._slots[slot] = self._waiting.popleft()
                    joining.pages = [self._free.pop() for _ in range(need)]

    def _described(self) -> Plan:
        tokens, positions = np.zeros(self._tokens, np.int32), np.zeros(self._tokens, np.int32)
        lengths = np.zeros(len(self._slots), np.int32)
        tables = np.full((len(self._slots), self._entries), -1, np.int32)
        starts = np.concatenate([[0], np.cumsum(self._new)]).astype(np.int32)
        for slot, request in enumerate(self._slots):
            if request is not None:
                first, last = request.stored, request.stored + self._new[slot]
                tokens[starts[slot] : starts[slot + 1]] = request.tokens[first:last]
                positions[starts[slot] : starts[slot + 1]] = np.arange(first, last)
                lengths[slot] = last
                tables[slot, : len(request.pages)] = request.pages
        return Plan(tokens, positions, lengths, tables, starts)

    def advance(self, following: np.ndarray) -> None:
        """Take the byte that follows each slot's last token, where all of its tokens are stored; who is done leaves."""
        for slot, request in enumerate(self._slots):
            if request is None:
                continue
            request.stored += self._new[slot]
            if request.stored == len(request.tokens):
                request.answer.append(int(following[slot]))
            if request.done:
                self._free += request.pages
                request.pages, self._slots[slot] = [], None
