"""`python -m ejkernel_serve`: serve a model in OpenAI's completion format."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ejkernel_serve import models


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("ejkernel_serve", description=__doc__)
    models.add_arguments(found)
    found.add_argument("--host", default="127.0.0.1")
    found.add_argument("--port", type=int, default=8000)
    found.add_argument("--name", help="of the model, for clients; default: llama-tiny and the like")
    found.add_argument("--grace", type=int, default=10, metavar="SECONDS", help="for requests to end in after SIGTERM")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        import uvicorn

        from ejkernel_serve.server import application
    except ImportError as error:
        print(f"error: {error}; pip install ejkernel-serve[server]", file=sys.stderr)
        return 2
    try:
        engine = models.load_engine(arguments)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("compiling ...", flush=True)
    engine.warm_up()
    name = arguments.name or f"{arguments.model}-{arguments.random or arguments.size}"
    uvicorn.run(
        application(engine, name),
        host=arguments.host,
        port=arguments.port,
        timeout_graceful_shutdown=arguments.grace,
        ws="none",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
