"""What a completion request may say, in OpenAI's format, and how errors are answered."""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ejkernel_serve.config import Sampling
from ejkernel_serve.text import text_of, tokens_of

MAX_CHOICES = 64
"""Prompts of a request times `n`."""

MAX_STOPS = 4
MAX_STOP = 1024
"""Bytes of a stop sequence."""

_MAX_FIELDS = 64
_MAX_MESSAGE = 500
"""Characters of an error's message, which may repeat what the client sent."""


class ApiError(Exception):
    """An answer in OpenAI's error format: a status, a message, and the parameter that is to blame."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, _printable(message), code
        self.param = None if param is None else _printable(param)
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


Number = Annotated[float, Field(allow_inf_nan=False)]


class CompletionRequest(BaseModel):
    """The body of `POST /v1/completions`. A null is as if it were not there; other fields are refused.

    `top_k` is not OpenAI's: draw from the k likeliest, 0 from all.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    prompt: tuple[tuple[int, ...], ...]
    max_tokens: int = Field(16, ge=1, lt=2**31)
    temperature: Number = Field(1.0, ge=0, le=2)
    top_p: Number = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: tuple[str, ...] = ()
    n: int = Field(1, ge=1, lt=2**31)
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""
    best_of: int = 1
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    logit_bias: dict[str, Any] = Field(default_factory=dict[str, Any])
    suffix: str = ""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}  # pyright: ignore[reportUnknownVariableType]

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompts(cls, given: Any) -> tuple[tuple[int, ...], ...]:
        if isinstance(given, str) or (_is_list(given) and given and all(type(each) is int for each in given)):
            given = [given]
        if not _is_list(given) or not given:
            raise ValueError("must be a string, a list of tokens, or a list of these that is not empty")
        if len(given) > MAX_CHOICES:
            raise ValueError(f"has {len(given)} prompts; at most {MAX_CHOICES} are possible")
        return tuple(_prompt(each) for each in given)

    @field_validator("stop", mode="plain")
    @classmethod
    def _stops(cls, given: Any) -> tuple[str, ...]:
        stops = [given] if isinstance(given, str) else given
        if not _is_list(stops) or len(stops) > MAX_STOPS or not all(isinstance(each, str) and each for each in stops):
            raise ValueError(f"must be a string that is not empty, or a list of at most {MAX_STOPS} of them")
        longest = max((len(each.encode()) for each in stops), default=0)
        if longest > MAX_STOP:
            raise ValueError(f"has a sequence of {longest} bytes; at most {MAX_STOP} are possible")
        return tuple(stops)

    @field_validator("best_of", "frequency_penalty", "presence_penalty", "logit_bias", "suffix", "logprobs")
    @classmethod
    def _neutral(cls, given: Any, info: Any) -> Any:
        neutral = {"best_of": 1, "logprobs": 0, "logit_bias": {}, "suffix": ""}.get(info.field_name, 0)
        if given != neutral:
            hint = ", which gives the log-probability of each token that was drawn" if info.field_name == "logprobs" else ""
            raise ValueError(f"is not supported; leave it out, or give {neutral!r}{hint}")
        return given

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise ApiError(
                400, f"n times the number of prompts is {len(self.prompt) * self.n}; at most {MAX_CHOICES}", param="n"
            )
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "echo with logprobs is not supported: prompts have no log-probabilities", param="echo")
        return self

    @functools.cached_property
    def stops(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(stop.encode()) for stop in self.stop)

    @functools.cached_property
    def echoes(self) -> tuple[str, ...]:
        """What the text after each prompt begins with."""
        return tuple(text_of(prompt) if self.echo else "" for prompt in self.prompt)

    def requests(self) -> list[tuple[tuple[int, ...], Sampling]]:
        """One for each choice: `n` for the first prompt, then those of the next one."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return [
            (prompt, Sampling(self.max_tokens, self.temperature, self.top_k, self.top_p, _seed(seed, number), self.stops))
            for prompt in self.prompt
            for number in range(self.n)
        ]


def parse(body: bytes) -> CompletionRequest:
    """Raises:
    ApiError: 400, naming the first field that does not fit.
    """
    try:
        return CompletionRequest.model_validate(_json_object(body))
    except ValidationError as errors:
        error = errors.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in error["loc"]) or None
        message = error["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{param}: {message}" if param else message, param=param) from None


def _json_object(body: bytes) -> dict[str, Any]:
    """By the letter of RFC 8259, and no field twice, of which parsers take either."""
    try:
        found = json.loads(body.decode(), object_pairs_hook=_fields, parse_constant=_no_number)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:  # of JSON, of UTF-8, and of integers of thousands of digits
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object, with the fields of a completion request")
    return found  # pyright: ignore[reportUnknownVariableType]


def _fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MAX_FIELDS:
        raise ApiError(400, f"an object of the body has {len(pairs)} fields; at most {_MAX_FIELDS} are possible")
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ApiError(400, f"the field {name!r} is given twice", param=name)
        found[name] = value
    return found


def _no_number(word: str) -> float:
    raise ApiError(400, f"the body is no JSON: it has {word}, which is no number there")


def _printable(text: str) -> str:
    """What may be part of an answer, however a client chose it."""
    short = text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
    return short.encode(errors="backslashreplace").decode()


def _prompt(given: Any) -> tuple[int, ...]:
    if isinstance(given, str):
        return tokens_of(given)
    if not _is_list(given) or not given or not all(type(token) is int for token in given):
        raise ValueError("must be a string, a list of tokens, or a list of these that is not empty")
    return tuple(given)


def _is_list(given: Any) -> bool:
    return isinstance(given, list)


def _seed(seed: int, choice: int) -> int:
    """Another one for each choice."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest(), "big")
