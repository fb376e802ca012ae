"""The engine in a thread of its own, for coroutines."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple

from ejkernel_serve.config import Sampling
from ejkernel_serve.engine import Engine
from ejkernel_serve.scheduler import News, Reason, Request

_LOGGER = logging.getLogger(__name__)


class Token(NamedTuple):
    """A token that was generated; the last one has the reason why."""

    token: int
    logprob: float
    reason: Reason | None


class StoppedError(Exception):
    """The engine does not run: it was shut down, or its step failed."""


class Generation:
    """The tokens of one request, to be iterated over once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: asyncio.Queue[Token | StoppedError] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Raises StoppedError when the engine stops before the request has ended."""
        while True:
            found = await self.tokens.get()
            if isinstance(found, StoppedError):
                raise found
            yield found
            if found.reason is not None:
                return


class Worker:
    """Steps the engine as long as there are requests. All methods are called in the loop's thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: StoppedError | None = StoppedError("the engine has not started")
        self._live: dict[Request, Generation] = {}
        self._wake, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="ejkernel-serve-engine", daemon=True)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.failure = None
        self._thread.start()

    async def stop(self) -> None:
        """End after the step that runs, and whatever request is left with StoppedError."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)
        self._fail(StoppedError("the server is shutting down"))

    def submit(self, prompts: Iterable[tuple[Sequence[int], Sampling]]) -> list[Generation]:
        """All requests or none.

        Raises:
            ValueError, QueueFullError: as `Engine.submit`.
            StoppedError: the engine does not run.
        """
        if self.failure is not None:
            raise self.failure
        made: list[Generation] = []
        try:
            for prompt, sampling in prompts:
                made.append(Generation(self.engine.submit(prompt, sampling)))
        except Exception:
            self.cancel(made)
            raise
        self._live.update((generation.request, generation) for generation in made)
        self._wake.set()
        return made

    def cancel(self, generations: Iterable[Generation]) -> None:
        """End these requests, if they have not ended, and release their pages."""
        for generation in generations:
            self._live.pop(generation.request, None)
            self.engine.cancel(generation.request)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait()
                self._wake.clear()
                while self.engine.busy and not self._stopping:
                    news = [(each.request, _tokens(each)) for each in self.engine.step()]
                    self._loop.call_soon_threadsafe(self._deliver, news)
        except Exception:
            _LOGGER.exception("the engine's step failed")
            self._loop.call_soon_threadsafe(self._fail, StoppedError("the engine has failed"))

    def _deliver(self, news: list[tuple[Request, list[Token]]]) -> None:
        for request, tokens in news:
            generation = self._live.get(request)
            if generation is not None:  # not cancelled meanwhile
                for token in tokens:
                    generation.tokens.put_nowait(token)
                if tokens[-1].reason is not None:
                    del self._live[request]

    def _fail(self, failure: StoppedError) -> None:
        self.failure = failure
        left = [*self._live.values()]
        self.cancel(left)
        for generation in left:
            generation.tokens.put_nowait(failure)


def _tokens(news: News) -> list[Token]:
    """The new ones; the reason why the request ended is that of the last."""
    request, number = news
    new = zip(request.tokens[-number:], request.logprobs[-number:], strict=True)
    return [
        Token(token, logprob, request.reason if left == 1 else None)
        for (token, logprob), left in zip(new, range(number, 0, -1), strict=True)
    ]
