"""A public model with a tokenizer of its own, served over loopback: as the `openai` client asks, and as lm-eval does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from folders import KINDS, write
from recomputed import allowed, logits, logprobs
from served import Server, serving

from ejkernel_serve import models, tokenizer
from ejkernel_serve.chat import ChatTemplate
from ejkernel_serve.config import EngineConfig
from ejkernel_serve.engine import Engine
from ejkernel_serve.grammar import Guide
from ejkernel_serve.vocabulary import Vocabulary
from ejkernel_train.model import Model

SIZES: dict[str, Any] = {
    "pages": 64,
    "page_size": 8,
    "max_length": 256,
    "max_requests": 8,
    "buckets": (8, 64),
    "dtype": "float32",
}


@pytest.fixture(scope="module", params=["byte_level", "with_fallback"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Model]]:
    """A folder's model, with its tokens and its template."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    write(folder, KINDS[request.param]())
    model, vocabulary = models.load_folder(folder, "float32")
    source = tokenizer.template_of(folder)
    assert source is not None
    engine = Engine(model, EngineConfig(**SIZES), vocabulary)
    engine.probe()
    with serving(engine, template=ChatTemplate(source)) as found:
        yield found, model


@pytest.fixture
def client(served: tuple[Server, Model]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[0].url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def vocabulary_of(server: Server) -> Vocabulary:
    return server.engine.vocabulary


def greedy(model: Model, vocabulary: Vocabulary, prompt: list[int], number: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + number and (tokens == prompt or tokens[-1] not in vocabulary.ends):
        tokens.append(int(logits(model, tokens)[: vocabulary.size].argmax()))
    return tokens[len(prompt) :]


def test_a_completion_is_the_text_of_the_likeliest_tokens(served: tuple[Server, Model], client: openai.OpenAI):
    server, model = served
    vocabulary = vocabulary_of(server)
    prompt = [*vocabulary.encode("The quick")]
    generated = greedy(model, vocabulary, prompt, 12)
    expected = b"".join(vocabulary.spelling[token] for token in generated).decode(errors="replace")
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    for given in ("The quick", prompt):
        (choice,) = client.completions.create(prompt=given, **fields).choices
        assert choice.text == expected
    assert client.completions.create(prompt="The quick", echo=True, **fields).choices[0].text == "The quick" + expected
    biased = client.completions.create(prompt="The quick", logit_bias={str(generated[0]): -100}, logprobs=0, **fields)
    known = biased.choices[0].logprobs
    assert known is not None and known.tokens is not None and known.tokens[0] != vocabulary.name(generated[0])
    forced = {str(token): 100 for token in vocabulary.encode_text("x")[-1:]}
    assert client.completions.create(prompt="The", logit_bias=forced, **fields).choices[0].text == "x" * 12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.unsampled
def test_streams(client: openai.OpenAI, seed: int):
    """A stream says what the whole answer does, and no character of it comes in halves."""
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": "中文",
        "max_tokens": 40,
        "temperature": 1.0,
        "seed": seed,
        "logprobs": 2,
    }
    whole = client.completions.create(**fields).choices[0]
    pieces = [piece.choices[0] for piece in client.completions.create(**fields, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text and pieces[-1].finish_reason == whole.finish_reason
    assert whole.logprobs is not None and whole.logprobs.tokens is not None
    assert [name for piece in pieces if piece.logprobs for name in piece.logprobs.tokens or []] == whole.logprobs.tokens
    stop = whole.text[5:8]
    if "\ufffd" not in stop:
        cut = client.completions.create(**fields, stop=stop).choices[0]
        assert cut.text == whole.text.partition(stop)[0] and cut.finish_reason == "stop"
        pieces = [piece.choices[0].text for piece in client.completions.create(**fields, stop=[stop], stream=True)]
        assert "".join(pieces) == cut.text


def test_drafts_and_small_steps_change_nothing(served: tuple[Server, Model]):
    server, model = served
    asked: dict[str, Any] = {"prompt": "The lazy dog", "max_tokens": 30, "temperature": 0, "repetition_penalty": 1.3}
    expected = server.text(**asked)
    engine = Engine(model, EngineConfig(**{**SIZES, "drafts": 3, "page_size": 4, "pages": 64}), vocabulary_of(server))
    with serving(engine) as other:
        assert other.text(**asked) == expected


def test_chats(served: tuple[Server, Model], client: openai.OpenAI):
    server, model = served
    vocabulary = vocabulary_of(server)
    read = "<s><|user|>Hi é<|end|>\n<|assistant|>"
    prompt = [*vocabulary.encode_text(read)]
    assert [vocabulary.name(token) for token in (prompt[0], prompt[1], prompt[-1])] == ["<s>", "<|user|>", "<|assistant|>"]
    messages: Any = [{"role": "system", "content": "no"}, {"role": "user", "content": "Hi é"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=4
    )
    (choice,) = answer.choices
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    generated = greedy(model, vocabulary, prompt, 6)
    shown = [token for token in generated if token not in vocabulary.ends]
    assert choice.message.content == b"".join(vocabulary.spelling[token] for token in shown).decode(errors="replace")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    expected = logprobs(model, [*prompt, *generated])[len(prompt) - 1 :, : vocabulary.size]
    for entry, token, values in zip(choice.logprobs.content, shown, expected, strict=False):
        assert entry.token == vocabulary.name(token)
        assert bytes(entry.bytes or b"") == vocabulary.spelling[token]
        assert entry.logprob == pytest.approx(values[token], abs=1e-4)
        np.testing.assert_allclose([top.logprob for top in entry.top_logprobs], np.sort(values)[::-1][:4], atol=1e-4)


def test_every_end_ends_a_request(served: tuple[Server, Model]):
    server, _ = served
    for end in vocabulary_of(server).ends:
        answer = server.complete(prompt="x", max_tokens=9, logit_bias={str(end): 100}).raise_for_status().json()
        assert answer["choices"][0]["finish_reason"] == "stop" and answer["choices"][0]["text"] == ""
        assert answer["usage"]["completion_tokens"] == 1


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "réd"]}, "counts": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3}},
    "required": ["kind", "counts"],
    "additionalProperties": False,
}


def test_schemas(client: openai.OpenAI):
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "?"}],
        response_format=wanted,
        max_tokens=150,
        n=3,
        temperature=1.5,
        seed=1,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and choice.message.content
        found = json.loads(choice.message.content)
        assert list(found) == ["kind", "counts"] and found["kind"] in ("red", "réd") and {*found["counts"]} <= {1, 22}


def test_a_schema_ends_with_any_end(served: tuple[Server, Model]):
    vocabulary = vocabulary_of(served[0])
    guide = Guide.of_schema({"enum": ["x"]}, vocabulary)
    for token in vocabulary.encode_text('"x"'):
        assert not vocabulary.spelling[token].strip() or guide.advance(token)
    assert {*allowed(guide, vocabulary.size)} == vocabulary.ends
    for end in vocabulary.ends:
        assert guide.copy().advance(end)


def test_lm_eval_s_requests(served: tuple[Server, Model]):
    """Its `local-completions` sends lists of lists of tokens, a context and a continuation each, and sums up the latter's."""
    server, model = served
    vocabulary = vocabulary_of(server)
    pairs = [("The quick brown", " fox jumps"), ("def double(", "number):"), ("Größe", " 中文")]
    contexts = [[*vocabulary.encode(context)] for context, _ in pairs]
    rows = [[*context, *vocabulary.encode_text(text)] for context, (_, text) in zip(contexts, pairs, strict=True)]
    likely = [*contexts[0], *greedy(model, vocabulary, contexts[0], 3)]
    rows.append(likely)
    contexts.append(contexts[0])
    body = {"prompt": rows, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = server.complete(**body).raise_for_status().json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice, row, context in zip(choices, rows, contexts, strict=True):
        values = logprobs(model, row)[:, : vocabulary.size]
        expected = [values[place - 1, row[place]] for place in range(len(context), len(row))]
        scored = choice["logprobs"]["token_logprobs"][len(context) : -1]
        top = choice["logprobs"]["top_logprobs"][len(context) : -1]
        np.testing.assert_allclose(scored, expected, atol=1e-4)
        likeliest = all(value == max(places.values()) for value, places in zip(scored, top, strict=True))
        assert likeliest == all(values[place - 1].argmax() == row[place] for place in range(len(context), len(row)))
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert len(choice["logprobs"]["tokens"]) == len(row) + 1
    assert all(value == max(places.values()) for value, places in zip(scored, top, strict=True))  # of the last, which is greedy
    none = server.complete(**{**body, "max_tokens": 0}).raise_for_status().json()
    for choice, row, other in zip(none["choices"], rows, choices, strict=True):
        np.testing.assert_allclose(
            choice["logprobs"]["token_logprobs"][1:], other["logprobs"]["token_logprobs"][1:-1], atol=1e-4
        )
        assert choice["text"] == vocabulary.text(row)
    assert none["usage"]["completion_tokens"] == 0
    generated = {
        "prompt": rows[:2],
        "max_tokens": 5,
        "temperature": 0,
        "stop": ["\n\n", "\nclass", "\ndef", "\n#", "\nif", "</s>"],
        "seed": 1234,
    }
    assert len(server.complete(**generated).raise_for_status().json()["choices"]) == 2


def test_tokens_that_are_none(served: tuple[Server, Model]):
    server, _ = served
    size = vocabulary_of(server).size
    for given in ([size], [-1], [[0], [0, size + 3]]):
        for echo in (False, True):
            answer = server.complete(prompt=given, max_tokens=1, echo=echo)
            assert answer.status_code == 400 and f"give tokens in [0, {size})" in answer.json()["error"]["message"]
    answer = server.complete(prompt="x", logit_bias={str(size): 1})
    assert answer.status_code == 400 and f"give tokens in [0, {size})" in answer.json()["error"]["message"]


def test_tokens_of_the_same_text(served: tuple[Server, Model]):
    """Each of the likeliest has a name of its own."""
    server, _ = served
    vocabulary = vocabulary_of(server)
    known: dict[str, list[int]] = {}
    for token in range(vocabulary.size):
        known.setdefault(vocabulary.name(token), []).append(token)
    same = next((tokens for tokens in known.values() if len(tokens) > 1), None)
    if same is None:
        return
    answer = server.complete(prompt=[same[0], same[1]], max_tokens=0, echo=True, logprobs=5).raise_for_status().json()
    assert all(len(top) in (5, 6) for top in answer["choices"][0]["logprobs"]["top_logprobs"][1:])
