"""What goes wrong, wherever it does, reaches the client that it concerns, and nobody else."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import jax.numpy as jnp
import pytest
from served import SIZES, Server, serving, wait_for

from ejkernel_serve import completion
from ejkernel_serve.config import Sampling
from ejkernel_serve.engine import Engine
from ejkernel_serve.scheduler import News
from ejkernel_serve.worker import Token

Engines = Callable[..., Engine]
SOON = 5.0
"""Seconds; far below any of the server's own limits, and above what a busy machine takes."""


def events(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """Of a stream that ends as a stream does."""
    with server.client.stream("POST", "/v1/completions", json={"model": "tiny", "stream": True, **fields}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def poison(engine: Engine, pages: list[int]) -> None:
    """NaN in the values of these pages, in every layer."""
    rows = jnp.asarray([layer * engine.config.pages + page for layer in range(2) for page in pages])
    engine._pages = engine._pages._replace(values=engine._pages.values.at[rows].set(jnp.nan))


@pytest.mark.parametrize("burst", [1, 4])
def test_a_row_of_nan_ends_its_request_alone(engine_of: Engines, burst: int):
    """In the same batch others go on, as they would alone; and so do those that get its pages afterwards."""
    others = [Sampling(max_tokens=20, seed=seed) for seed in range(3)]
    engine = engine_of(pages=16, burst=burst)  # all of them in use at the end
    engine.scheduler.ends = frozenset()
    alone = [engine.submit([65 + number] * 5, sampling) for number, sampling in enumerate(others)]
    engine.finish()
    engine = engine_of(pages=16, burst=burst)
    engine.scheduler.ends = frozenset()
    bad = engine.submit([90] * 9, Sampling(max_tokens=30))
    beside = [engine.submit([65 + number] * 5, sampling) for number, sampling in enumerate(others[:2])]
    while len(bad.generated) < 3:
        engine.step()
    pages = list(bad.pages)
    poison(engine, pages)
    before = news = None
    while bad.reason is None:  # after what was launched before
        before, news = len(bad.generated), engine.step()
    assert news is not None and bad.reason == "failed" and (bad, 0) in [(each.request, each.number) for each in news]
    assert len(bad.generated) == len(bad.logprobs) == before and not bad.pages
    again = engine.submit([90] * 9, Sampling(max_tokens=1))
    later = engine.submit([67] * 5, others[2])
    engine.finish()
    assert [each.generated for each in (*beside, later)] == [each.generated for each in alone]
    assert again.reused == 0 and again.reason == "length"  # pages that were poisoned are known no more


def test_a_probe_finds_a_model_that_diverged(engine_of: Engines):
    engine = engine_of()
    engine.probe()
    engine._weights = [leaf * jnp.nan for leaf in engine._weights]
    with pytest.raises(ValueError, match="logits are not finite"):
        engine.probe()


def test_clients_of_a_row_of_nan(engine_of: Engines):
    """One is answered with 500 or an event, within a second; another's text is whole."""
    engine = engine_of(**SIZES, burst=1)
    engine.scheduler.ends = frozenset()
    step = engine.step

    def poisoning() -> list[News]:
        for request in engine.scheduler.running:
            if request.tokens[1] == ord("!") and len(request.generated) == 2:
                poison(engine, request.pages)
        return step()

    engine.step = poisoning
    with serving(engine) as server:
        good = server.text(prompt="good", max_tokens=60, seed=1)
        found: list[str] = []
        other = threading.Thread(target=lambda: found.append(server.text(prompt="good", max_tokens=60, seed=1)))
        other.start()
        answer = server.complete(prompt="!", max_tokens=30)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "not_finite")
        assert "logits after 2 generated tokens are not finite" in error["message"]
        *pieces, last = events(server, prompt="!", max_tokens=30, n=2)
        assert last["error"] == error and all(piece["choices"] for piece in pieces)
        other.join()
        assert found == [good]
        assert server.client.get("/health").status_code == 200
        wait_for(server.idle)


@pytest.mark.unsampled
@pytest.mark.parametrize("place", ["text", "JSON"])
def test_an_error_of_a_reader(
    engine_of: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
):
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("unforeseen")

    with serving(engine_of(**SIZES)) as server:
        with monkeypatch.context() as patch:
            patch.setattr(
                *((completion.TextStream, "feed", fail) if place == "text" else (completion.TextChoice, "object", fail))
            )
            start = time.monotonic()
            answer = server.complete(prompt="x", max_tokens=5)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (500, "server_error") and "log" in error["message"]
            assert events(server, prompt="x", max_tokens=5)[-1] == {"error": error}
            assert time.monotonic() - start < SOON
        assert "unforeseen" in caplog.text
        assert server.complete(prompt="x", max_tokens=5).status_code == 200
        wait_for(server.idle)


@pytest.mark.unsampled
@pytest.mark.parametrize("place", ["step", "plan", "commit"])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), SystemExit(1)], ids=["error", "exit"])
def test_the_engine_dies(engine_of: Engines, place: str, error: BaseException):
    """Streams that run get an event, whoever waits an answer, and health turns red."""
    engine = engine_of(**{**SIZES, "max_requests": 2})
    engine.scheduler.ends = frozenset()
    owner: Any = engine if place == "step" else engine.scheduler
    scheduler, function, calls = engine.scheduler, getattr(owner, place), 0

    def fail(*arguments: Any) -> Any:
        nonlocal calls
        calls += len(scheduler.running) + len(scheduler.waiting) == 4  # all of them are there
        if calls > 6:
            raise error
        return function(*arguments)

    setattr(owner, place, fail)
    with serving(engine) as server:
        waiting: list[httpx.Response] = []
        clients = [
            threading.Thread(target=lambda: waiting.append(server.complete(prompt="x", max_tokens=300))) for _ in range(3)
        ]
        for client in clients:
            client.start()
        last = events(server, prompt="y", max_tokens=300)[-1]
        for client in clients:
            client.join(timeout=SOON)
        assert last["error"]["message"] == "the engine has failed"
        assert [answer.status_code for answer in waiting] == [503] * 3
        health = server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "the engine has failed")
        assert server.complete(prompt="x").status_code == 503


def test_a_client_that_leaves_while_its_body_is_read_in(engine_of: Engines, monkeypatch: pytest.MonkeyPatch):
    """What was admitted for it meanwhile is cancelled."""
    engine = engine_of(**SIZES)
    engine.scheduler.ends = frozenset()
    submit, late = engine.submit, threading.Event()

    def slowly(*arguments: Any) -> Any:
        late.wait(10)
        return submit(*arguments)

    engine.submit = slowly
    with serving(engine) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 500}, timeout=0.3)
        late.set()
        wait_for(lambda: next(engine.scheduler._numbers) > 0)
        wait_for(server.idle, seconds=SOON)


class Tokens:
    """What a generation gives."""

    def __init__(self, tokens: bytes) -> None:
        self.tokens = tokens
        self.request: Any = type("Request", (), {"logprobs": [-1.0] * len(tokens)})()

    async def __aiter__(self):
        for place, token in enumerate(self.tokens, 1):
            yield Token(token, -1.0, "length" if place == len(self.tokens) else None)


@pytest.mark.unsampled
@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        (b"xabcz", [0, 1, 2, 3, 4]),  # "abc" waits for the z
        (b"xabababcz", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("é€z".encode(), [0, 0, 1, 1, 1, 2]),
        ("ab\N{GRINNING FACE}cz".encode(), [0, 1, 2, 2, 2, 2, 3, 4]),
        (b"\xe2\x82abz", [0, 0, 1, 2, 3]),  # a character that is broken off
        (b"\xff\xfez", [0, 1, 2]),
        (b"\xe2\xe2\x82\xac", [0, 1, 1, 1]),
    ],
)
def test_each_token_has_its_own_offset(tokens: bytes, offsets: list[int]):
    wanted = completion.CompletionRequest.model_validate(
        {"model": "m", "prompt": "q", "stop": ["abcd", "é€!"], "logprobs": 0, "max_tokens": 9}
    )

    async def run() -> dict[str, Any]:
        choice = completion.TextChoice(0, Tokens(tokens), wanted)  # pyright: ignore[reportArgumentType]
        parts = [piece async for piece in choice.pieces()]
        whole = choice.object(choice.text, 0)
        assert "".join(part["text"] for part in parts) == whole["text"] == tokens.decode(errors="replace")
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for part in parts for value in part["logprobs"][name]] == whole["logprobs"][name]
        return whole

    assert asyncio.run(run())["logprobs"]["text_offset"] == offsets
