"""What runs in the next step. Host logic only: numbers of tokens and pages, no arrays and no model.

A request is a list of tokens of which the first `computed` have their keys and values in pages. A step computes some of the rest;
when it has computed all, the next token is drawn. So prompts in chunks, decoding, and starting over after preemption are one thing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Literal, NamedTuple

from ejkernel_serve import speculative
from ejkernel_serve.cache import PageCache
from ejkernel_serve.config import EngineConfig, Sampling
from ejkernel_serve.speculative import Draft
from ejkernel_serve.stops import StopMatcher

Reason = Literal["stop", "length", "cancelled", "failed"]
"""Why a request ended; "failed" if the model's logits for its next token were not finite."""


Top = tuple[tuple[int, float], ...]
"""The likeliest tokens in one place with their log-probabilities, the likeliest first."""


class QueueFullError(Exception):
    """As many requests run and wait as may."""


@dataclasses.dataclass(eq=False)
class Request:
    """A request and how far it has come.

    Attributes:
        tokens: the prompt, then what was generated.
        prompt: how many of them are the prompt.
        logprobs: log-probability of each token that was generated, by the model.
        top_logprobs: the likeliest in place of each, if `sampling` asks for them.
        prompt_logprobs, prompt_top_logprobs: of the prompt's tokens from the second on, if it asks for these. They are found in
            order, and stay when the request loses its pages.
        pages: those that it holds, in order.
        slot: of its states, in models that have any, while it runs; else -1.
        computed: how many tokens have their keys and values in the pages.
        reused: how many of them it did not have to compute, when it was last admitted.
        preemptions: how often it lost its pages.
        drafted, accepted: drafts that were computed, and those that were right.
        reason: why it ended; None before.
    """

    number: int
    tokens: list[int]
    prompt: int
    sampling: Sampling
    logprobs: list[float] = dataclasses.field(default_factory=list[float])
    top_logprobs: list[Top] = dataclasses.field(default_factory=list[Top])
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list[float])
    prompt_top_logprobs: list[Top] = dataclasses.field(default_factory=list[Top])
    pages: list[int] = dataclasses.field(default_factory=list[int])
    hashes: list[bytes] = dataclasses.field(default_factory=list[bytes])
    slot: int = -1
    computed: int = 0
    reused: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    reason: Reason | None = None

    def __post_init__(self) -> None:
        self.stops = StopMatcher(self.sampling.stop, self.sampling.spelling)
        self.guide = None if self.sampling.guide is None else self.sampling.guide.copy()
        """Both have read what was generated."""

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt :]

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def longest(self) -> int:
        """Tokens that it may come to have."""
        return self.prompt + self.sampling.max_tokens

    @property
    def unscored(self) -> bool:
        """Log-probabilities of its prompt are missing, so that it must be computed and not reused."""
        return self.sampling.prompt_logprobs and len(self.prompt_logprobs) < self.prompt - 1

    def scored(self, size: int) -> range:
        """The tokens whose log-probabilities the next `size` tokens give, and that are missing."""
        first = max(self.computed, len(self.prompt_logprobs)) + 1
        return range(first, max(first, min(self.computed + size + 1, self.prompt))) if self.unscored else range(0)


class Chunk(NamedTuple):
    """The next `size` tokens of a request, and drafts of what comes after its last one.

    A token is drawn after the chunk's last token, which matters if it is the request's last one, and after each draft. Only a
    chunk of one token has drafts. `scored` are the places of tokens of the prompt whose log-probabilities are to be found. Of a
    `burst`, so many tokens are drawn one after the other; then that is so for all chunks of the step. So many tokens `ahead` are
    being computed while the chunk is planned.
    """

    request: Request
    size: int
    drafts: tuple[Draft, ...] = ()
    scored: range = range(0)
    burst: int = 1
    ahead: int = 0

    @property
    def tokens(self) -> int:
        """That the step computes."""
        return self.size + len(self.drafts)


class Drawn(NamedTuple):
    """The tokens drawn after a chunk and after each of its drafts, or in its burst, with their log-probabilities; `scores` of
    `Chunk.scored`.

    `top` and `top_scores` are empty unless the request asks for the likeliest tokens.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Top] = ()
    scores: Sequence[float] = ()
    top_scores: Sequence[Top] = ()


class News(NamedTuple):
    """A request and how many new tokens it has."""

    request: Request
    number: int


class Scheduler:
    """Requests that wait and that run, oldest first, and the pages."""

    def __init__(
        self,
        config: EngineConfig,
        ends: Set[int] = frozenset(),
        propose: Callable[[Sequence[int], int], tuple[Draft, ...]] = speculative.propose,
    ) -> None:
        """`ends`: the tokens that end a text. `propose`: at most so many drafts of what follows tokens."""
        self.config, self.ends, self.propose = config, ends, propose
        self.cache = PageCache(config.pages, config.page_size, reuse=config.prefix_reuse)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._numbers = itertools.count()
        self._slots = list(reversed(range(config.max_requests)))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        """Let a request wait.

        Raises:
            ValueError: no prompt, nothing to generate, or more tokens than `max_length`.
            QueueFullError: as many requests run and wait as may.
        """
        if not prompt:
            raise ValueError("the prompt is empty; give at least one token")
        least = 0 if sampling.prompt_logprobs else 1
        if sampling.max_tokens < least:
            raise ValueError(f"max_tokens is {sampling.max_tokens}; give at least {least}")
        if len(prompt) + sampling.max_tokens > self.config.max_length:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}; "
                f"together at most {self.config.max_length} are possible"
            )
        if len(self.waiting) + len(self.running) >= self.config.capacity:
            raise QueueFullError(f"{self.config.capacity} requests run or wait already; try again later")
        request = Request(next(self._numbers), list(prompt), len(prompt), sampling)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request now, whatever it is doing, and release its pages. One that has ended stays as it is."""
        if request.reason is None:
            self._end(request, "cancelled")

    def plan(self) -> list[Chunk]:
        """What the next step computes, at most as many tokens as the largest bucket; empty only if there is no request.

        Requests that decode come first, so that prompts do not make them wait; chunks of prompts have the rest. A request that
        decodes takes the pages of the youngest if none is left. A prompt takes none from others, unless nothing can go on.
        """
        while True:
            chunks = self._decoding()
            budget = self.config.buckets[-1] - len(chunks)
            planned = {chunk.request for chunk in chunks}
            prefilling = [request for request in self.running if request not in planned and request.remaining > 1]
            for request in prefilling:
                budget -= self._add_chunk(chunks, request, budget)
            while budget > 0 and self._admit():
                budget -= self._add_chunk(chunks, self.running[-1], budget)
            if chunks or not self.running:
                return self._speculate(chunks, budget) if self.config.drafts else self._burst(chunks)
            self._preempt(self.running[-1])

    def plan_ahead(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """What comes after a burst that is being computed, if that is another one of the same requests; else nothing.

        It is not while a request waits that could run, or where one has all its tokens with the burst.
        """
        number, requests = self.config.burst, [chunk.request for chunk in chunks]
        if (
            any(chunk.burst == 1 or chunk.request.reason is not None for chunk in chunks)
            or any(len(request.tokens) + number >= request.longest for request in requests)
            or (self.waiting and len(self.running) < self.config.max_requests)
            or not self._extend_all(requests, 2 * number)
        ):
            return []
        return [chunk._replace(ahead=number) for chunk in chunks]

    def commit(self, chunks: Sequence[Chunk], drawn: Sequence[Drawn]) -> list[News]:
        """Take in what a step has drawn for each chunk. Returns the requests with new tokens, and those that have failed.

        Requests that were cancelled meanwhile are passed over.
        """
        news: list[News] = []
        for chunk, after in zip(chunks, drawn, strict=True):
            request = chunk.request
            if request.reason is not None:
                continue
            request.prompt_logprobs += after.scores
            request.prompt_top_logprobs += after.top_scores
            finite = all(map(math.isfinite, after.scores))
            if finite and chunk.size < request.remaining:
                self._advance(request, chunk.size)
                continue
            before = len(request.tokens)
            right = self._follow(chunk, after) if finite else None
            if right is None:
                self.cache.forget(request.pages)  # nobody else shall read what gave such logits
                self._end(request, "failed")
                news.append(News(request, len(request.tokens) - before))
                continue
            if chunk.drafts:
                request.drafted, request.accepted = request.drafted + len(chunk.drafts), request.accepted + len(right)
            # keys and values of drafts stay if they lie as a text without other branches would; others are computed again
            kept = sum(index == place for place, index in enumerate(right))
            self._advance(request, chunk.size + kept)
            reason = self._reason(request)
            if reason is not None:
                self._end(request, reason)
            news.append(News(request, len(request.tokens) - before))
        return news

    def check(self) -> None:
        """That no page and no slot is lost; see `PageCache.check`."""
        self.cache.check([request.pages for request in (*self.waiting, *self.running)])
        held = [request.slot for request in self.running]
        if sorted([*self._slots, *held]) != list(range(self.config.max_requests)):
            raise RuntimeError(f"slots {self._slots} are free and {held} held, of {self.config.max_requests}")

    def _decoding(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for request in [request for request in self.running if request.remaining == 1]:
            while request in self.running and not self._extend(request, 1):
                self._preempt(self.running[-1])  # the youngest, so none of `chunks`; perhaps this one itself
            if request in self.running:
                chunks.append(Chunk(request, 1))
        return chunks

    def _speculate(self, chunks: list[Chunk], budget: int) -> list[Chunk]:
        """Give requests that decode drafts, as far as budget and free pages go; none is preempted for a guess."""
        for place, (request, size, *_) in enumerate(chunks):
            wanted = min(
                0 if request.guide is not None else self.config.drafts,
                budget,
                request.longest - len(request.tokens) - 1,  # what may come after the next token
            )
            if size == request.remaining == 1 and wanted > 0:  # the tree counts from a chunk's first token
                drafts = self.propose(request.tokens, wanted)
                if self._extend(request, size + len(drafts)):
                    budget -= len(drafts)
                    chunks[place] = Chunk(request, size, drafts)
        return chunks

    def _burst(self, chunks: list[Chunk]) -> list[Chunk]:
        """Let requests that have all begun have some tokens each, if their logits are not adjusted and there is room for all."""
        number, requests = self.config.burst, [chunk.request for chunk in chunks]
        if (
            number == 1
            or any(request.remaining > 1 or not request.generated or request.sampling.adjusts for request in requests)
            or all(len(request.tokens) + 1 == request.longest for request in requests)
            or not self._extend_all(requests, number)
        ):
            return chunks
        return [chunk._replace(burst=number) for chunk in chunks]

    def _follow(self, chunk: Chunk, drawn: Drawn) -> list[int] | None:
        """Append what was drawn after the chunk, and, while a draft was right, after that one. Returns the drafts that were.

        What was drawn next in a burst is a draft that was right.

        None if no token could be drawn: the logits were NaN.
        """
        request, right, at = chunk.request, list[int](), -1
        if not request.sampling.max_tokens:
            return right
        while True:
            token, logprob = drawn.tokens[at + 1], drawn.logprobs[at + 1]
            if token < 0 or not math.isfinite(logprob) or (request.guide is not None and not request.guide.advance(token)):
                return None
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.top_logprobs += drawn.top[at + 1 : at + 2]
            request.stops.feed(token)
            if chunk.burst > 1:
                following = at + 1 if at + 2 < chunk.burst else None
            else:
                following = speculative.children(chunk.drafts, at).get(token)
            if following is None or self._reason(request) is not None:
                return right
            at = following
            right.append(at)

    def _add_chunk(self, chunks: list[Chunk], request: Request, budget: int) -> int:
        """The tokens of a prompt for which there are budget and pages."""
        room = (len(request.pages) + self.cache.available) * self.config.page_size - request.computed
        size = min(request.remaining, budget, room)
        if size > 0:
            self._extend(request, size)
            chunks.append(Chunk(request, size, scored=request.scored(size)))
        return max(size, 0)

    def _extend(self, request: Request, size: int) -> bool:
        """Give the request pages for its next `size` tokens, if there are enough."""
        missing = self.cache.pages_of(request.computed + size) - len(request.pages)
        if missing > self.cache.available:
            return False
        request.pages += self.cache.take(max(missing, 0))
        return True

    def _extend_all(self, requests: Sequence[Request], size: int) -> bool:
        """Give all of them pages for their next `size` tokens, if there are enough and none gets too long."""
        if any(request.computed + size > self.config.max_length for request in requests):
            return False
        missing = (self.cache.pages_of(request.computed + size) - len(request.pages) for request in requests)
        return sum(max(each, 0) for each in missing) <= self.cache.available and all(
            self._extend(request, size) for request in requests
        )

    def _admit(self) -> bool:
        """Let the oldest that waits run, with what is known of its tokens, if there are pages for all of them and one more."""
        if not self.waiting or len(self.running) >= self.config.max_requests:
            return False
        request = self.waiting[0]
        request.hashes = self.cache.hashes(request.tokens, request.hashes)
        # the last token is always computed, for what comes after it
        reusable = 0 if request.unscored else len(request.tokens) - 1
        known = self.cache.known(request.hashes[: reusable // self.config.page_size])
        self.cache.share(known)
        needed = self.cache.pages_of(min(len(request.tokens) + 1, request.longest))
        if needed - len(known) > self.cache.available:
            self.cache.release(known)
            return False
        request.pages, request.slot = known, self._slots.pop()
        request.computed = request.reused = len(known) * self.config.page_size
        self.running.append(self.waiting.popleft())
        return True

    def _preempt(self, request: Request) -> None:
        """Take the pages of a request and let it wait before all others; what it has generated stays."""
        self.running.remove(request)
        self._release(request)
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _advance(self, request: Request, size: int) -> None:
        """Count tokens as computed, and make the pages known that they filled."""
        before, request.computed = request.computed // self.config.page_size, request.computed + size
        full = request.computed // self.config.page_size
        if full > before:
            request.hashes = self.cache.hashes(request.tokens, request.hashes)
            for page, value in zip(request.pages[before:full], request.hashes[before:full], strict=True):
                self.cache.publish(page, value)

    def _reason(self, request: Request) -> Reason | None:
        if len(request.tokens) > request.prompt and (request.tokens[-1] in self.ends or request.stops.matched):
            return "stop"
        return "length" if len(request.tokens) >= request.longest else None

    def _end(self, request: Request, reason: Reason) -> None:
        request.reason = reason
        (self.running if request in self.running else self.waiting).remove(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        self.cache.release(request.pages)
        if request.slot >= 0:
            self._slots.append(request.slot)
        request.pages, request.computed, request.slot = [], 0, -1
