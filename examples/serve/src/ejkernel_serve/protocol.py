"""What a completion request may say, in OpenAI's format, and how errors are answered."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ejkernel_serve.config import Sampling
from ejkernel_serve.text import tokens_of

MAX_CHOICES = 64
"""Prompts of a request times `n`."""


class ApiError(Exception):
    """An answer in OpenAI's error format: a status, a message, and the parameter that is to blame."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
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
    max_tokens: int = Field(16, ge=1)
    temperature: Number = Field(1.0, ge=0, le=2)
    top_p: Number = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: tuple[str, ...] = ()
    n: int = Field(1, ge=1)
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
        return tuple(_prompt(each) for each in given)

    @field_validator("stop", mode="plain")
    @classmethod
    def _stops(cls, given: Any) -> tuple[str, ...]:
        stops = [given] if isinstance(given, str) else given
        if not _is_list(stops) or len(stops) > 4 or not all(isinstance(each, str) and each for each in stops):
            raise ValueError("must be a string that is not empty, or a list of at most 4 of them")
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

    @property
    def stops(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(stop.encode()) for stop in self.stop)

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
        return CompletionRequest.model_validate_json(body)
    except ValidationError as errors:
        error = errors.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in error["loc"]) or None
        message = error["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{param}: {message}" if param else message, param=param) from None


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
