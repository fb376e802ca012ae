"""`python -m ejkernel_serve.bench`: latency per token and throughput of the engine with 1, 16 and 64 requests at once.

No server and no network: requests go into the engine directly, all at the same time, or at random with `--rates`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejkernel_serve import models
from ejkernel_serve.config import Sampling
from ejkernel_serve.engine import Engine
from ejkernel_serve.scheduler import Request
from ejkernel_serve.vocabulary import Vocabulary

PACKAGES = ("jax", "jaxlib", "ejkernel-core", "ejkernel-xla", "ejkernel-triton", "ejkernel-pallas", "ejkernel-cuda")

ARRIVING = 128
"""Requests of a load that arrives at random."""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("ejkernel_serve.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    models.add_arguments(found)
    found.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64], help="at once")
    found.add_argument(
        "--rates",
        type=float,
        nargs="*",
        default=[],
        metavar="PER_SECOND",
        help=f"also: {ARRIVING} requests that arrive at random, so many a second",
    )
    found.add_argument("--prompt", type=int, default=128, metavar="TOKENS")
    found.add_argument("--generate", type=int, default=128, metavar="TOKENS")
    found.add_argument("--repeats", type=int, default=3, help="of which the one with the median throughput counts")
    found.add_argument("--out", type=Path, help="write the record as JSON")
    return found


def measure(engine: Engine, number: int, prompt: int, generate: int, seed: int, rate: float | None = None) -> dict[str, Any]:
    """So many requests with random prompts, which share nothing; all at the same time, or so many a second in a Poisson process.

    Returns:
        seconds: until all have ended.
        tokens_per_second: that were generated.
        first_token_seconds, token_seconds: quantiles over requests, since each arrived, and over the times between two tokens of
            a request.
        steps, preemptions, drafts, accepted_drafts: their numbers.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.zeros(number) if rate is None else np.cumsum(rng.exponential(1 / rate, number))
    sampling = [Sampling(generate, temperature=0.8, top_k=50, top_p=0.95, seed=each) for each in range(number)]
    prompts = rng.integers(0, engine.vocabulary.size - 1, (number, prompt)).tolist()
    requests, last = list[Request](), dict[Request, float]()  # of a request, when it arrived or had news
    first: list[float] = []
    between: list[float] = []
    steps = 0
    start = time.perf_counter()
    while len(requests) < number or engine.busy:
        while len(requests) < number and arrivals[len(requests)] <= time.perf_counter() - start:
            at = len(requests)
            requests.append(engine.submit(prompts[at], sampling[at]))
            last[requests[at]] = start + arrivals[at]
        if not engine.busy:
            time.sleep(max(0.0, start + arrivals[len(requests)] - time.perf_counter()))
            continue
        news, steps = engine.step(), steps + 1
        now = time.perf_counter()
        for request, new in news:
            if len(request.generated) > new:
                between += [(now - last[request]) / new] * new
            else:
                first.append(now - last[request])
            last[request] = now
    seconds = time.perf_counter() - start
    generated = sum(len(request.generated) for request in requests)
    return {
        "requests": number,
        "rate": rate,
        "seconds": seconds,
        "generated_tokens": generated,
        "tokens_per_second": generated / seconds,
        "first_token_seconds": _quantiles(first),
        "token_seconds": _quantiles(between),
        "steps": steps,
        "drafts": sum(request.drafted for request in requests),
        "accepted_drafts": sum(request.accepted for request in requests),
        "preemptions": sum(request.preemptions for request in requests),
    }


def load_engine(arguments: argparse.Namespace) -> Engine:
    """As `models.load_engine`, but draws from all tokens of a model without a tokenizer, as a tokenizer of its size would."""
    if arguments.model_folder:
        return models.load_engine(arguments)
    model = models.load_model(arguments.model, arguments.random or arguments.size, arguments.checkpoint)
    every = Vocabulary((b"",) * model.config.vocabulary, frozenset(), "the model's tokens")
    return Engine(model, models.engine_config(arguments), every)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """A record of all numbers of requests, with what they were measured on.

    Raises:
        ValueError: sizes that do not fit.
    """
    engine = load_engine(arguments)
    engine.scheduler.ends = frozenset()  # so that every request generates as many tokens
    start = time.perf_counter()
    engine.warm_up()
    compiled = time.perf_counter() - start
    rows: list[dict[str, Any]] = []
    loads = [(number, None) for number in arguments.requests] + [(ARRIVING, rate) for rate in arguments.rates]
    for number, rate in loads:
        runs = [measure(engine, number, arguments.prompt, arguments.generate, seed, rate) for seed in range(arguments.repeats)]
        rows.append(sorted(runs, key=lambda row: row["tokens_per_second"])[len(runs) // 2])
        engine.check()
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "versions": {"python": platform.python_version(), **_versions()},
        "model": arguments.model,
        "size": arguments.random or arguments.size,
        "name": models.name_of(arguments),
        "engine": vars(engine.config),
        "prompt_tokens": arguments.prompt,
        "max_tokens": arguments.generate,
        "compile_seconds": compiled,
        "rows": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        record = run(arguments)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{record['name']} on {record['device']}; compiled in {record['compile_seconds']:.1f} s")
    print("requests       a second  tokens/s  ms to the first token (p50, p99)  ms per token (p50, p99)")
    for row in record["rows"]:
        first, each = row["first_token_seconds"], row["token_seconds"]
        print(
            f"{row['requests']:>8}  {row['rate'] or 'all at once':>13}  {row['tokens_per_second']:>8,.0f}  "
            f"{first['p50'] * 1e3:>24.1f}, {first['p99'] * 1e3:.1f}  {each['p50'] * 1e3:.2f}, {each['p99'] * 1e3:.2f}"
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {name: float(np.quantile(seconds, q)) if seconds else 0.0 for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
