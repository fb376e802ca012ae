"""Log-probabilities, penalties and candidates over HTTP, against a full recomputation of each text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from recomputed import greedy, logprobs
from served import SIZES, Server, serving

from ejkernel_serve.engine import Engine
from ejkernel_serve.protocol import CompletionRequest, parse_as
from ejkernel_serve.vocabulary import BYTES, TOKENS
from ejkernel_train.model import Model

PROMPT = "It is ça"
TOKENS_OF = [256, *PROMPT.encode()]


@pytest.fixture
def server(engine_of: Callable[..., Engine]) -> Iterator[Server]:
    engine = engine_of(**SIZES)
    engine.scheduler.ends = frozenset()
    with serving(engine) as found:
        yield found


def streamed(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The log-probabilities of each piece."""
    with server.client.stream("POST", "/v1/completions", json={"model": "tiny", "stream": True, **fields}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


def check(model: Model, found: dict[str, Any], tokens: list[int], number: int, first: int = 0) -> None:
    """The log-probabilities of these tokens, of which those from `first` on are reported."""
    expected = logprobs(model, tokens)[:, :TOKENS]
    assert found["tokens"] == [BYTES.name(token) for token in tokens[first:]]
    for place, token in enumerate(tokens[first:], first):
        value, top = found["token_logprobs"][place - first], found["top_logprobs"][place - first]
        if not place:
            assert value is None and top is None
            continue
        assert value == pytest.approx(expected[place - 1, token], abs=1e-4)
        assert top[BYTES.name(token)] == value  # to the last bit: clients ask whether it is the largest
        best = sorted(top.values(), reverse=True)
        np.testing.assert_allclose(best[:number], np.sort(expected[place - 1])[::-1][:number], atol=1e-4)
        assert len(top) in (number, number + 1)


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.unsampled
def test_echo_with_log_probabilities(model: Model, server: Server, max_tokens: int):
    """As a client asks that scores texts; twice, as the first one's pages are known then."""
    fields = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "echo": True, "logprobs": 3}
    for _ in range(2):
        answer = server.complete(**fields).raise_for_status().json()
        (choice,) = answer["choices"]
        tokens = [*TOKENS_OF, *greedy(model, TOKENS_OF, max_tokens)]
        check(model, choice["logprobs"], tokens, 3)
        assert choice["text"].startswith(PROMPT) and choice["finish_reason"] == "length"
        assert choice["logprobs"]["text_offset"][:10] == [0, 0, 1, 2, 3, 4, 5, 6, 6, 7]
        assert all(offset >= len(PROMPT) for offset in choice["logprobs"]["text_offset"][10:])
        assert answer["usage"]["completion_tokens"] == max_tokens and answer["usage"]["prompt_tokens"] == 10
    pieces = streamed(server, **fields)
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert pieces[-1]["finish_reason"] == "length"
    for key, values in choice["logprobs"].items():
        assert [value for piece in pieces for value in piece["logprobs"][key]] == values


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_the_token_that_ends_a_text(model: Model, engine_of: Callable[..., Engine], max_tokens: int):
    """A client that scores a prompt drops the value of the one token that it must generate, whichever that is."""
    fields = {"prompt": PROMPT, "temperature": 0, "echo": True, "logprobs": 2}
    ends = {**fields, "max_tokens": max_tokens, "logit_bias": {"256": 100}}
    with serving(engine_of(**SIZES)) as server:
        prompt = server.complete(**fields, max_tokens=0).json()["choices"][0]["logprobs"]
        answer = server.complete(**ends).raise_for_status().json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == (PROMPT, "stop", 1)
        for key, values in prompt.items():
            assert choice["logprobs"][key][:-1] == values
        last = {key: values[-1] for key, values in choice["logprobs"].items()}
        assert (last["tokens"], last["text_offset"]) == (BYTES.name(256), len(PROMPT))
        assert last["top_logprobs"][BYTES.name(256)] == last["token_logprobs"]
        assert last["token_logprobs"] == pytest.approx(logprobs(model, TOKENS_OF)[-1, 256], abs=1e-4)
        pieces = streamed(server, **ends)
        for key, values in choice["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][key]] == values


def test_a_stream_whose_first_token_is_held_back(server: Server):
    """The prompt's values come once, though its text comes before any token is certain."""
    fields = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 0}
    whole = server.complete(**fields).json()["choices"][0]
    stop = chr(ord(whole["text"][len(PROMPT)])) + "never"
    pieces = streamed(server, **fields, stop=stop)
    assert [value for piece in pieces for value in piece["logprobs"]["token_logprobs"]] == whole["logprobs"]["token_logprobs"]
    assert whole["logprobs"]["top_logprobs"] is None


def test_the_likeliest_of_generated_tokens(model: Model, server: Server):
    fields = {"prompt": PROMPT, "max_tokens": 5, "temperature": 1.5, "seed": 3, "logprobs": 5}
    (choice,) = server.complete(**fields).raise_for_status().json()["choices"]
    names = {BYTES.name(token): token for token in range(TOKENS)}
    generated = [names[each] for each in choice["logprobs"]["tokens"]]
    check(model, choice["logprobs"], [*TOKENS_OF, *generated], 5, first=len(TOKENS_OF))
    assert any(len(top) == 6 for top in choice["logprobs"]["top_logprobs"])  # a token that is not among them


def test_several_prompts_of_different_lengths(model: Model, server: Server):
    texts = ["a", "some more", "x" * 40]
    fields = {"prompt": texts, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = server.complete(**fields).raise_for_status().json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    for choice, text in zip(answer["choices"], texts, strict=True):
        check(model, choice["logprobs"], [256, *text.encode()], 1)


def test_the_best_of_several(server: Server):
    fields = {"prompt": ["ab", "cd"], "max_tokens": 6, "seed": 2, "logprobs": 0}
    every = server.complete(**fields, n=5).json()["choices"]
    best = server.complete(**fields, n=2, best_of=5).json()
    means = [np.mean(choice["logprobs"]["token_logprobs"]) for choice in every]
    order = [*sorted(range(5), key=means.__getitem__)[::-1][:2], *sorted(range(5, 10), key=means.__getitem__)[::-1][:2]]
    assert [choice["text"] for choice in best["choices"]] == [every[number]["text"] for number in order]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"]["completion_tokens"] == 60


def test_settings_reach_the_engine():
    body = {
        "model": "tiny",
        "prompt": "x",
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"65": -100, "0": 2.5},
        "logprobs": 4,
        "echo": True,
    }
    ((_, sampling),) = parse_as(CompletionRequest, json.dumps(body).encode()).requests()
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 1, -0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.2, {65: -100, 0: 2.5})
    assert (sampling.top_logprobs, sampling.prompt_logprobs) == (4, True)


def test_a_bias_that_decides(server: Server):
    every = {str(token): -100 for token in range(TOKENS) if token != 65}
    assert server.text(prompt="x", max_tokens=4, logit_bias=every) == "AAAA"
    assert server.text(prompt="x", max_tokens=4, temperature=0, logit_bias={"66": 100}) == "BBBB"
