"""Bodies that come in and events that go out, with clients that may go away at any time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ejkernel_serve.completion import Completion
from ejkernel_serve.config import Limits
from ejkernel_serve.protocol import ApiError

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Bodies:
    """Reads bodies, within limits of each and of all together."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._held = limits, 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncGenerator[bytes]:
        """A body, which counts until the context ends.

        Raises:
            ApiError: 413 of one that is too long, 408 of one that does not come, 429 if too many are being read.
            ClientDisconnect: the client went away.
        """
        limits, parts, size = self._limits, list[bytes](), 0
        said = request.headers.get("content-length", "")
        try:
            if said.isdecimal() and int(said[:20]) > limits.body_bytes:
                raise _too_long(limits.body_bytes)
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    self._held += len(part)
                    if size > limits.body_bytes:
                        raise _too_long(limits.body_bytes)
                    if self._held > limits.bodies_bytes:
                        raise ApiError(429, "too many requests are being read; try again later", retry_after=1)
                    parts.append(part)
            yield b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body was not whole after {limits.body_seconds:g} seconds") from None
        finally:
            self._held -= size


class EventStream(Response):
    """Server-sent events, until there are no more or nobody listens."""

    def __init__(self, completion: Completion) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type="text/event-stream")
        del self.headers["Content-Length"]
        self._completion = completion

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        finally:
            self._completion.close()

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._completion.events()) as events:  # pyright: ignore[reportArgumentType]
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, and the work is cancelled, if the client goes away before."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes")
