"""Clients that nobody invited, over loopback and in loops that end: slow, silent, lying, and many at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from served import SIZES, Server, serving, wait_for

from ejkernel_serve import __main__ as command
from ejkernel_serve.config import Limits
from ejkernel_serve.engine import Engine

Engines = Callable[..., Engine]
IMPATIENT = Limits(
    body_bytes=1 << 16,
    bodies_bytes=1 << 17,
    head_seconds=0.6,
    body_seconds=0.6,
    write_seconds=1.0,
    linger_seconds=0.4,
    connections=8,
)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def impatient(engine_of: Engines) -> Iterator[Server]:
    engine = engine_of(**SIZES)
    engine.scheduler.ends = frozenset()
    with serving(engine, IMPATIENT) as found:
        yield found


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def rest(client: socket.socket) -> bytes:
    """All until the server closes; a timeout is an error."""
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def said(answer: bytes) -> tuple[int, str]:
    """Status and message of the last answer."""
    head, _, body = answer.rpartition(b"\r\n\r\n")
    return int(head.rpartition(b"HTTP/1.1 ")[2][:3]), json.loads(body)["error"]["message"]


@pytest.mark.unsampled
@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"", 408, "the headers were not whole after 0.6 seconds"),
        (b"GET /health HTT", 408, "the headers were not whole after 0.6 seconds"),
        (POST, 408, "the headers were not whole after 0.6 seconds"),
        (POST + b"Content-Length: 100\r\n\r\n{", 408, "the body was not whole after 0.6 seconds"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", 408, "the body was not whole after 0.6 seconds"),
        (POST + b"Content-Length: 99999\r\n\r\n", 413, "the body has more than 65536 bytes"),
        (POST + b"Content-Length: -1\r\n\r\n", 400, "Invalid HTTP request"),
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "Invalid HTTP request"),
        (POST + b"Content-Length: 2\r\n\r\n{}and more\r\n\r\n", 400, "Invalid HTTP request"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", 400, "Invalid HTTP request"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 8000, 400, "the chunks of the body are too small"),
        (b"\x16\x03\x01\x02\x00\x01", 400, "Invalid HTTP request"),
    ],
    ids=lambda value: str(value[-30:]) if isinstance(value, bytes) else None,
)
def test_requests_that_are_never_whole(impatient: Server, sent: bytes, status: int, message: str):
    """Each is answered in time with a sentence, and its connection is closed."""
    start = time.monotonic()
    with connected(impatient) as client:
        client.sendall(sent)
        found = said(rest(client))
    assert found[0] == status and found[1].startswith(message)
    assert time.monotonic() - start < 5
    assert not impatient.uvicorn.server_state.connections


def test_a_client_that_drips(impatient: Server):
    """A byte now and then does not make a request's time longer."""
    start = time.monotonic()
    with connected(impatient) as client, contextlib.suppress(ConnectionError):
        for byte in POST + b"A: " + b"a" * 1000:
            client.sendall(bytes([byte]))
            time.sleep(0.05)
    assert 0.5 < time.monotonic() - start < 5


def test_requests_on_one_connection_have_their_time_each(impatient: Server):
    for _ in range(8):
        assert impatient.client.get("/health").status_code == 200
        time.sleep(0.2)


def test_a_body_without_end(impatient: Server):
    """It is answered when it is too long, and soon afterwards nobody listens any more."""
    start = time.monotonic()
    with connected(impatient) as client, contextlib.suppress(ConnectionError):
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(1000):
            client.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
            time.sleep(0.01)
    assert time.monotonic() - start < 5
    wait_for(lambda: not impatient.uvicorn.server_state.connections, seconds=5)


@pytest.mark.unsampled
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read(impatient: Server, stream: bool):
    """Its connection is closed when the buffers have been full for long enough, and its requests hold nothing."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 480, "n": 8, "stream": stream, "logprobs": 0}
    data = json.dumps(body).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", impatient.port))
        client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        wait_for(lambda: impatient.engine.busy)
        wait_for(impatient.idle, seconds=60)
        wait_for(lambda: not impatient.uvicorn.server_state.connections, seconds=10)


def test_too_many_connections(impatient: Server):
    """Beyond the limit they are told to come again; beyond twice that they are closed. Those that are served stay so."""
    with contextlib.ExitStack() as opened:
        for _ in range(8):
            opened.enter_context(connected(impatient))
        wait_for(lambda: len(impatient.uvicorn.server_state.connections) == 8)
        ninth = opened.enter_context(connected(impatient))
        ninth.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert said(rest(ninth)) == (429, "too many connections are open; try again later")
    wait_for(lambda: not impatient.uvicorn.server_state.connections, seconds=5)
    assert impatient.client.get("/health").status_code == 200


def test_too_many_bodies_at_once(impatient: Server):
    """Together they may have so many bytes while they are read."""
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(connected(impatient)) for _ in range(4)]
        for client in clients:
            client.sendall(POST + b"Content-Length: 60000\r\n\r\n" + b" " * 50_000)
        found = [said(rest(client)) for client in clients]
    assert sorted(status for status, _ in found) == [408, 408, 429, 429]
    assert impatient.text(prompt="x", max_tokens=2) is not None


def test_pipelined_requests(impatient: Server):
    with connected(impatient) as client:
        client.sendall(
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 50 + b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        found = rest(client)
    assert found.count(b"HTTP/1.1 200") == 50 and said(found)[0] == 404


def test_a_port_in_use_is_said_before_all_else(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def load_engine(*_: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(command.models, "load_engine", load_engine)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.main(["--random", "tiny", "--port", str(port)]) == 2
        assert capsys.readouterr().err == f"error: --host 127.0.0.1 --port {port}: Address already in use\n"
    for options, message in [
        (["--port", "70000"], "--port is 70000; give one in [0, 65536)"),
        (["--port", "-1"], "--port is -1"),
        (["--host", "no.such.host.invalid"], "--host is 'no.such.host.invalid'"),
        (["--grace", "-1"], "--grace is -1; give at least 0 seconds"),
    ]:
        assert command.main(["--random", "tiny", *options]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def process() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command in a process of its own, so that clients here take nothing of its time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = ["--pages", "64", "--max-length", "512", "--max-requests", "8", "--max-waiting", "64", "--buckets", "8", "64"]
    arguments = ["--random", "tiny", "--port", str(port), "--grace", "2", "--name", "tiny", *sizes, "--dtype", "float32"]
    with subprocess.Popen([sys.executable, "-m", "ejkernel_serve", *arguments], stdout=subprocess.DEVNULL) as found:
        try:
            wait_for(lambda: found.poll() is not None or answers(port), seconds=120)
            yield found, port
        finally:
            found.kill()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return ask(port, "GET", "/health")[0] == 200
    return False


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(client):
        client.request(method, path, body)
        answer = client.getresponse()
        return answer.status, answer.read()


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "x", **fields}).encode()


HOSTILE = {
    "a long stop": body(stop="a" * 200_000),
    "stops as long as possible": body(stop=["x" * 1023 + each for each in "abcd"], max_tokens=400, n=8),
    "a long prompt": body(prompt="a" * 1_000_000),
    "many tokens": body(prompt=[1] * 340_000),
    "many prompts": body(prompt=["a"] * 200_000),
    "many choices": body(prompt=["a" * 100] * 8, n=8, max_tokens=400, logprobs=0),
    "many fields": b'{"model": "tiny", ' + b", ".join(b'"%d": 0' % number for number in range(70_000)) + b"}",
    "deep nesting": b'{"model": ' + b"[" * 500_000,
    "a long name": body(model="m" * 1_000_000),
    "small chunks": b"",
}


@pytest.mark.unsampled
def test_health_answers_while_hostile_requests_run(process: tuple[subprocess.Popen[bytes], int]):
    _, port = process
    until, counts = time.monotonic() + 6, dict.fromkeys(HOSTILE, 0)

    def attack(name: str) -> None:
        while time.monotonic() < until:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if name == "small chunks":
                    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 8000)
                        rest(client)
                else:
                    assert ask(port, "POST", "/v1/completions", HOSTILE[name])[0] in (200, 400, 404, 429)
                counts[name] += 1

    attackers = [threading.Thread(target=attack, args=(name,)) for name in HOSTILE]
    for attacker in attackers:
        attacker.start()
    longest = 0.0
    while time.monotonic() < until:
        start = time.monotonic()
        assert ask(port, "GET", "/health")[0] == 200
        longest = max(longest, time.monotonic() - start)
        time.sleep(0.02)
    for attacker in attackers:
        attacker.join()
    print(f"longest answer of health: {longest:.2f} s", counts)
    assert longest < 2, f"{longest:.2f} s"
    assert all(counts.values()), counts


@pytest.mark.unsampled
def test_a_thousand_at_once(process: tuple[subprocess.Popen[bytes], int]):
    """Each is answered, most of them that the queue is full; then all is as before."""
    _, port = process
    found: list[int] = []

    def client() -> None:
        found.append(ask(port, "POST", "/v1/completions", body(max_tokens=8))[0])

    for _ in range(4):
        clients = [threading.Thread(target=client) for _ in range(250)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
    assert len(found) == 1000 and {*found} <= {200, 429} and found.count(200) >= 72
    wait_for(lambda: json.loads(ask(port, "GET", "/health")[1])["pages_held"] == 0)


@pytest.mark.unsampled
def test_sigterm_ends_the_server_in_time(process: tuple[subprocess.Popen[bytes], int]):
    """With requests that run, one that is not whole, one that is idle, and one that does not read."""
    server, port = process
    with contextlib.ExitStack() as opened:
        for sent in (
            POST + b"Content-Length: 100\r\n\r\n{",
            b"GET /hea",
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
            *(POST + b"Content-Length: %d\r\n\r\n" % len(each) + each for each in (HOSTILE["many choices"],) * 2),
        ):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(sent)
        time.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=20) in (0, -signal.SIGTERM)
