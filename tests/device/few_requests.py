"""Time decoding for a few requests on `cuda` and `triton`, where the default order and the merge of parts matter.

    python tests/device/few_requests.py --out results

Each shape is checked against XLA's platform in float32 first. Then microseconds on the device by the clock of `ejkernel bench`, of
input sets in turn; `few_requests.json` under `--out` (or `$OUT`). `--stored float8_e4m3fn` for pages of that type, `--rounds` (4).
Exits with 1 if any number is wrong. Needs the packages as README.md beside this says.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import os
import pathlib
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from check_gpu import relative, versions
from layers import Shape, attend, cache_of

from ejkernel_bench._clock import DeviceClock
from ejkernel_bench._program import Program

PAGE, SETS, TOLERANCE = 16, 3, 0.02
HEADS = ((32, 8, 128), (32, 32, 128), (64, 8, 64))
REQUESTS = (
    (1, 1024), (1, 8192), (1, 32768), (2, 65536), (3, 50000), (4, 4096), (4, 32768), (5, 7000), (8, 1024), (8, 8192), (12, 3000),
    (16, 2048), (16, 8192), (24, 4096),
)  # fmt: skip
"""Requests, and keys of each."""
MOST_BYTES = 2**30


def arrays(shape: Shape, query_heads: int, seed: int) -> tuple[Any, ...]:
    """What `attend` takes before the platform: queries, cache, lengths, and a scale of pages of bytes."""
    query = jax.random.normal(jax.random.key(SETS + seed), (shape.requests, query_heads, shape.size), jnp.bfloat16)
    lengths = jnp.full((shape.requests,), shape.keys, jnp.int32)
    return query, cache_of(shape, seed), lengths, None if shape.stored == "bfloat16" else jnp.ones((), jnp.float32)


def error_of(platform: str, query: Any, cache: Any, lengths: Any, scale: Any) -> float:
    *pages, tables = cache
    if scale is None:  # pages of bytes stay what they are
        pages = [value.astype(jnp.float32) for value in pages]
    exact = jax.jit(functools.partial(attend, platform="xla"))
    wanted = np.asarray(exact(query.astype(jnp.float32), (*pages, tables), lengths, scale))
    return relative(jax.jit(functools.partial(attend, platform=platform))(query, cache, lengths, scale), wanted)


def measure(shape: Shape, heads: int, rounds: int) -> dict[str, Any]:
    sets = [arrays(shape, heads, seed) for seed in range(SETS)]
    found: dict[str, Any] = {"requests": shape.requests, "keys": shape.keys, "heads": heads, "key_heads": shape.key_heads}
    found |= {"size": shape.size, "page": shape.page_size, "errors": {}}
    programs = {}
    for platform in ("cuda", "triton"):
        found["errors"][platform] = error_of(platform, *sets[0])
        programs[platform] = Program(jax.jit(functools.partial(attend, platform=platform)), sets, lambda out: {"out": out})
        found[platform] = []
    clock = DeviceClock("gpu")
    for turn, (platform, program) in itertools.product(range(rounds), programs.items()):
        found[platform] += [round(seconds * 1e6, 2) for seconds in clock.samples(program, turn)]
    if not found["cuda"]:
        sys.exit(f"no device time: {clock.reason or 'runs of one program were not alike'}")
    times = ", ".join(f"{platform} {statistics.median(found[platform]):.2f}" for platform in programs if found[platform])
    worst = max(found["errors"].values())
    print(
        f"{shape.requests} x {shape.keys} H{heads}/{shape.key_heads} D{shape.size}: {times} us, error {worst:.1e}", flush=True
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of few_requests.json")
    parser.add_argument("--stored", default="bfloat16", help="dtype of pages")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    what = (
        f"page_attention of queries in bfloat16 over pages of {PAGE} tokens in {options.stored}, on cuda and triton: requests of "
        f"so many keys each, {SETS} input sets in turn, {options.rounds} rounds; microseconds on the device by the clock of "
        "ejkernel bench"
    )
    result: dict[str, Any] = {"device": str(jax.devices()[0].device_kind), "versions": versions()}
    result |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "what": what, "times": []}
    path = pathlib.Path(options.out) / "few_requests.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for (heads, key_heads, size), (requests, keys) in itertools.product(HEADS, REQUESTS):
        shape = Shape(options.stored, requests, keys, PAGE, key_heads, size)
        if shape.bytes > MOST_BYTES:
            continue
        result["times"].append(measure(shape, heads, options.rounds))
        path.write_text(json.dumps(result, indent=1))
    return 1 if any(max(one["errors"].values()) > TOLERANCE for one in result["times"]) else 0


if __name__ == "__main__":
    sys.exit(main())
