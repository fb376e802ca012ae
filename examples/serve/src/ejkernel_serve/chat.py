"""What a chat request may say, in OpenAI's format, and how its messages become a prompt."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from ejkernel_serve.config import MAX_TOP_LOGPROBS
from ejkernel_serve.protocol import MAX_CHOICES, ApiError, GenerationRequest, is_list
from ejkernel_serve.vocabulary import BYTES, Vocabulary

DEFAULT_TEMPLATE = Path(__file__).with_name("chat.jinja")

MAX_MESSAGES = 1024


class Message(BaseModel):
    """A message. Parts of its content are joined."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, given: Any) -> Any:
        if not is_list(given):
            return given
        texts = [
            part["text"]
            for part in given
            if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"
        ]
        if len(texts) < len(given) or not all(isinstance(text, str) for text in texts):
            raise ValueError('must be a string, or a list of parts {"type": "text", "text": ...}')
        return "".join(texts)

    @field_validator("content")
    @classmethod
    def _encodable(cls, given: str) -> str:
        given.encode()  # raises a ValueError of half a surrogate pair
        return given


class ChatTemplate:
    """A Jinja2 template that gets `messages` and `add_generation_prompt`, and writes what the model reads.

    It runs in a sandbox, with what templates of public models call: `raise_exception(text)` refuses the messages, and
    `strftime_now(format)` tells the date. Marks are its own to write, as `bos_token`; where tokens are bytes, the mark before a
    document precedes what it writes.
    """

    def __init__(self, source: str) -> None:
        """Raises:
        ValueError: the source is no template.
        """
        extensions = ["jinja2.ext.loopcontrols", GenerationTag]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        functions: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
        environment.globals.update(functions)
        environment.filters["tojson"] = _json
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is no template: {error}") from error

    @classmethod
    def load(cls, path: Path = DEFAULT_TEMPLATE) -> ChatTemplate:
        """Raises:
        ValueError: as the constructor, or the file is no UTF-8.
        OSError: it cannot be read.
        """
        return cls(path.read_text(encoding="utf-8"))

    def tokens(self, messages: Sequence[Message], vocabulary: Vocabulary = BYTES) -> tuple[int, ...]:
        """Raises:
        ApiError: the template refuses the messages, or fails on them.
        """
        said: dict[str, Any] = {"messages": [message.model_dump() for message in messages], "add_generation_prompt": True}
        try:
            text = self._template.render(**vocabulary.variables, **said, tools=None, documents=None)
        except jinja2.TemplateError as error:
            raise ApiError(400, f"messages: the chat template refuses them: {error}", param="messages") from error
        return vocabulary.encode_chat(text)


class GenerationTag(Extension):
    """`{% generation %}` marks what assistants say, for trainers; here it is text as any other."""

    tags = {"generation"}  # noqa: RUF012 as jinja2 has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`. `fit` makes its prompt."""

    source: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    n: int = Field(1, ge=1, le=MAX_CHOICES)

    _prompt: tuple[int, ...] = PrivateAttr(())
    _room: int = PrivateAttr(1)

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return (self._prompt,)

    @property
    def most(self) -> int:
        return self.max_completion_tokens or self.max_tokens or self._room

    @property
    def likeliest(self) -> int:
        return self.top_logprobs or 0

    def fit(self, template: ChatTemplate, length: int) -> None:
        """Write the prompt of a model that takes so many tokens. Without `max_tokens` the answer may fill the rest.

        Raises:
            ApiError: as `ChatTemplate.tokens`.
        """
        self._prompt = template.tokens(self.messages, self.vocabulary)
        self._room = max(length - len(self._prompt), 1)

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ApiError(400, "max_tokens and max_completion_tokens say the same; give one of them", param="max_tokens")
        return self


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """As models saw it: characters as they are, none replaced for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
