"""Continuous batching: every step computes tokens of all requests that run, chunks of prompts and single ones in any mix."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ejkernel_serve import device, penalties, speculative
from ejkernel_serve.config import EngineConfig, Sampling
from ejkernel_serve.scheduler import Chunk, Drawn, News, Request, Scheduler, Top
from ejkernel_serve.vocabulary import BYTES, Vocabulary
from ejkernel_train.model import Model


class _Launch(NamedTuple):
    """What runs on the device, and the words that it will return, see `device.Programs`."""

    chunks: Sequence[Chunk]
    words: jax.Array


class Engine:
    """Requests go in by `submit`, `step` moves all of them on, and `cancel` ends one at any time.

    One thread calls `step`; `submit` and `cancel` may be called from others.
    """

    def __init__(self, model: Model, config: EngineConfig, vocabulary: Vocabulary = BYTES) -> None:
        """Raises:
        ValueError: a model that cannot be served, see `device.prepare`.
        """
        self._stateful = not {*model.config.pattern}.isdisjoint(device.STATEFUL)
        if self._stateful:
            if config.drafts:
                raise ValueError(f"drafts is {config.drafts}; a model with states that cannot go back has 0")
            config = dataclasses.replace(config, prefix_reuse=False)
        # a branch's tokens lie behind those of the branches before it, so a window would end elsewhere
        propose = speculative.propose_chain if "window_attention" in model.config.pattern else speculative.propose
        self.config, self.vocabulary = config, vocabulary
        self.scheduler = Scheduler(config, ends=vocabulary.ends, propose=propose)
        self._lock = threading.Lock()
        weights = device.prepare(model, config.dtype, config.max_length, vocabulary.size)
        pages = device.empty_pages(model.config, config.pages, config.page_size, config.dtype, config.max_requests)
        # placed, as restored weights are: with pages that were not, the first step's program would be another than later ones'
        weights, self._pages = jax.device_put((weights, pages), jax.devices()[0])
        self._weights, structure = jax.tree.flatten(weights)
        self.programs = device.programs(structure)
        self._ahead: _Launch | None = None

    @property
    def busy(self) -> bool:
        with self._lock:
            return self.scheduler.busy

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        """Let a request wait for its turn.

        Raises:
            ValueError: a token, of the prompt or of `logit_bias`, that the vocabulary has not; else as `Scheduler.submit`.
            QueueFullError: as many requests run and wait as may.
        """
        for token in (min(prompt), max(prompt)) if prompt else ():
            if not 0 <= token < self.vocabulary.size:
                raise ValueError(f"the prompt has the token {token}; give {self.vocabulary.possible}")
        for token in sampling.logit_bias:
            if token >= self.vocabulary.size:
                raise ValueError(f"logit_bias has the token {token}; give tokens below {self.vocabulary.size}")
        with self._lock:
            return self.scheduler.submit(prompt, sampling)

    def cancel(self, request: Request) -> None:
        """End a request now and release its pages. One that has ended stays as it is."""
        with self._lock:
            self.scheduler.cancel(request)

    def step(self) -> list[News]:
        """Run one step. Returns the requests that have new tokens, with which they may have ended.

        While all decode, the step that follows is launched before this one's tokens are read, so that the device never waits for
        the host; what it draws for requests that have ended by then is dropped.
        """
        launch, self._ahead = self._ahead, None
        if launch is None:
            with self._lock:
                chunks = self.scheduler.plan()
                batch = self.batch(chunks) if chunks else None
            if batch is None:
                return []
            launch = self._launch(chunks, batch)
        with self._lock:
            following = self.scheduler.plan_ahead(launch.chunks)
            batch = self.batch(following) if following else None
        if batch is not None:
            self._ahead = self._launch(following, batch, launch.words)
        drawn = _by_chunk(launch.chunks, device.draws_of(np.asarray(launch.words)))
        with self._lock:
            return self.scheduler.commit(launch.chunks, drawn)

    def finish(self) -> None:
        """Step until no request is left."""
        while self.busy:
            self.step()

    def warm_up(self) -> None:
        """Compile the programs of every bucket for requests without adjustments, scores and likeliest tokens."""
        decoding = self.config.bucket(self.config.max_requests)
        for size in self.config.buckets:
            # no request has tokens, so nothing is stored
            self._run(self._empty(size)).block_until_ready()
            if self.config.burst > 1 and size <= decoding and not self.config.drafts:
                self._run(self._empty(size), burst=self.config.burst).block_until_ready()

    def probe(self) -> None:
        """Generate a token.

        Raises:
            ValueError: the model's logits are not finite, as those of a training that diverged.
        """
        request = self.submit([self.vocabulary.first], Sampling(max_tokens=1))
        self.finish()
        if request.reason == "failed":
            raise ValueError("the model's logits are not finite, so it can generate nothing; serve an earlier checkpoint")

    def check(self) -> None:
        """That no page is lost; see `PageCache.check`."""
        with self._lock:
            self.scheduler.check()

    def _launch(self, chunks: Sequence[Chunk], batch: device.Batch, before: jax.Array | None = None) -> _Launch:
        """`before`: words of the burst that these chunks follow."""
        words = self._run(batch, _top(chunks), chunks[0].burst, before)
        words.copy_to_host_async()
        return _Launch(chunks, words)

    def _run(self, batch: device.Batch, top: int = 0, burst: int = 1, before: jax.Array | None = None) -> jax.Array:
        words, fields = device.pack(batch)
        if burst == 1:
            self._pages, drawn = self.programs.step(self._weights, self._pages, words, fields=fields, top=top)
            return drawn
        if before is None:
            before = _no_words(len(batch.rows), burst, 2 + 2 * top)
        self._pages, drawn = self.programs.burst(
            self._weights, self._pages, words, before, fields=fields, number=burst, top=top
        )
        return drawn

    def _empty(self, size: int, *, scores: bool = False) -> device.Batch:
        """A batch of so many tokens without requests. There are never more requests or drawn tokens than tokens.

        With `scores` there is a row for each token, and one for the token that each request draws.
        """
        requests, nodes = min(size, self.config.max_requests), 1 + self.config.drafts
        rows = size + requests if scores else min(size, self.config.max_requests * nodes)
        return device.Batch(
            tokens=np.zeros(size, np.int32),
            positions=np.zeros(size, np.int32),
            starts=np.zeros(requests + 1, np.int32),
            lengths=np.zeros(requests, np.int32),
            tables=np.zeros((requests, self.config.table), np.int32),
            tree=np.zeros((requests, nodes, nodes), np.float32) if self.config.drafts else None,
            rows=np.zeros(rows, np.int32),
            seeds=np.zeros((rows, 2), np.uint32),
            drawn=np.zeros(rows, np.int32),
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            targets=np.full(rows, -1, np.int32) if scores else None,
            slots=np.full(requests, -1, np.int32) if self._stateful else None,
        )

    def batch(self, chunks: Sequence[Chunk]) -> device.Batch:
        """The arrays of a step."""
        size = self.config.bucket(sum(chunk.tokens for chunk in chunks))
        batch = self._empty(size, scores=any(chunk.scored for chunk in chunks))
        min_p, adjustments = np.zeros(len(batch.rows), np.float32), list[penalties.Adjustments]()
        allowed: np.ndarray | None = None
        end = row = 0
        for number, (request, size, drafts, scored, _, ahead) in enumerate(chunks):
            start, last, end = end, end + size - 1, end + size + len(drafts)
            computed = request.computed + ahead
            done = computed + size
            depths = (0, *speculative.depths(drafts))
            tokens = [-1] if ahead else request.tokens[computed:done]
            batch.tokens[start:end] = [*tokens, *(draft.token for draft in drafts)]
            batch.positions[start:end] = [*range(computed, done), *(done - 1 + depth for depth in depths[1:])]
            batch.starts[number + 1 :] = end
            batch.lengths[number] = done + len(drafts)
            batch.tables[number, : len(request.pages)] = request.pages
            if batch.slots is not None:
                batch.slots[number] = request.slot
            if batch.tree is not None:
                batch.tree[number] = speculative.tree_bias(drafts, 1 + self.config.drafts)
            if batch.targets is not None:
                batch.rows[row : row + len(scored)] = [start + place - 1 - request.computed for place in scored]
                batch.targets[row : row + len(scored)] = request.tokens[scored.start : scored.stop]
            drawing = slice(row + len(scored), row + len(scored) + len(depths))
            row = drawing.stop
            batch.rows[drawing] = range(last, end)
            batch.drawn[drawing] = [len(request.tokens) + ahead - request.prompt + depth for depth in depths]
            sampling = request.sampling
            batch.seeds[drawing] = sampling.seed >> 32, sampling.seed & 0xFFFFFFFF
            batch.temperature[drawing], batch.top_k[drawing] = sampling.temperature, sampling.top_k
            batch.top_p[drawing], min_p[drawing] = sampling.top_p, sampling.min_p
            adjustments += [{}] * len(scored) + penalties.of_chunk(chunks[number])
            if request.guide is not None and size == request.remaining:
                found = request.guide.allowed()
                allowed = np.full((len(batch.rows), len(found)), 2**32 - 1, np.uint32) if allowed is None else allowed
                allowed[drawing] = found
        adjustments += [{}] * (len(batch.rows) - row)
        adjusted = penalties.arrays(adjustments, device.adjusted_sizes(self.vocabulary.size))
        return batch._replace(min_p=min_p if min_p.any() else None, allowed=allowed, **adjusted)


@functools.cache
def _no_words(*shape: int) -> jax.Array:
    """For bursts that follow none."""
    return jax.device_put(np.zeros(shape, np.int32), jax.devices()[0])


def _top(chunks: Sequence[Chunk]) -> int:
    """Likeliest tokens that the step reports for all."""
    most = max((chunk.request.sampling.top_logprobs for chunk in chunks), default=0)
    return next(number for number in device.TOP if number >= most)


def _by_chunk(chunks: Sequence[Chunk], draws: device.Draws) -> list[Drawn]:
    """Of each chunk the tokens drawn after it and after its drafts, or in its burst, and the scores of its prompt."""
    tokens, logprobs = _list(draws.tokens), _list(draws.logprobs)
    top_tokens, top_logprobs = _list(draws.top_tokens), _list(draws.top_logprobs)
    found: list[Drawn] = []
    row = 0
    for number, chunk in enumerate(chunks):
        if chunk.burst > 1:
            wanted = chunk.request.sampling.top_logprobs
            top = _likeliest(top_tokens[number], top_logprobs[number], wanted) if wanted else []
            found.append(Drawn(tokens[number], logprobs[number], top))
            continue
        scores = slice(row, row + len(chunk.scored))
        rows = slice(scores.stop, scores.stop + 1 + len(chunk.drafts))
        row = rows.stop
        top, top_scores = (
            _likeliest(top_tokens[where], top_logprobs[where], chunk.request.sampling.top_logprobs) for where in (rows, scores)
        )
        found.append(Drawn(tokens[rows], logprobs[rows], top, logprobs[scores], top_scores))
    return found


def _likeliest(tokens: list[list[int]], logprobs: list[list[float]], number: int) -> list[Top]:
    """So many of those that are reported in each place."""
    if not number:
        return []
    return [tuple(zip(each[:number], values[:number], strict=True)) for each, values in zip(tokens, logprobs, strict=True)]


def _list(array: device.Array | None) -> list[Any]:
    return [] if array is None else np.asarray(array).tolist()
