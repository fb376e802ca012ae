"""What a request may say, in OpenAI's format, and how errors are answered."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ejkernel_serve.config import MAX_BIAS, MAX_PENALTY, MAX_REPETITION, MIN_REPETITION, Sampling
from ejkernel_serve.grammar import Guide
from ejkernel_serve.vocabulary import BYTES, Vocabulary

MAX_CHOICES = 64
"""Prompts of a request times `n`, or `best_of`."""

MAX_STOPS = 16
"""OpenAI has 4, and clients that evaluate models send more."""

MAX_STOP = 1024
"""Bytes of a stop sequence."""

_MAX_FIELDS = 300
"""Of an object: `logit_bias` may name every byte."""

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


class JsonSchema(BaseModel):
    """`strict` and the texts beside the schema, which the model does not read, change nothing."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: str = ""
    description: str = ""
    strict: bool = True
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")


class ResponseFormat(BaseModel):
    """What the text must be: anything, a JSON object, or JSON of a schema."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _fits(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("has json_schema where type is json_schema, and nowhere else")
        return self

    def guide(self, vocabulary: Vocabulary) -> Guide | None:
        """Raises:
        ApiError: no grammar can be made of the schema.
        """
        if self.type == "text":
            return None
        try:
            return Guide.of_schema({"type": "object"} if self.json_schema is None else self.json_schema.schema_, vocabulary)
        except ValueError as error:
            raise ApiError(400, f"response_format: {error}", param="response_format") from None


Number = Annotated[float, Field(allow_inf_nan=False)]


class GenerationRequest(BaseModel):
    """What completions and chats have in common. A null is as if it were not there; other fields are refused.

    `top_k`, `min_p` and `repetition_penalty` are not OpenAI's.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    source: ClassVar[str] = ""
    """The field that prompts are made of."""

    model: str
    temperature: Number = Field(1.0, ge=0, le=2)
    top_p: Number = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: Number = Field(0.0, ge=0, le=1)
    presence_penalty: Number = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: Number = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    repetition_penalty: Number = Field(1.0, ge=MIN_REPETITION, le=MAX_REPETITION)
    logit_bias: dict[int, float] = Field(default_factory=dict[int, float])
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: tuple[str, ...] = ()
    n: int = Field(1, ge=1, lt=2**31)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat(type="text")
    user: str = ""

    _vocabulary: Vocabulary = PrivateAttr(BYTES)

    @property
    def vocabulary(self) -> Vocabulary:
        """Of the model."""
        return self._vocabulary

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        raise NotImplementedError

    @property
    def most(self) -> int:
        """Tokens to generate at most."""
        raise NotImplementedError

    @property
    def candidates(self) -> int:
        """Texts that are generated after each prompt, of which `n` are answered."""
        return self.n

    @property
    def scores(self) -> bool:
        """The log-probabilities of the prompts are wanted."""
        return False

    @property
    def likeliest(self) -> int:
        """Tokens that are wanted in place of each."""
        return 0

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}  # pyright: ignore[reportUnknownVariableType]

    @field_validator("stop", mode="plain")
    @classmethod
    def _stops(cls, given: Any) -> tuple[str, ...]:
        stops = [given] if isinstance(given, str) else given
        if not is_list(stops) or len(stops) > MAX_STOPS or not all(isinstance(each, str) and each for each in stops):
            raise ValueError(f"must be a string that is not empty, or a list of at most {MAX_STOPS} of them")
        longest = max((len(each.encode()) for each in stops), default=0)
        if longest > MAX_STOP:
            raise ValueError(f"has a sequence of {longest} bytes; at most {MAX_STOP} are possible")
        return tuple(stops)

    @field_validator("logit_bias", mode="plain")
    @classmethod
    def _biases(cls, given: Any, info: ValidationInfo) -> dict[int, float]:
        if not isinstance(given, dict):
            raise ValueError("must be an object of tokens and what to add to their logits")
        size = _vocabulary_of(info).size
        return {_token(name, size): _bias(value) for name, value in given.items()}  # pyright: ignore[reportUnknownVariableType]

    @model_validator(mode="after")
    def _of_vocabulary(self, info: ValidationInfo) -> GenerationRequest:
        self._vocabulary = _vocabulary_of(info)
        return self

    @functools.cached_property
    def guide(self) -> Guide | None:
        """Raises:
        ApiError: as `ResponseFormat.guide`.
        """
        return self.response_format.guide(self._vocabulary)

    @functools.cached_property
    def stops(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(stop.encode()) for stop in self.stop)

    def prepare(self) -> None:
        """Compute, in whichever thread this is, what the loop's would else have to."""
        _ = self.stops, self.guide

    def requests(self) -> list[tuple[tuple[int, ...], Sampling]]:
        """One for each candidate: those of the first prompt, then those of the next one."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        sampling = Sampling(
            self.most,
            self.temperature,
            self.top_k,
            self.top_p,
            stop=self.stops,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            top_logprobs=self.likeliest,
            prompt_logprobs=self.scores,
            guide=self.guide,
            spelling=self._vocabulary.stop_spelling,
        )
        return [
            (prompt, dataclasses.replace(sampling, seed=_seed(seed, number)))
            for prompt in self.prompts
            for number in range(self.candidates)
        ]


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    source: ClassVar[str] = "prompt"

    prompt: tuple[tuple[int, ...], ...]
    max_tokens: int = Field(16, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, lt=2**31)
    suffix: str = ""

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return self.prompt

    @property
    def most(self) -> int:
        return self.max_tokens

    @property
    def candidates(self) -> int:
        return self.best_of or self.n

    @property
    def scores(self) -> bool:
        return self.echo and self.logprobs is not None

    @property
    def likeliest(self) -> int:
        return self.logprobs or 0

    @functools.cached_property
    def echoes(self) -> tuple[str, ...]:
        """What the text after each prompt begins with."""
        return tuple(self._vocabulary.text(prompt) if self.echo else "" for prompt in self.prompt)

    def prepare(self) -> None:
        super().prepare()
        _ = self.echoes

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompts(cls, given: Any, info: ValidationInfo) -> tuple[tuple[int, ...], ...]:
        if isinstance(given, str) or (is_list(given) and given and all(type(each) is int for each in given)):
            given = [given]
        if not is_list(given) or not given:
            raise ValueError("must be a string, a list of tokens, or a list of these that is not empty")
        if len(given) > MAX_CHOICES:
            raise ValueError(f"has {len(given)} prompts; at most {MAX_CHOICES} are possible")
        return tuple(_prompt(each, _vocabulary_of(info)) for each in given)

    @field_validator("suffix")
    @classmethod
    def _neutral(cls, given: str) -> str:
        if given:
            raise ValueError("is not supported; leave it out, or give ''")
        return given

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
        if not self.max_tokens and not self.scores:
            raise ApiError(400, "max_tokens is 0, which needs echo and logprobs; else give at least 1", param="max_tokens")
        if self.candidates < self.n:
            raise ApiError(400, f"best_of is {self.best_of} and n is {self.n}; give best_of of at least n", param="best_of")
        if self.candidates > self.n and self.stream:
            raise ApiError(400, "best_of above n is known when all has been generated; leave out stream", param="best_of")
        check_choices(self, MAX_CHOICES)
        return self


def check_choices(wanted: GenerationRequest, possible: int) -> None:
    """Raises:
    ApiError: more texts than so many.
    """
    name = "n" if wanted.candidates == wanted.n else "best_of"
    choices = len(wanted.prompts) * wanted.candidates
    if choices > possible:
        raise ApiError(400, f"{name} times the number of prompts is {choices}; at most {possible} are possible", param=name)


Wanted = TypeVar("Wanted", bound=GenerationRequest)


def parse_as(kind: type[Wanted], body: bytes, vocabulary: Vocabulary = BYTES) -> Wanted:
    """A request to a model of this vocabulary.

    Raises:
        ApiError: 400, naming the first field that does not fit.
    """
    try:
        return kind.model_validate(_json_object(body), context=vocabulary)
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
        raise ApiError(400, "the body must be a JSON object, with the fields of a request")
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


def _vocabulary_of(info: ValidationInfo) -> Vocabulary:
    return info.context or BYTES


def _prompt(given: Any, vocabulary: Vocabulary) -> tuple[int, ...]:
    if isinstance(given, str):
        return vocabulary.encode(given)
    if not is_list(given) or not given or not all(type(token) is int for token in given):
        raise ValueError("must be a string, a list of tokens, or a list of these that is not empty")
    return tuple(given)


def _token(name: Any, size: int) -> int:
    if not (isinstance(name, str) and name.isascii() and name.isdecimal() and len(name) < 10) or int(name) >= size:
        raise ValueError(f"has the key {name!r}; give tokens in [0, {size}) as strings")
    if str(int(name)) != name:
        raise ValueError(f"has the key {name!r}; give tokens without leading zeros")
    return int(name)


def _bias(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_BIAS:
        raise ValueError(f"has the value {value!r}; give numbers in [-{MAX_BIAS}, {MAX_BIAS}]")
    return float(value)


def is_list(given: Any) -> bool:
    return isinstance(given, list)


def _seed(seed: int, choice: int) -> int:
    """Another one for each choice."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest(), "big")
