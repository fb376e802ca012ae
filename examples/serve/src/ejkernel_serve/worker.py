"""The engine in a thread of its own, for coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ejkernel_serve.config import Sampling
from ejkernel_serve.engine import Engine
from ejkernel_serve.scheduler import Reason, Request

_LOGGER = logging.getLogger(__name__)

_AT_ONCE = 64
"""Tokens that are handed on before other coroutines have their turn."""


class Token(NamedTuple):
    """A token that was generated; the last one has the reason why."""

    token: int
    logprob: float
    reason: Reason | None


class StoppedError(Exception):
    """The engine does not run: it was shut down, or its step failed."""


class NotFiniteError(Exception):
    """No token could be drawn for a request. Others are not concerned."""

    def __init__(self, generated: int) -> None:
        super().__init__(f"the model's logits after {generated} generated tokens are not finite, so no token can be drawn")


class Generation:
    """The tokens of one request. All methods are called in the loop's thread."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._known = 0  # of the tokens that the engine's thread appends to the request
        self._reason: Reason | None = None
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Raises StoppedError when the engine stops before the request has ended, and NotFiniteError."""
        request, at = self.request, 0
        while True:
            while at < self._known:
                reason = self._reason if at + 1 == self._known else None
                yield Token(request.tokens[request.prompt + at], request.logprobs[at], reason)
                at += 1
                if at % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            if self._reason is not None or self._failure is not None:
                break
            await self._change()
        if self._failure is not None:
            raise self._failure

    async def ended(self) -> None:
        """Return when all tokens are there. Raises as iteration does."""
        while self._reason is None and self._failure is None:
            await self._change()
        if self._failure is not None:
            raise self._failure

    def tell(self, generated: int, reason: Reason | None) -> None:
        """The request has so many tokens now, and has ended if there is a reason."""
        if reason == "failed":
            self._failure = NotFiniteError(generated)
        else:
            self._reason = reason
        self._known = generated
        self._changed.set()

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Worker:
    """Steps the engine as long as there are requests.

    `submit` may be called from any thread; other methods are called in the loop's, and none of those waits for the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: StoppedError | None = StoppedError("the engine has not started")
        self._live: dict[Request, Generation] = {}
        self._lock = threading.Lock()
        """Of `_live`. Held while requests are submitted, so that the engine's thread finds those that it has news of."""
        self._canceller = ThreadPoolExecutor(1, "ejkernel-serve-cancel")  # waits while the engine plans
        self._wake, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="ejkernel-serve-engine", daemon=True)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.failure = None
        self._thread.start()

    async def stop(self, seconds: float = 30) -> None:
        """End after the step that runs, and whatever request is left with StoppedError. A step that hangs is left behind."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, seconds)
        self._fail(StoppedError("the server is shutting down"))
        await asyncio.to_thread(self._canceller.shutdown)

    def submit(self, prompts: Iterable[tuple[Sequence[int], Sampling]]) -> list[Generation]:
        """All requests or none.

        Raises:
            ValueError, QueueFullError: as `Engine.submit`.
            StoppedError: the engine does not run.
        """
        made: list[Generation] = []
        with self._lock:
            if self.failure is not None:
                raise self.failure
            try:
                for prompt, sampling in prompts:
                    made.append(Generation(self.engine.submit(prompt, sampling)))
            except Exception:
                for generation in made:
                    self.engine.cancel(generation.request)
                raise
            self._live.update((generation.request, generation) for generation in made)
        self._wake.set()
        return made

    def cancel(self, generations: Iterable[Generation]) -> None:
        """End these requests, if they have not ended, and release their pages, soon."""
        with contextlib.suppress(RuntimeError):  # after `stop`, which has cancelled all
            self._canceller.submit(self._cancel, [generation.request for generation in generations])

    def _cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            with self._lock:
                self._live.pop(request, None)
            self.engine.cancel(request)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait()
                self._wake.clear()
                while self.engine.busy and not self._stopping:
                    self._step()
        except BaseException:  # whatever ends this thread, clients are told
            _LOGGER.exception("the engine's step failed")
            self._loop.call_soon_threadsafe(self._fail, StoppedError("the engine has failed"))

    def _step(self) -> None:
        """Step, and have the loop tell those who wait."""
        news: list[tuple[Generation, int, Reason | None]] = []
        changed = [request for request, _ in self.engine.step()]
        with self._lock:
            for request in changed:
                generation = self._live.get(request)
                if generation is not None:  # not cancelled meanwhile
                    news.append((generation, len(request.tokens) - request.prompt, request.reason))
                    if request.reason is not None:
                        del self._live[request]
        self._loop.call_soon_threadsafe(_tell, news)

    def _fail(self, failure: StoppedError) -> None:
        """From now on nothing is generated."""
        with self._lock:
            self.failure = self.failure or failure
            left = [*self._live.values()]
            self._live.clear()
        for generation in left:
            generation.fail(failure)
        self.cancel(left)


def _tell(news: Sequence[tuple[Generation, int, Reason | None]]) -> None:
    for generation, generated, reason in news:
        generation.tell(generated, reason)
