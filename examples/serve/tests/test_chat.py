"""Chats over loopback, and both endpoints as the `openai` client sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from recomputed import logprobs
from served import SIZES, Server, serving

from ejkernel_serve.chat import ChatTemplate, Message
from ejkernel_serve.engine import Engine
from ejkernel_serve.protocol import ApiError
from ejkernel_serve.vocabulary import BYTES, TOKENS
from ejkernel_train.model import Model

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi é"}]
READ = "system: Be brief.\nuser: Hi é\nassistant:"


@pytest.fixture
def server(engine_of: Callable[..., Engine]) -> Iterator[Server]:
    engine = engine_of(**SIZES)
    engine.scheduler.ends = frozenset()
    with serving(engine) as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def chat(server: Server, **fields: Any) -> httpx.Response:
    return server.client.post("/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES, **fields})


def test_the_default_template():
    messages = [Message.model_validate(each) for each in MESSAGES]
    assert ChatTemplate.load().tokens(messages) == BYTES.encode(READ)


def test_templates(tmp_path: Path):
    message = Message(role="user", content="{{ x }}")
    assert ChatTemplate("{{ messages[0].content }}{{ add_generation_prompt }}").tokens([message]) == BYTES.encode("{{ x }}True")
    with pytest.raises(ApiError, match="refuses them: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").tokens([message])
    with pytest.raises(ApiError, match="refuses them: access to attribute '__class__'"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").tokens([message])
    with pytest.raises(ApiError, match="refuses them"):
        ChatTemplate("{% set _ = messages.append(1) %}").tokens([message])
    with pytest.raises(ValueError, match="the chat template is no template: "):
        ChatTemplate("{% if %}")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        ChatTemplate.load(tmp_path / "latin")


def test_what_public_templates_call():
    message = Message(role="user", content="<é>")
    written = (
        "{% for message in messages %}{{ message | tojson }}{% break %}{% endfor %}{{ tools is none }}{{ strftime_now('%%') }}"
    )
    expected = '{"role": "user", "content": "<é>"}True%'
    assert ChatTemplate(written).tokens([message, message]) == BYTES.encode(expected)
    marked = "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ bos_token }}"
    assert ChatTemplate(marked).tokens([message]) == BYTES.encode("<é>")


def test_a_chat_is_a_completion_of_what_the_template_writes(client: openai.OpenAI):
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0.8, "seed": 4, "n": 2, "presence_penalty": 0.5}
    text = client.completions.create(prompt=READ, **fields)
    found = client.chat.completions.create(messages=MESSAGES, **fields)
    assert found.object == "chat.completion" and found.id.startswith("chatcmpl-")
    assert [choice.message.content for choice in found.choices] == [choice.text for choice in text.choices]
    assert [(choice.index, choice.message.role, choice.finish_reason) for choice in found.choices] == [
        (0, "assistant", "length"),
        (1, "assistant", "length"),
    ]
    assert found.usage is not None and text.usage is not None
    assert found.usage.model_dump() == text.usage.model_dump() and found.usage.completion_tokens == 24
    parts: Any = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "é"}]
    joined = client.chat.completions.create(messages=[MESSAGES[0], {"role": "user", "content": parts}], **fields)
    assert [each.message.content for each in joined.choices] == [each.message.content for each in found.choices]


def test_a_streamed_chat(client: openai.OpenAI):
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "seed": 4, "n": 2}
    fields |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields)
    *chunks, usage = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert {chunk.object for chunk in (*chunks, usage)} == {"chat.completion.chunk"} and len({each.id for each in chunks}) == 1
    assert usage.choices == [] and usage.usage == whole.usage
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert [piece.delta.role for piece in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(piece.delta.content or "" for piece in mine) == choice.message.content
        assert [piece.finish_reason for piece in mine] == [None] * (len(mine) - 1) + ["length"]
        entries = [entry for piece in mine if piece.logprobs for entry in piece.logprobs.content or []]
        assert choice.logprobs is not None and choice.logprobs.content is not None and len(entries) == 12
        for one, other in zip(entries, choice.logprobs.content, strict=True):
            assert (one.token, one.bytes, len(one.top_logprobs)) == (other.token, other.bytes, len(other.top_logprobs))
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)  # of two programs


def test_log_probabilities_of_a_chat(model: Model, client: openai.OpenAI):
    messages: Any = [{"role": "user", "content": "a"}]
    found = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, seed=1, temperature=1.2, logprobs=True, top_logprobs=20
    )
    known = found.choices[0].logprobs
    assert known is not None and known.content is not None and len(known.content) == 6
    tokens = [*BYTES.encode("user: a\nassistant:")]
    for entry in known.content:
        expected = logprobs(model, tokens)[-1, :TOKENS]
        tokens.append(entry.bytes[0] if entry.bytes else 256)
        assert entry.token == BYTES.name(tokens[-1])
        assert entry.logprob == pytest.approx(expected[tokens[-1]], abs=1e-4)
        np.testing.assert_allclose([top.logprob for top in entry.top_logprobs], np.sort(expected)[::-1][:20], atol=1e-4)
        for top in entry.top_logprobs:
            assert top.logprob == pytest.approx(expected[top.bytes[0] if top.bytes else 256], abs=1e-4)
    plain = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, logprobs=True)
    assert plain.choices[0].logprobs is not None and plain.choices[0].logprobs.content is not None
    assert [entry.top_logprobs for entry in plain.choices[0].logprobs.content] == [[], []]


def test_an_answer_without_max_tokens_fills_the_rest(server: Server):
    usage = chat(server, seed=1).raise_for_status().json()["usage"]
    assert usage["total_tokens"] == SIZES["max_length"]


def test_completions_by_the_client(model: Model, client: openai.OpenAI):
    scored = client.completions.create(model="tiny", prompt="Some text", max_tokens=0, echo=True, logprobs=2)
    known = scored.choices[0].logprobs
    assert known is not None and known.token_logprobs is not None and known.token_logprobs[0] is None
    tokens = [*BYTES.encode("Some text")]
    expected = logprobs(model, tokens)
    values = [value for value in known.token_logprobs[1:] if value is not None]
    np.testing.assert_allclose(values, [expected[at, token] for at, token in enumerate(tokens[1:])], atol=1e-4)
    fields: dict[str, Any] = {"model": "tiny", "prompt": "Some text", "max_tokens": 10, "seed": 3, "logprobs": 1}
    whole = client.completions.create(**fields, n=2)
    texts, entries = ["", ""], [list[float](), list[float]()]
    for event in client.completions.create(**fields, n=2, stream=True):
        choice = event.choices[0]
        texts[choice.index] += choice.text
        entries[choice.index] += (choice.logprobs and choice.logprobs.token_logprobs) or []
    assert texts == [choice.text for choice in whole.choices]
    for found, choice in zip(entries, whole.choices, strict=True):
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        np.testing.assert_allclose(found, np.asarray(choice.logprobs.token_logprobs, float), atol=1e-4)
    stopped = client.completions.create(
        model="tiny", prompt="x", max_tokens=20, stop="A", logit_bias={"65": 100}, temperature=0
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")


def test_errors_by_the_client(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)
    assert (bad.value.status_code, bad.value.param, bad.value.type) == (400, "temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="large", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", logprobs=6)
    assert bad.value.param == "logprobs"
    assert [model.id for model in client.models.list()] == ["tiny"]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "Field required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "x"}, "messages", "valid list"),
    ({"messages": [MESSAGES[1]] * 1025}, "messages", "at most 1024"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'system', 'user' or 'assistant'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "valid string"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "list of parts"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages.0.content", "list of parts"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages.0.name", "not permitted"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "tokens and max_tokens is 1; together at most 512"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 4, "max_completion_tokens": 4}, "max_tokens", "give one of them"),
    ({"max_completion_tokens": 1000}, "messages", "max_tokens is 1000"),
    ({"logprobs": 1}, "logprobs", "valid boolean"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"n": 65}, "n", "less than or equal to 64"),
    ({"logit_bias": {"257": 1}}, "logit_bias", "has the key '257'"),
    ({"tools": []}, "tools", "not permitted"),
    ({"prompt": "x"}, "prompt", "not permitted"),
]


def test_bad_chats(server: Server):
    """Each is answered with the field that is to blame, and the server serves on."""
    for fields, param, message in BAD:
        answer = chat(server, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), fields
        assert message in error["message"], fields
    surrogate = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
    assert server.client.post("/v1/chat/completions", content=surrogate).status_code == 400
    parts = b'{"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}'
    assert server.client.post("/v1/chat/completions", content=parts).status_code == 400
    assert chat(server, max_tokens=2).status_code == 200
