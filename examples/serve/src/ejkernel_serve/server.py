"""OpenAI's completion endpoint over an engine, as an ASGI application.

A client that goes away, however it does, has its requests cancelled and their pages released. More requests than may wait are
answered with 429, and with 503 while the engine does not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ejkernel_serve.engine import Engine
from ejkernel_serve.protocol import ApiError, CompletionRequest, parse
from ejkernel_serve.scheduler import QueueFullError
from ejkernel_serve.text import TextStream, text_of
from ejkernel_serve.worker import Generation, StoppedError, Worker

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY = 1 << 20
"""Bytes of a request."""


def application(engine: Engine, name: str) -> Starlette:
    """The endpoint of a model called `name`."""
    worker = Worker(engine)
    service = Service(worker, name)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        await worker.start()
        try:
            yield
        finally:
            await worker.stop()

    return Starlette(
        routes=[
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/health", service.health),
        ],
        exception_handlers={ApiError: _answer, HTTPException: _answer_http, Exception: _answer_failure},
        lifespan=lifespan,
    )


class Service:
    """The routes."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker, self.name, self.created = worker, name, int(time.time())

    async def completions(self, request: Request) -> Response:
        try:
            wanted = parse(await _body(request))
        except ClientDisconnect:
            return Response()  # to nobody
        self._check_model(wanted.model)
        completion = Completion(wanted, self._submit(wanted), self.worker)
        if wanted.stream:
            return EventStream(completion)
        try:
            whole = await unless_gone(request.receive, completion.whole())
        finally:
            completion.close()
        return Response() if whole is None else JSONResponse(whole)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    async def health(self, _: Request) -> Response:
        failure, scheduler = self.worker.failure, self.worker.engine.scheduler
        state = {
            "status": "ok" if failure is None else str(failure),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "pages": scheduler.cache.pages,
            "pages_held": scheduler.cache.held,
        }
        return JSONResponse(state, 200 if failure is None else 503)

    def _card(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "ejkernel"}

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(404, f"there is no model {name!r}; this is {self.name!r}", param="model", code="model_not_found")

    def _submit(self, wanted: CompletionRequest) -> list[Generation]:
        config, choices = self.worker.engine.config, len(wanted.prompt) * wanted.n
        if choices > config.capacity:
            raise ApiError(
                400, f"n times the number of prompts is {choices}; at most {config.capacity} are possible", param="n"
            )
        longest, possible = max(len(prompt) for prompt in wanted.prompt), config.max_length
        if longest + wanted.max_tokens > possible:
            message = f"the prompt has {longest} tokens and max_tokens is {wanted.max_tokens}; together at most {possible} fit"
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        try:
            return self.worker.submit(wanted.requests())
        except QueueFullError as error:
            raise ApiError(429, str(error), code="queue_full", retry_after=1) from None
        except StoppedError as error:
            raise ApiError(503, str(error), retry_after=10) from None
        except ValueError as error:
            raise ApiError(400, str(error), param="prompt") from None


class Completion:
    """The answer to a request, whole or in pieces. Close it, whichever way it ends."""

    def __init__(self, wanted: CompletionRequest, generations: list[Generation], worker: Worker) -> None:
        self.wanted, self.generations, self.worker = wanted, generations, worker
        self.head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}

    def close(self) -> None:
        """Cancel what has not ended."""
        self.worker.cancel(self.generations)

    async def whole(self) -> dict[str, Any]:
        """Raises ApiError if the engine stops."""
        choices = [Choice(index, each, self.wanted) for index, each in enumerate(self.generations)]
        try:
            for choice in choices:
                async for _ in choice.pieces():
                    pass
        except StoppedError as error:
            raise ApiError(503, str(error), retry_after=10) from None
        return self._object([choice.object(choice.text, 0) for choice in choices], self._usage())

    async def events(self) -> AsyncIterator[str]:
        """The choices' pieces as they come, then the usage if it is wanted."""
        choices = [Choice(index, each, self.wanted) for index, each in enumerate(self.generations)]
        ready: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()
        readers = [asyncio.ensure_future(_read(choice, ready)) for choice in choices]
        try:
            left = len(choices)
            while left:
                found = await ready.get()
                if found is None:
                    left -= 1
                elif isinstance(found, Exception):
                    raise found
                else:
                    yield json.dumps(self._object([found]))
            if self.wanted.stream_options.include_usage:
                yield json.dumps(self._object([], self._usage()))
        except StoppedError as error:
            yield json.dumps(ApiError(503, str(error)).body)
        finally:
            for reader in readers:
                reader.cancel()
        yield "[DONE]"

    def _object(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        return {**self.head, "model": self.wanted.model, "choices": choices, **({"usage": usage} if usage else {})}

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(prompt) for prompt in self.wanted.prompt)
        generated = sum(len(each.request.generated) for each in self.generations)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class Choice:
    """One of a completion's texts while it grows."""

    def __init__(self, index: int, generation: Generation, wanted: CompletionRequest) -> None:
        self.index, self.generation, self.wanted = index, generation, wanted
        self.text = text_of(wanted.prompt[index // wanted.n]) if wanted.echo else ""
        self.tokens: list[int] = []
        self.offsets: list[int] = []
        self.reason: str | None = None

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """What is certain, each time that there is some text, and at the end."""
        stream, sent, sent_tokens = TextStream(self.wanted.stops), 0, 0
        async for token, _, reason in self.generation:
            piece = stream.feed(token, reason)
            self.offsets += [len(self.text)] * len(piece.tokens)
            self.text, self.reason = self.text + piece.text, reason
            self.tokens += piece.tokens
            if len(self.text) > sent or reason is not None:
                yield self.object(self.text[sent:], sent_tokens)
                sent, sent_tokens = len(self.text), len(self.tokens)

    def object(self, text: str, first: int) -> dict[str, Any]:
        """With log-probabilities from token `first` on."""
        known = None
        if self.wanted.logprobs is not None:
            known = {
                "tokens": [_name(token) for token in self.tokens[first:]],
                "token_logprobs": self.generation.request.logprobs[first : len(self.tokens)],
                "top_logprobs": None,
                "text_offset": self.offsets[first:],
            }
        return {"text": text, "index": self.index, "logprobs": known, "finish_reason": self.reason}


class EventStream(Response):
    """Server-sent events, until there are no more or nobody listens."""

    def __init__(self, completion: Completion) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")
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


async def _read(choice: Choice, ready: asyncio.Queue[Any]) -> None:
    """Put a choice's pieces into the queue, then None; or what went wrong."""
    try:
        async for piece in choice.pieces():
            ready.put_nowait(piece)
        ready.put_nowait(None)
    except StoppedError as error:
        ready.put_nowait(error)


async def _body(request: Request) -> bytes:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise ApiError(413, f"the body has more than {MAX_BODY} bytes")
        parts.append(part)
    return b"".join(parts)


def _name(token: int) -> str:
    """A character, or the byte of one as OpenAI writes it."""
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


async def _answer(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").body
    return JSONResponse(body, error.status_code, error.headers)


async def _answer_failure(_: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "the server failed; its log says why").body, 500)
