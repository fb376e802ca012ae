"""`python -m ejkernel_serve`: serve a model in OpenAI's format."""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from ejkernel_serve import models, tokenizer
from ejkernel_serve.config import Limits


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("ejkernel_serve", description=__doc__)
    models.add_arguments(found)
    found.add_argument(
        "--host", default="127.0.0.1", help="there is no authentication: see the README before this is not loopback"
    )
    found.add_argument("--port", type=int, default=8000)
    found.add_argument("--name", help="of the model, for clients; default: llama-tiny and the like, or the folder's")
    found.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="in Jinja2: of chats; default: the folder's, if it has one",
    )
    found.add_argument("--grace", type=int, default=10, metavar="SECONDS", help="for requests to end in after SIGTERM")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        import uvicorn

        from ejkernel_serve.chat import ChatTemplate
        from ejkernel_serve.connection import configuration
        from ejkernel_serve.server import application
    except ImportError as error:
        print(f"error: {error}; pip install ejkernel-serve[server]", file=sys.stderr)
        return 2
    try:
        if arguments.grace < 0:
            raise ValueError(f"--grace is {arguments.grace}; give at least 0 seconds")
        if arguments.chat_template:
            template = ChatTemplate.load(arguments.chat_template)
        else:
            source = tokenizer.template_of(arguments.model_folder) if arguments.model_folder else None
            template = ChatTemplate.load() if source is None else ChatTemplate(source)
        with contextlib.ExitStack() as opened:
            listeners = bound(arguments.host, arguments.port, opened)  # before what takes long
            engine = models.load_engine(arguments)
            print("compiling ...", flush=True)
            engine.warm_up()
            engine.probe()
            for each in listeners:
                each.listen()
            allow_many_files()
            name = arguments.name or models.name_of(arguments)
            grace = arguments.grace
            served = application(engine, name, template=template)
            server = uvicorn.Server(configuration(served, Limits(), timeout_graceful_shutdown=grace))
            host, port = listeners[0].getsockname()[:2]
            print(f"{name} is served on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
            server.run(sockets=listeners)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def bound(host: str, port: int, opened: contextlib.ExitStack) -> list[socket.socket]:
    """A socket for each address of the host, which does not listen yet.

    Raises:
        ValueError: there is no such address, or another program listens there.
    """
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port is {port}; give one in [0, 65536), 0 for any that is free")
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host is {host!r}: {error}") from None
    found: list[socket.socket] = []
    for family, kind, protocol, _, where in dict.fromkeys(addresses):
        made = opened.enter_context(socket.socket(family, kind, protocol))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            made.bind((where[0], port, *where[2:]))
        except OSError as error:
            raise ValueError(f"--host {host} --port {port}: {error.strerror}") from None
        port = made.getsockname()[1]
        found.append(made)
    return found


def allow_many_files() -> None:
    """As many as the system allows this process, and no more than it can use: each connection is one."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * Limits().connections
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


if __name__ == "__main__":
    sys.exit(main())
