"""The answer to a completion request, whole or as it grows."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from ejkernel_serve.protocol import ApiError, CompletionRequest
from ejkernel_serve.scheduler import Reason
from ejkernel_serve.text import TextStream
from ejkernel_serve.worker import Generation, NotFiniteError, StoppedError, Worker

_LOGGER = logging.getLogger(__name__)

_AHEAD = 16
"""Pieces that are made before the client has taken them."""


class Completion:
    """The answer to a request. Close it, whichever way it ends."""

    def __init__(self, wanted: CompletionRequest, generations: list[Generation], worker: Worker) -> None:
        self.wanted, self.generations, self.worker = wanted, generations, worker
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": wanted.model,
        }

    def close(self) -> None:
        """Cancel what has not ended."""
        self.worker.cancel(self.generations)

    async def ended(self) -> None:
        """Return when all choices have ended. Raises as `Generation.ended`."""
        for generation in self.generations:
            await generation.ended()

    def whole(self) -> bytes:
        """The JSON of choices that have ended, one after the other: no thread holds the interpreter for all of them at once."""
        parts: list[str] = []
        for choice in self._choices():
            choice.read()
            parts.append(json.dumps(choice.object(choice.text, 0), allow_nan=False))
        others = json.dumps({**self._head, "usage": self._usage()})
        return f'{others[:-1]}, "choices": [{", ".join(parts)}]}}'.encode()

    async def events(self) -> AsyncIterator[str]:
        """The choices' pieces as they come, then the usage if it is wanted; or what went wrong."""
        choices = self._choices()
        ready: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue(_AHEAD)
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
                    yield json.dumps({**self._head, "choices": [found]}, allow_nan=False)
            if self.wanted.stream_options.include_usage:
                yield json.dumps({**self._head, "choices": [], "usage": self._usage()})
        except Exception as error:  # noqa: BLE001 the client is told, and the log
            yield json.dumps(answer_to(error).body)
        finally:
            for reader in readers:
                reader.cancel()
        yield "[DONE]"

    def _choices(self) -> list[Choice]:
        return [Choice(index, each, self.wanted) for index, each in enumerate(self.generations)]

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(prompt) for prompt in self.wanted.prompt)
        generated = sum(len(each.request.tokens) - each.request.prompt for each in self.generations)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class Choice:
    """One of a completion's texts while it grows."""

    def __init__(self, index: int, generation: Generation, wanted: CompletionRequest) -> None:
        self.index, self.generation, self.wanted = index, generation, wanted
        self._stream = TextStream(wanted.stops)
        self._parts, self._fresh = list[str](), [wanted.echoes[index // wanted.n]]
        self.tokens: list[int] = []
        self.reason: Reason | None = None

    @property
    def text(self) -> str:
        """All that is certain."""
        return "".join([*self._parts, *self._fresh])

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """What is certain, each time that there is some text, and at the end."""
        sent = 0
        async for token, _, reason in self.generation:
            self._feed(token, reason)
            fresh = "".join(self._fresh)
            if fresh or reason is not None:
                yield self.object(fresh, sent)
                self._parts.append(fresh)
                self._fresh.clear()
                sent = len(self.tokens)

    def read(self) -> None:
        """All tokens of a request that has ended."""
        request = self.generation.request
        generated = request.generated
        for left, token in zip(range(len(generated), 0, -1), generated, strict=True):
            self._feed(token, request.reason if left == 1 else None)

    def object(self, text: str, first: int) -> dict[str, Any]:
        """With log-probabilities from token `first` on."""
        known = None
        if self.wanted.logprobs is not None:
            last = len(self.tokens)
            known = {
                "tokens": [_name(token) for token in self.tokens[first:]],
                "token_logprobs": self.generation.request.logprobs[first:last],
                "top_logprobs": None,
                "text_offset": self._stream.offsets[first:],
            }
        return {"text": text, "index": self.index, "logprobs": known, "finish_reason": self.reason}

    def _feed(self, token: int, reason: Reason | None) -> None:
        piece = self._stream.feed(token, reason)
        self.reason = reason
        self.tokens += piece.tokens
        if piece.text:
            self._fresh.append(piece.text)


def answer_to(error: Exception) -> ApiError:
    """What the client is told of an error; the log has those that nobody foresaw."""
    match error:
        case ApiError():
            return error
        case StoppedError():
            return ApiError(503, str(error), retry_after=10)
        case NotFiniteError():
            return ApiError(500, str(error), code="not_finite")
        case _:
            _LOGGER.error("a request failed", exc_info=error)
            return ApiError(500, "the server failed; its log says why")


async def _read(choice: Choice, ready: asyncio.Queue[dict[str, Any] | Exception | None]) -> None:
    """Put a choice's pieces into the queue, then None; or what went wrong."""
    try:
        async for piece in choice.pieces():
            await ready.put(piece)
        await ready.put(None)
    except Exception as error:  # noqa: BLE001 raised again by who reads the queue
        await ready.put(error)


def _name(token: int) -> str:
    """A character, or the byte of one as OpenAI writes it."""
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"
