"""How the answer to a chat request is written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ejkernel_serve.chat import ChatRequest
from ejkernel_serve.completion import Choice, Completion
from ejkernel_serve.worker import Generation


class ChatCompletion(Completion):
    prefix, whole_kind, part_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, generation: Generation) -> Choice:
        assert isinstance(self.wanted, ChatRequest)
        return ChatChoice(index, generation, self.wanted)


class ChatChoice(Choice):
    """A choice of `POST /v1/chat/completions`."""

    def __init__(self, index: int, generation: Generation, wanted: ChatRequest) -> None:
        super().__init__(index, generation, wanted)
        self.wanted = wanted

    def whole(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.text, "refusal": None}
        return {"index": self.index, "message": message, "logprobs": self._known(0), "finish_reason": self.reason}

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """The role, then text, then why it ended."""
        yield self._piece({"role": "assistant", "content": ""})
        async for text, first in self.growth():
            if text or first < len(self.tokens):
                yield {**self._piece({"content": text}), "logprobs": self._known(first)}
        yield {**self._piece({}), "finish_reason": self.reason}

    def _piece(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _known(self, first: int) -> dict[str, Any] | None:
        """Log-probabilities from token `first` on, if they are wanted."""
        if not self.wanted.logprobs:
            return None
        request, places = self.generation.request, range(first, len(self.tokens))
        content = [
            {
                **self._entry(self.tokens[place], request.logprobs[place]),
                "top_logprobs": [self._entry(*each) for each in request.top_logprobs[place]] if self.wanted.likeliest else [],
            }
            for place in places
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelt = self.wanted.vocabulary.spelling[token]
        return {"token": self.wanted.vocabulary.name(token), "logprob": logprob, "bytes": [*spelt] if spelt else None}
