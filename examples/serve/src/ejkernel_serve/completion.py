"""The answer to a request, whole or as it grows, and how completions are written."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ejkernel_serve.protocol import ApiError, CompletionRequest, GenerationRequest
from ejkernel_serve.scheduler import Reason, Top
from ejkernel_serve.text import TextStream
from ejkernel_serve.worker import Generation, NotFiniteError, StoppedError, Worker

_LOGGER = logging.getLogger(__name__)

_AHEAD = 16
"""Pieces that are made before the client has taken them."""


class Completion:
    """The answer to a request. Close it, whichever way it ends."""

    prefix, whole_kind, part_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, wanted: GenerationRequest, generations: list[Generation], worker: Worker) -> None:
        self.wanted, self.generations, self.worker = wanted, generations, worker
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": wanted.model}

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
        for choice in self._choices(self._best()):
            choice.read()
            parts.append(json.dumps(choice.whole(), allow_nan=False))
        others = json.dumps({**self._head, "object": self.whole_kind, "usage": self._usage()})
        return f'{others[:-1]}, "choices": [{", ".join(parts)}]}}'.encode()

    async def events(self) -> AsyncIterator[str]:
        """The choices' pieces as they come, then the usage if it is wanted; or what went wrong."""
        head = {**self._head, "object": self.part_kind}
        choices = self._choices(self.generations)
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
                    yield json.dumps({**head, "choices": [found]}, allow_nan=False)
            if self.wanted.stream_options.include_usage:
                yield json.dumps({**head, "choices": [], "usage": self._usage()})
        except Exception as error:  # noqa: BLE001 the client is told, and the log
            yield json.dumps(answer_to(error).body)
        finally:
            for reader in readers:
                reader.cancel()
        yield "[DONE]"

    def choice(self, index: int, generation: Generation) -> Choice:
        assert isinstance(self.wanted, CompletionRequest)
        return TextChoice(index, generation, self.wanted)

    def _choices(self, generations: Sequence[Generation]) -> list[Choice]:
        return [self.choice(index, each) for index, each in enumerate(generations)]

    def _best(self) -> list[Generation]:
        """Of each prompt's candidates the `n` with the highest mean log-probabilities, the highest first, or all as they are."""
        number, candidates = self.wanted.n, self.wanted.candidates
        if number == candidates:
            return self.generations
        groups = (self.generations[start : start + candidates] for start in range(0, len(self.generations), candidates))
        return [each for group in groups for each in sorted(group, key=_mean_logprob, reverse=True)[:number]]

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(prompt) for prompt in self.wanted.prompts)
        generated = sum(len(each.request.tokens) - each.request.prompt for each in self.generations)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class Choice:
    """One of an answer's texts while it grows. Subclasses say how it is written."""

    def __init__(self, index: int, generation: Generation, wanted: GenerationRequest, echo: str = "") -> None:
        """`echo`: what the text begins with."""
        self.index, self.generation = index, generation
        self._stream = TextStream(wanted.stops, wanted.vocabulary)
        self._parts, self._fresh = list[str](), [echo]
        self.tokens: list[int] = []
        self.reason: Reason | None = None

    @property
    def text(self) -> str:
        """All that is certain."""
        return "".join([*self._parts, *self._fresh])

    def whole(self) -> dict[str, Any]:
        """The choice, of which nothing has been sent, when it has ended."""
        raise NotImplementedError

    def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """What is certain, each time that there is some text, and at the end."""
        raise NotImplementedError

    async def growth(self) -> AsyncIterator[tuple[str, int]]:
        """The text that has become certain, each time that there is some and at the end, and the number of its first token."""
        sent = 0
        async for token, _, reason in self.generation:
            self._feed(token, reason)
            fresh = "".join(self._fresh)
            if fresh or reason is not None:
                yield fresh, sent
                self._parts.append(fresh)
                self._fresh.clear()
                sent = len(self.tokens)
        if self.reason is None:  # nothing was to be generated
            self.reason = self.generation.request.reason
            yield "".join(self._fresh), 0

    def read(self) -> None:
        """All tokens of a request that has ended."""
        request = self.generation.request
        generated = request.generated
        for left, token in zip(range(len(generated), 0, -1), generated, strict=True):
            self._feed(token, request.reason if left == 1 else None)
        self.reason = request.reason

    def _feed(self, token: int, reason: Reason | None) -> None:
        piece = self._stream.feed(token, reason)
        self.reason = reason
        self.tokens += piece.tokens
        if piece.text:
            self._fresh.append(piece.text)


class TextChoice(Choice):
    """A choice of `POST /v1/completions`."""

    def __init__(self, index: int, generation: Generation, wanted: CompletionRequest) -> None:
        super().__init__(index, generation, wanted, wanted.echoes[index // wanted.n])
        self.wanted = wanted

    def _feed(self, token: int, reason: Reason | None) -> None:
        """The token that ended the text has log-probabilities too: who scores texts counts one for each generated token."""
        super()._feed(token, reason)
        self.tokens += self._stream.end

    def whole(self) -> dict[str, Any]:
        return self.object(self.text, 0)

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        async for text, first in self.growth():
            yield self.object(text, first)

    def object(self, text: str, first: int) -> dict[str, Any]:
        """With log-probabilities from token `first` on, and those of the prompt if nothing has been sent yet."""
        known = None
        if self.wanted.logprobs is not None:
            request, last = self.generation.request, len(self.tokens)
            top = request.top_logprobs[first:last] if self.wanted.likeliest else ()
            known = self._known(self.tokens[first:], request.logprobs[first:last], top)
            known["text_offset"] = self._stream.offsets[first:]
            if self.wanted.scores:
                start = len(self.wanted.echoes[self.index // self.wanted.n])
                known["text_offset"] = [start + offset for offset in known["text_offset"]]
                if not self._parts:
                    known = _joined(self._prompt(), known)
        return {"text": text, "index": self.index, "logprobs": known, "finish_reason": self.reason}

    def _prompt(self) -> dict[str, Any]:
        """The log-probabilities of the prompt; the first token has none."""
        request = self.generation.request
        first, *others = request.tokens[: request.prompt]
        known = self._known(others, request.prompt_logprobs, request.prompt_top_logprobs)
        name, stream = self.wanted.vocabulary.name, TextStream((), self.wanted.vocabulary, begins=True)
        for token in (first, *others):
            stream.feed(token, None)
        nothing = {"tokens": [name(first)], "token_logprobs": [None], "top_logprobs": [None] if self.wanted.likeliest else None}
        return {**_joined({**nothing, "text_offset": []}, {**known, "text_offset": []}), "text_offset": stream.offsets}

    def _known(self, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Top]) -> dict[str, Any]:
        """As OpenAI writes it: the token itself is among the likeliest, be it so or not."""
        likeliest = None
        if self.wanted.likeliest:
            likeliest = [
                self._by_name(token, {**dict(places), token: logprob})
                for token, logprob, places in zip(tokens, logprobs, top, strict=True)
            ]
        names = [self.wanted.vocabulary.name(token) for token in tokens]
        return {"tokens": names, "token_logprobs": [*logprobs], "top_logprobs": likeliest}

    def _by_name(self, token: int, logprobs: dict[int, float]) -> dict[str, float]:
        """Of two tokens with one text, the first has a name of another kind; `token` never does."""
        names = {each: self.wanted.vocabulary.name(each) for each in logprobs}
        last = {name: each for each, name in names.items()} | {names[token]: token}
        return {name if last[name] == each else f"token_id:{each}": logprobs[each] for each, name in names.items()}


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


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of tokens, then of those after them."""
    return {key: None if value is None else [*value, *second[key]] for key, value in first.items()}


def _mean_logprob(generation: Generation) -> float:
    logprobs = generation.request.logprobs
    return sum(logprobs) / max(len(logprobs), 1)
