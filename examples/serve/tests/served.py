"""An engine that is served over loopback as the command serves it, by uvicorn in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import uvicorn

from ejkernel_serve.chat import ChatTemplate
from ejkernel_serve.config import Limits
from ejkernel_serve.connection import configuration
from ejkernel_serve.engine import Engine
from ejkernel_serve.server import application

SIZES: dict[str, Any] = {"pages": 32, "page_size": 16, "max_length": 512, "max_requests": 8, "buckets": (8, 64)}


class Server:
    """uvicorn in a thread, and the engine that it serves."""

    def __init__(self, engine: Engine, limits: Limits, template: ChatTemplate | None = None) -> None:
        self.engine = engine
        options: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": 2}
        self.uvicorn = uvicorn.Server(configuration(application(engine, "tiny", limits, template), limits, **options))
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that tests can fill it
        self.port = listener.getsockname()[1]
        self.thread = threading.Thread(target=self.uvicorn.run, args=([listener],))
        self.thread.start()
        wait_for(lambda: self.uvicorn.started)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": "tiny", **fields})

    def text(self, **fields: Any) -> str:
        return self.complete(**fields).raise_for_status().json()["choices"][0]["text"]

    def stop(self) -> None:
        self.client.close()
        self.uvicorn.should_exit = True
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()

    def idle(self) -> bool:
        return not self.engine.busy and self.engine.scheduler.cache.held == 0


@contextlib.contextmanager
def serving(engine: Engine, limits: Limits | None = None, template: ChatTemplate | None = None) -> Iterator[Server]:
    server = Server(engine, limits or Limits(), template)
    try:
        yield server
    finally:
        server.stop()
        assert server.idle()
        engine.check()


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last, "waited in vain"
        time.sleep(0.005)
