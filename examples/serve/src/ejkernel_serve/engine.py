"""Continuous batching: every step computes tokens of all requests that run, chunks of prompts and single ones in any mix."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import jax
import numpy as np

from ejkernel_serve import device
from ejkernel_serve.config import EngineConfig, Sampling
from ejkernel_serve.scheduler import Chunk, Request, Scheduler
from ejkernel_train.data import START
from ejkernel_train.model import Model

_STEP = jax.jit(device.step, donate_argnums=1)
"""One program for each bucket, shared by engines of the same sizes."""


class Engine:
    """Requests go in by `submit`, `step` moves all of them on, and `cancel` ends one at any time.

    One thread calls `step`; `submit` and `cancel` may be called from others.
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        """Raises:
        ValueError: a model that cannot be served, see `device.prepare`.
        """
        self.config = config
        self.scheduler = Scheduler(config, end=START)
        self._lock = threading.Lock()
        self._weights = device.prepare(model, config.dtype, config.max_length)
        self._pages = device.empty_pages(model.config, config.pages, config.page_size, config.dtype)

    @property
    def busy(self) -> bool:
        with self._lock:
            return self.scheduler.busy

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        """Let a request wait for its turn.

        Raises:
            ValueError: a token that is no byte and not the mark; else as `Scheduler.submit`.
            QueueFullError: as many requests run and wait as may.
        """
        for token in prompt:
            if not 0 <= token < device.TOKENS:
                raise ValueError(f"the prompt has the token {token}; give bytes, or {START} before a document")
        with self._lock:
            return self.scheduler.submit(prompt, sampling)

    def cancel(self, request: Request) -> None:
        """End a request now and release its pages. One that has ended stays as it is."""
        with self._lock:
            self.scheduler.cancel(request)

    def step(self) -> list[Request]:
        """Run one step. Returns the requests that have a new token, which is the last of their `tokens`, or have ended with it."""
        with self._lock:
            chunks = self.scheduler.plan()
            batch = self._batch(chunks) if chunks else None
        if batch is None:
            return []
        self._pages, drawn, logprobs = _STEP(self._weights, self._pages, batch)
        tokens, known = np.asarray(drawn).tolist(), np.asarray(logprobs).tolist()
        with self._lock:
            return self.scheduler.commit(chunks, tokens[: len(chunks)], known[: len(chunks)])

    def finish(self) -> None:
        """Step until no request is left."""
        while self.busy:
            self.step()

    def warm_up(self) -> None:
        """Compile the program of every bucket."""
        for size in self.config.buckets:
            # no request has tokens, so nothing is stored
            self._pages, drawn, _ = _STEP(self._weights, self._pages, self._empty(size))
            drawn.block_until_ready()

    def check(self) -> None:
        """That no page is lost; see `PageCache.check`."""
        with self._lock:
            self.scheduler.check()

    def _empty(self, size: int) -> device.Batch:
        """A batch of so many tokens without requests. There are never more requests than tokens."""
        rows = min(size, self.config.max_requests)
        return device.Batch(
            tokens=np.zeros(size, np.int32),
            starts=np.zeros(rows + 1, np.int32),
            lengths=np.zeros(rows, np.int32),
            tables=np.zeros((rows, self.config.table), np.int32),
            seeds=np.zeros((rows, 2), np.uint32),
            drawn=np.zeros(rows, np.int32),
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
        )

    def _batch(self, chunks: Sequence[Chunk]) -> device.Batch:
        batch = self._empty(self.config.bucket(sum(chunk.size for chunk in chunks)))
        end = 0
        for row, (request, size) in enumerate(chunks):
            start, end = end, end + size
            sampling = request.sampling
            batch.tokens[start:end] = request.tokens[request.computed : request.computed + size]
            batch.starts[row + 1 :] = end
            batch.lengths[row] = request.computed + size
            batch.tables[row, : len(request.pages)] = request.pages
            batch.seeds[row] = sampling.seed >> 32, sampling.seed & 0xFFFFFFFF
            batch.drawn[row] = len(request.tokens) - request.prompt
            batch.temperature[row], batch.top_k[row], batch.top_p[row] = sampling.temperature, sampling.top_k, sampling.top_p
        return batch
