"""OpenAI's endpoints of completions and chats over an engine, as an ASGI application.

A client that goes away, however it does, has its requests cancelled and their pages released. More requests than may wait are
answered with 429, and with 503 while the engine does not run. What grows with a request (JSON, tokens, whole answers) is computed
in threads, so that the loop has time for everybody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ejkernel_serve.chat import ChatRequest, ChatTemplate
from ejkernel_serve.chat_completion import ChatCompletion
from ejkernel_serve.completion import Completion, TextChoice, answer_to
from ejkernel_serve.config import Limits
from ejkernel_serve.engine import Engine
from ejkernel_serve.protocol import ApiError, CompletionRequest, GenerationRequest, check_choices, parse_as
from ejkernel_serve.scheduler import QueueFullError
from ejkernel_serve.transport import Bodies, EventStream, unless_gone
from ejkernel_serve.worker import Generation, StoppedError, Worker

__all__ = ["MAX_BODY", "Service", "TextChoice", "application"]

T = TypeVar("T")
Admitted = tuple[GenerationRequest, list[Generation]]

MAX_BODY = Limits().body_bytes
"""Bytes of a request, by default."""


def application(engine: Engine, name: str, limits: Limits | None = None, template: ChatTemplate | None = None) -> Starlette:
    """The endpoints of a model called `name`; without a template, chats have the default one."""
    worker = Worker(engine)
    service = Service(worker, name, limits or Limits(), template or ChatTemplate.load())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        await worker.start()
        try:
            yield
        finally:
            await worker.stop()
            service.close()

    return Starlette(
        routes=[
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/chat/completions", service.chats, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/health", service.health),
        ],
        exception_handlers={ApiError: _answer, HTTPException: _answer_http, Exception: _answer_failure},
        lifespan=lifespan,
    )


class Service:
    """The routes."""

    def __init__(self, worker: Worker, name: str, limits: Limits, template: ChatTemplate) -> None:
        self.worker, self.name, self.created = worker, name, int(time.time())
        self._template = template
        self._bodies = Bodies(limits)
        self._threads = ThreadPoolExecutor(2, "ejkernel-serve-requests")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest, Completion)

    async def chats(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest, ChatCompletion)

    async def _answer(self, request: Request, kind: type[GenerationRequest], answer: type[Completion]) -> Response:
        try:
            async with self._bodies.read(request) as body:
                wanted, generations = await self._admitted(kind, body)
        except ClientDisconnect:
            return Response()  # to nobody
        completion = answer(wanted, generations, self.worker)
        if wanted.stream:
            return EventStream(completion)
        try:
            whole = await unless_gone(request.receive, self._whole(completion))
        except Exception as error:
            raise answer_to(error) from error
        finally:
            completion.close()
        return Response() if whole is None else Response(whole, media_type="application/json")

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
            known = name if len(name) <= 100 else f"{name[:100]}..."
            raise ApiError(404, f"there is no model {known!r}; this is {self.name!r}", param="model", code="model_not_found")

    async def _whole(self, completion: Completion) -> bytes:
        await completion.ended()
        return await asyncio.wrap_future(self._threads.submit(completion.whole))

    async def _admitted(self, kind: type[GenerationRequest], body: bytes) -> Admitted:
        """What a body asks for, in the engine's queue. If this is cancelled meanwhile, so is that."""
        admitted = self._threads.submit(self._admit, kind, body)
        try:
            return await asyncio.wrap_future(admitted)
        except asyncio.CancelledError:
            loop = asyncio.get_running_loop()
            admitted.add_done_callback(lambda done: _if_it_worked(done, lambda it: loop.call_soon_threadsafe(self._drop, it)))
            raise

    def _drop(self, admitted: Admitted) -> None:
        self.worker.cancel(admitted[1])

    def _admit(self, kind: type[GenerationRequest], body: bytes) -> Admitted:
        wanted = parse_as(kind, body, self.worker.engine.vocabulary)
        self._check_model(wanted.model)
        if isinstance(wanted, ChatRequest):
            wanted.fit(self._template, self.worker.engine.config.max_length)
        return wanted, self._submit(wanted)

    def _submit(self, wanted: GenerationRequest) -> list[Generation]:
        config = self.worker.engine.config
        check_choices(wanted, config.capacity)
        longest, possible = max(len(prompt) for prompt in wanted.prompts), config.max_length
        if longest + wanted.most > possible:
            message = f"the prompt has {longest} tokens and max_tokens is {wanted.most}; together at most {possible} fit"
            raise ApiError(400, message, param=wanted.source, code="context_length_exceeded")
        wanted.prepare()
        try:
            return self.worker.submit(wanted.requests())
        except QueueFullError as error:
            raise ApiError(429, str(error), code="queue_full", retry_after=1) from None
        except StoppedError as error:
            raise answer_to(error) from None
        except ValueError as error:
            raise ApiError(400, str(error), param=wanted.source) from None


def _if_it_worked(done: Future[T], then: Callable[[T], object]) -> None:
    if not done.cancelled() and done.exception() is None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the engine
            then(done.result())


async def _answer(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").body
    return JSONResponse(body, error.status_code, error.headers)


async def _answer_failure(_: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "the server failed; its log says why").body, 500)
