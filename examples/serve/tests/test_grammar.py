"""Texts that follow a schema, from a model with random weights, beside others that follow none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI
from recomputed import allowed
from served import SIZES, Server, serving

from ejkernel_serve.config import Sampling
from ejkernel_serve.engine import Engine
from ejkernel_serve.grammar import Guide
from ejkernel_train.data import START

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "réd", "blue"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3},
        "sure": {"type": "boolean"},
    },
    "required": ["kind", "counts", "sure"],
    "additionalProperties": False,
}


def check(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["kind", "counts", "sure"]
    assert found["kind"] in ("red", "réd", "blue") and type(found["sure"]) is bool
    assert 1 <= len(found["counts"]) <= 3 and all(type(each) is int and 0 <= each <= 99 for each in found["counts"])


@pytest.mark.parametrize("sizes", [{}, {"drafts": 3}, {"pages": 40}], ids=["plain", "drafts", "few-pages"])
def test_requests_follow_their_schema(engine_of: Callable[..., Engine], sizes: dict[str, Any]):
    """At every temperature, in the neighbourhood of requests without one, also when pages are taken away; drawn as alone."""
    engine, guide = engine_of(max_length=128, **sizes), Guide.of_schema(SCHEMA)
    guided = [
        engine.submit([256, *b"ab"[:seed]], Sampling(max_tokens=80, temperature=seed % 3, seed=seed, guide=guide))
        for seed in range(6)
    ]
    free = [engine.submit([256, 65], Sampling(max_tokens=20, seed=seed)) for seed in range(3)]
    engine.finish()
    for request in guided:
        assert request.reason == "stop" and request.generated[-1] == START
        assert all(math.isfinite(logprob) for logprob in request.logprobs)
        check(bytes(request.generated[:-1]).decode())
    assert len({tuple(request.generated) for request in guided}) > 3
    alone = engine_of(max_length=128)
    for request in (guided[4], free[1]):
        again = alone.submit(request.tokens[: request.prompt], request.sampling)
        alone.finish()
        assert again.generated == request.generated
    assert allowed(guide) == [ord("{")]  # that of the requests, not theirs


def test_what_may_come_next():
    guide = Guide.of_schema({"enum": ["no", "nö"]})
    for byte in b'"n':
        assert guide.advance(byte)
    assert allowed(guide) == [ord("o"), "ö".encode()[0]]
    other = guide.copy()
    assert guide.advance(ord("o")) and guide.advance(ord('"'))
    assert allowed(guide) == [START]
    assert not other.advance(ord("x"))
    assert allowed(guide.copy()) == allowed(guide)


@pytest.fixture
def server(engine_of: Callable[..., Engine]) -> Iterator[Server]:
    with serving(engine_of(**SIZES)) as found:
        yield found


def test_over_http(server: Server):
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "response_format": wanted}
        answer = client.chat.completions.create(**asked, max_tokens=120, n=2, temperature=1.5, seed=1)
        for choice in answer.choices:
            assert choice.finish_reason == "stop" and choice.message.content
            check(choice.message.content)
        pieces = client.chat.completions.create(**asked, max_tokens=120, stream=True, seed=2)
        check("".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices))
    cut = server.complete(prompt="x", max_tokens=3, response_format=wanted).json()["choices"][0]
    assert cut["finish_reason"] == "length" and cut["text"] == '{"k'
    assert server.text(prompt="x", max_tokens=1, response_format={"type": "json_object"}) == "{"
    assert server.complete(prompt="x", response_format={"type": "text"}).is_success


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"type": "xml"}, "response_format.type: Input should be 'text', 'json_object' or 'json_schema'"),
        ({"type": "json_schema"}, "has json_schema where type is json_schema"),
        ({"type": "text", "json_schema": {"schema": {}}}, "has json_schema where type is json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}, "response_format: .*thing"),
        ({"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}, "response_format: .*"),
    ],
)
def test_what_is_refused(server: Server, wanted: dict[str, Any], message: str):
    response = server.complete(prompt="x", response_format=wanted)
    assert response.status_code == 400
    with pytest.raises(ValueError, match=message):
        raise ValueError(response.json()["error"]["message"])
