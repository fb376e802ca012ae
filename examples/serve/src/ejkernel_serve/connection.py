"""uvicorn's HTTP/1.1 connection for clients that are strangers: it waits only so long, and works only so much at a time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from ejkernel_serve.config import Limits
from ejkernel_serve.protocol import ApiError

_SLICE = 4096
"""Bytes that are parsed in one turn of the loop: in chunks of one byte each, these cost milliseconds."""

_MOST_FRAMING = 1 << 15
"""Bytes of a body's chunks that are no data."""

_CHECKS = 4
"""Within the shortest of the times that are limited."""


def configuration(application: Any, limits: Limits, **options: Any) -> uvicorn.Config:
    """Of a server with these limits."""

    def connection(*args: Any, **named: Any) -> Connection:
        return Connection(*args, limits=limits, **named)

    return uvicorn.Config(application, http=connection, ws="none", **options)  # pyright: ignore[reportArgumentType]


class Connection(H11Protocol):
    """Answers 408 or closes where a client takes too long to send or to read, whether by malice or because it is no more."""

    def __init__(self, *args: Any, limits: Limits, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits = limits
        times = (limits.head_seconds, limits.body_seconds, limits.write_seconds, limits.linger_seconds)
        self._pause = min(times) / _CHECKS
        self._unread = bytearray()
        self._framing = 0
        self._check: asyncio.TimerHandle | None = None
        self._states: dict[str, float] = {}
        """What is so now, by the time since when."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > 2 * self._limits.connections:
            transport.abort()
        elif len(self.connections) > self._limits.connections:
            self.app = _busy  # pyright: ignore[reportAttributeAccessIssue]
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread.clear()
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        waiting = bool(self._unread)
        self._unread += data
        if not waiting:
            self._parse()

    def _parse(self) -> None:
        """A slice of what has come; the rest, when others have had their turn."""
        part = bytes(self._unread[:_SLICE])
        cycle = self.cycle
        before = len(cycle.body) if cycle else 0
        super().data_received(part)
        if self.cycle is cycle and cycle and self.conn.their_state is h11.SEND_BODY:
            self._framing += len(part) - max(len(cycle.body) - before, 0)
            if self._framing > _MOST_FRAMING and self.conn.our_state is not h11.DONE:
                self.send_400_response("the chunks of the body are too small")
        else:
            self._framing = 0
        del self._unread[:_SLICE]
        if self.transport.is_closing():
            self._unread.clear()
        elif self._unread:
            self.transport.pause_reading()
            self.loop.call_soon(self._parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def on_response_complete(self) -> None:
        self._states.clear()
        super().on_response_complete()

    def resume_writing(self) -> None:
        self._states.pop("write", None)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def shutdown(self) -> None:
        if not self.cycle or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        self.transport.close()

    def _look(self) -> None:
        """Close the connection if something takes too long, else look again later."""
        limits, ours, theirs = self._limits, self.conn.our_state, self.conn.their_state
        answered = ours in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)
        closing = self.transport.is_closing()
        # a client has its answer, and sends on; has not sent all that is to be answered; does not read
        lingers = self._lasts("linger", answered and theirs is h11.SEND_BODY)
        body = self._lasts("body", not answered and theirs is h11.SEND_BODY)
        head = self._lasts("head", theirs is h11.IDLE and not answered)
        unread = self._lasts("write", self.flow.write_paused or closing)
        busy = self.app is _busy
        if (
            unread > limits.write_seconds
            or lingers > limits.linger_seconds
            or body > limits.body_seconds + limits.linger_seconds
        ):
            self.transport.abort()
        elif not closing and head > (limits.linger_seconds if busy else limits.head_seconds):
            self._refuse(408, f"the headers were not whole after {limits.head_seconds:g} seconds")
        self._check = self.loop.call_later(self._pause, self._look)

    def _lasts(self, name: str, so: bool) -> float:
        """Seconds for which this has been so."""
        now = self.loop.time()
        since = self._states.setdefault(name, now)
        if not so:
            self._states[name] = since = now
        return now - since

    def _refuse(self, status: int, message: str) -> None:
        """Answer, if nothing has been answered yet, and close."""
        body = json.dumps(ApiError(status, message).body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            parts = (self.conn.send(event) for event in (response, h11.Data(data=body), h11.EndOfMessage()))
            self.transport.write(b"".join(part or b"" for part in parts))
        self.transport.close()


async def _busy(_: Any, __: Any, send: Any) -> None:
    """The application of connections that are too many."""
    body = json.dumps(ApiError(429, "too many connections are open; try again later").body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"1"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 429, "headers": headers})
    await send({"type": "http.response.body", "body": body})
