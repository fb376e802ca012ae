"""A real client over loopback against uvicorn in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from served import SIZES, Server, serving, wait_for

from ejkernel_serve.config import Sampling
from ejkernel_serve.engine import Engine
from ejkernel_serve.protocol import CompletionRequest, parse_as
from ejkernel_serve.scheduler import News, Request
from ejkernel_serve.server import MAX_BODY
from ejkernel_serve.vocabulary import BYTES

Engines = Callable[..., Engine]


@pytest.fixture
def server(engine_of: Engines) -> Iterator[Server]:
    with serving(engine_of(**SIZES)) as found:
        yield found


@pytest.fixture
def slow(engine_of: Engines) -> Iterator[Server]:
    """One request at a time, at most two that wait, 20 ms a token."""
    engine = engine_of(**{**SIZES, "max_requests": 1, "max_waiting": 2, "burst": 1})
    step = engine.step

    def slowly() -> list[News]:
        time.sleep(0.02)
        return step()

    engine.step = slowly
    engine.scheduler.ends = frozenset()
    with serving(engine) as found:
        yield found


def alone(engine: Engine, **fields: Any) -> str:
    """The text of a request by an engine that has no other."""
    wanted = parse_as(CompletionRequest, json.dumps({"model": "tiny", **fields}).encode())
    prompt, sampling = wanted.requests()[0]
    request = engine.submit(prompt, sampling)
    engine.finish()
    return BYTES.text(request.generated)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion(server: Server, engine_of: Engines):
    fields = {"prompt": "The ", "max_tokens": 20, "temperature": 0.7, "top_k": 50, "top_p": 0.9, "seed": 3}
    found = server.complete(**fields).raise_for_status().json()
    assert found["object"] == "text_completion" and found["model"] == "tiny" and found["id"].startswith("cmpl-")
    assert found["choices"] == [
        {"text": alone(engine_of(**SIZES), **fields), "index": 0, "logprobs": None, "finish_reason": "length"}
    ]
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}


def test_a_stream(server: Server):
    fields = {"prompt": "The ", "max_tokens": 30, "seed": 5}
    whole = server.text(**fields)
    with server.client.stream(
        "POST", "/v1/completions", json={"model": "tiny", **fields, "stream": True, "stream_options": {"include_usage": True}}
    ) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        *pieces, usage = events(response)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole
    assert len(pieces) > 10
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 30
    assert len({piece["id"] for piece in pieces}) == 1


def test_stop(server: Server):
    fields = {"prompt": "x", "max_tokens": 40, "seed": 1}
    text = server.text(**fields)
    stop = text[10:12]
    found = server.complete(**fields, stop=["never found", stop]).json()["choices"][0]
    assert found["text"] == text[: text.index(stop)] and found["finish_reason"] == "stop"
    with server.client.stream("POST", "/v1/completions", json={"model": "tiny", **fields, "stop": stop, "stream": True}) as got:
        assert "".join(event["choices"][0]["text"] for event in events(got)) == found["text"]


def test_several_choices_echo_and_prompts_of_tokens(server: Server):
    fields = {"max_tokens": 8, "seed": 4}
    found = server.complete(**fields, prompt=["ab", "cd"], n=2, echo=True).json()
    texts = [choice["text"] for choice in found["choices"]]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert [text[:2] for text in texts] == ["ab", "ab", "cd", "cd"]
    assert texts[0] != texts[1]
    assert found["usage"] == {"prompt_tokens": 6, "completion_tokens": 32, "total_tokens": 38}
    assert server.text(**fields, prompt=[256, 97, 98]) == texts[0][2:]
    assert (
        server.complete(prompt="ab", seed=None, n=None, stop=None, max_tokens=None).json()["usage"]["completion_tokens"] <= 16
    )
    body = {"model": "tiny", **fields, "prompt": ["ab", "cd"], "n": 2, "echo": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        streamed = [""] * 4
        for event in events(response):
            streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts


def test_log_probabilities(server: Server):
    fields = {"prompt": "ab", "max_tokens": 6, "temperature": 0, "logprobs": 0}
    found = server.complete(**fields).json()["choices"][0]
    known = found["logprobs"]
    assert len(known["tokens"]) == len(known["token_logprobs"]) == len(known["text_offset"]) == 6
    assert all(-6 < value < 0 for value in known["token_logprobs"]) and known["text_offset"][0] == 0
    with server.client.stream("POST", "/v1/completions", json={"model": "tiny", **fields, "stream": True}) as response:
        parts = [event["choices"][0]["logprobs"] for event in events(response)]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for part in parts for value in part[name]] == known[name]


def test_other_routes(server: Server):
    assert server.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert server.client.get("/v1/models/tiny").json()["object"] == "model"
    state = server.client.get("/health").json()
    assert state == {"status": "ok", "running": 0, "waiting": 0, "pages": 32, "pages_held": 0}
    for method, path, status in [("GET", "/v1/completions", 405), ("GET", "/v2", 404), ("GET", "/v1/models/large", 404)]:
        answer = server.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "Field required"),
    ({"model": 3}, "model", "valid string"),
    ({"prompt": None}, "prompt", "Field required"),
    ({"prompt": 3}, "prompt", "must be a string"),
    ({"prompt": []}, "prompt", "must be a string"),
    ({"prompt": [1, "a"]}, "prompt", "must be a string"),
    ({"prompt": [1, 257]}, "prompt", "token 257"),
    ({"prompt": [-1]}, "prompt", "token -1"),
    ({"prompt": [True]}, "prompt", "must be a string"),
    ({"prompt": "a" * 500}, "prompt", "501 tokens and max_tokens is 16"),
    ({"max_tokens": 0}, "max_tokens", "needs echo and logprobs; else give at least 1"),
    ({"max_tokens": 0, "echo": True}, "max_tokens", "needs echo and logprobs"),
    ({"max_tokens": 0, "logprobs": 0}, "max_tokens", "needs echo and logprobs"),
    ({"max_tokens": -5}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": "16"}, "max_tokens", "valid integer"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"max_tokens": 10**9}, "prompt", "max_tokens is 1000000000"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
    ({"top_k": -1}, "top_k", "greater than or equal to 0"),
    ({"seed": -1}, "seed", "greater than or equal to 0"),
    ({"seed": 2**64}, "seed", "less than"),
    ({"stop": ""}, "stop", "not empty"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [1]}, "stop", "not empty"),
    ({"stop": "a" * 200_000}, "stop", "has a sequence of 200000 bytes; at most 1024 are possible"),
    ({"stop": ["b", "é" * 513]}, "stop", "has a sequence of 1026 bytes; at most 1024 are possible"),
    ({"prompt": ["a"] * 200}, "prompt", "has 200 prompts; at most 64 are possible"),
    ({"prompt": [10**300]}, "prompt", "token 1000"),
    ({"max_tokens": 2**31}, "max_tokens", "less than"),
    ({"n": 10**4000}, "n", "less than"),
    ({"x" * 9000: 1}, "x" * 500 + "...", "xxx"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 65}, "n", "at most 64"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"usage": True}}, "stream_options.usage", "not permitted"),
    ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
    ({"logprobs": -1}, "logprobs", "greater than or equal to 0"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"best_of": 2, "n": 3}, "best_of", "best_of is 2 and n is 3"),
    ({"best_of": 2, "stream": True}, "best_of", "leave out stream"),
    ({"best_of": 65}, "best_of", "best_of times the number of prompts is 65; at most 64"),
    ({"prompt": ["x"] * 4, "best_of": 20}, "best_of", "is 80; at most 64"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
    ({"presence_penalty": -2.5}, "presence_penalty", "greater than or equal to -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
    ({"logit_bias": {"50256": -100}}, "logit_bias", "has the key '50256'; give tokens in [0, 257) as strings"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "has the key 'a'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "has the key '-1'"),
    ({"logit_bias": {"01": 1}}, "logit_bias", "without leading zeros"),
    ({"logit_bias": {"1": 100.5}}, "logit_bias", "has the value 100.5; give numbers in [-100, 100]"),
    ({"logit_bias": {"1": True}}, "logit_bias", "has the value True"),
    ({"logit_bias": [1]}, "logit_bias", "must be an object"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"temprature": 1}, "temprature", "not permitted"),
]


def test_bad_requests(server: Server):
    """Each is answered with the field that is to blame, and the server serves on."""
    for fields, param, message in BAD:
        answer = server.complete(**{"prompt": "x", **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), fields
        assert message in error["message"], fields
    assert server.complete(prompt="a" * 500).json()["error"]["code"] == "context_length_exceeded"
    unknown = server.complete(model="large", prompt="x")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert server.text(prompt="x", best_of=1, frequency_penalty=0, logit_bias={}, user="someone") is not None


def test_bodies_that_are_no_request(server: Server):
    nested = b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for body in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "x", "prompt": "y"}',
        b'{"model": "tiny", "prompt": "x", "logit_bias": {"a": 1, "a": 1}}',
        b'{"model": "tiny", "prompt": "x", "stop": "\\udfff"}',
        b'{"model": "tiny", "prompt": "x", "\\udfff": 1}',
        b'{"model": "tiny", ' + b", ".join(b'"%d": 0' % number for number in range(50_000)) + b"}",
        nested,
    ):
        answer = server.client.post("/v1/completions", content=body)
        assert answer.status_code == 400, body[:40]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert server.client.post("/v1/completions", content=b" " * (MAX_BODY + 1)).status_code == 413


def test_64_clients_at_once(server: Server, engine_of: Engines):
    """None is lost and none gets what is another's: every text is that of the request alone. Eight fill the pages, so that some
    are preempted; and every fourth client leaves when it has its first event."""
    wanted = [
        {"prompt": f"client {number}: ", "max_tokens": 90 + number % 30, "temperature": number % 3 / 2, "seed": number}
        for number in range(64)
    ]
    submit, requests = server.engine.submit, list[Request]()

    def counted(prompt: Sequence[int], sampling: Sampling) -> Request:
        requests.append(submit(prompt, sampling))
        return requests[-1]

    server.engine.submit = counted

    async def one(client: httpx.AsyncClient, number: int) -> str | None:
        body = {"model": "tiny", **wanted[number], "stream": number % 2 == 1}
        if number % 4 == 3:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    assert line.startswith("data: ")
                    return None
        answer = (await client.post("/v1/completions", json=body)).raise_for_status()
        if number % 2 == 0:
            return answer.json()["choices"][0]["text"]
        return "".join(event["choices"][0]["text"] for event in events(answer))

    async def everyone() -> list[str | None]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    texts = asyncio.run(everyone())
    wait_for(server.idle)
    engine = engine_of(**SIZES)
    assert texts == [None if number % 4 == 3 else alone(engine, **wanted[number]) for number in range(64)]
    assert len(requests) == 64 and sum(request.preemptions for request in requests) > 0
    assert 0 < sum(request.reason == "cancelled" for request in requests) <= 16


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.unsampled
def test_a_client_that_leaves(slow: Server, stream: bool):
    """Its requests, one that runs and two that wait, end at once and hold nothing."""
    body = json.dumps({"model": "tiny", "prompt": "x" * 40, "max_tokens": 400, "n": 3, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", slow.port)) as client:
        client.sendall(head + body)
        wait_for(lambda: slow.engine.scheduler.cache.held > 2)
    wait_for(slow.idle, seconds=3)  # of 24 seconds that all would take
    assert slow.text(prompt="y", max_tokens=2) is not None


def test_a_client_that_leaves_before_its_body_is_whole(slow: Server):
    with socket.create_connection(("127.0.0.1", slow.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.1)
    assert slow.text(prompt="y", max_tokens=2) is not None


def test_a_client_that_is_killed(slow: Server):
    code = f"""
import httpx
body = {{"model": "tiny", "prompt": "x", "max_tokens": 400, "stream": True}}
with httpx.stream("POST", "{slow.url}/v1/completions", json=body) as response:
    for line in response.iter_lines():
        print(line, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None and client.stdout.readline().startswith(b"data: ")
        client.kill()
    wait_for(slow.idle, seconds=3)


def test_overload(slow: Server):
    """One runs and two wait; others are told to come again, and nobody else notices."""

    async def many() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=slow.url, timeout=60) as client:
            body = {"model": "tiny", "prompt": "x", "max_tokens": 20, "seed": 1}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(12)))

    answers = asyncio.run(many())
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 3 <= len(served) < 12 and len(served) + len(refused) == 12
    assert len({answer.json()["choices"][0]["text"] for answer in served}) == 1
    assert {answer.headers["Retry-After"] for answer in refused} == {"1"}
    assert refused[0].json()["error"]["type"] == "rate_limit_error"
    impossible = slow.complete(prompt="x", n=4)
    assert (impossible.status_code, impossible.json()["error"]["param"]) == (400, "n")
    assert slow.idle()


def test_choices_wait_all_or_none(slow: Server):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "n": 2, "stream": True}
    with slow.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: without it the connection is closed
        assert next(lines).startswith("data: ")
        assert slow.complete(prompt="y", n=2).status_code == 429
        assert len(slow.engine.scheduler.running) + len(slow.engine.scheduler.waiting) == 2
    wait_for(slow.idle, seconds=3)


def test_shutdown_ends_what_runs(slow: Server):
    """After the time of grace a stream is cut off, and no page is held."""
    with slow.client.stream(
        "POST", "/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 400, "stream": True}
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        slow.uvicorn.should_exit = True
        with contextlib.suppress(httpx.RemoteProtocolError):  # as uvicorn closes the connection
            assert "data: [DONE]" not in list(lines)
    slow.thread.join(timeout=10)
    assert not slow.thread.is_alive() and slow.idle()


def test_shutdown_lets_short_requests_end(slow: Server):
    found: list[httpx.Response] = []
    client = threading.Thread(target=lambda: found.append(slow.complete(prompt="x", max_tokens=20)))
    client.start()
    wait_for(lambda: slow.engine.busy)
    slow.uvicorn.should_exit = True
    client.join(timeout=20)
    assert found[0].json()["usage"]["completion_tokens"] == 20


def test_a_step_that_fails(engine_of: Engines, caplog: pytest.LogCaptureFixture):
    """Whoever waits gets an answer, and so do later clients."""
    engine = engine_of(**SIZES)

    def fail() -> list[News]:
        raise RuntimeError("out of memory")

    engine.step = fail
    with serving(engine) as server:
        first, second = server.complete(prompt="x"), server.complete(prompt="x")
        health = server.client.get("/health")
    assert [answer.status_code for answer in (first, second, health)] == [503, 503, 503]
    assert first.json()["error"]["message"] == "the engine has failed" and first.headers["Retry-After"] == "10"
    assert "out of memory" in caplog.text


def test_a_seed_for_each_choice():
    requests = parse_as(CompletionRequest, b'{"model": "tiny", "prompt": "x", "n": 3, "seed": 1}').requests()
    assert len({sampling.seed for _, sampling in requests}) == 3
    assert requests[0][1] == Sampling(seed=requests[0][1].seed)
