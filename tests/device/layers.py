"""Time decoding as a model does it: calls of `paged_attention`, one for each layer, one after the other in one program.

    python tests/device/layers.py --out results

Benchmarks call from Python, which leaves pauses between short calls; layers leave none. Checks one layer against XLA's platform,
then prints for each layer wall time of programs one after the other, and device time under JAX's profiler, and writes
`layers.json` under `--out` (or `$OUT`). Exits with 1 if any number is wrong. Needs the packages as README.md beside this says.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from check_gpu import BANDWIDTH, versions, wall_seconds

import ejkernel
from ejkernel_bench._clock import DeviceClock
from ejkernel_bench._program import Program

HEADS, KEY_HEADS, SIZE = 32, 8, 128
LAYERS, CACHES, ROUNDS, QUEUED = 24, 3, 7, 20
TOLERANCE = 0.02
"""Of the norm of what is expected: queries and results are bfloat16."""


@dataclasses.dataclass(frozen=True)
class Shape:
    stored: str
    requests: int
    keys: int
    page_size: int
    key_heads: int = KEY_HEADS
    size: int = SIZE

    @property
    def bytes(self) -> int:
        """Of keys and values, once."""
        return 2 * self.requests * self.keys * self.key_heads * self.size * jnp.dtype(self.stored).itemsize


SHAPES = (
    Shape("float8_e4m3fn", 1, 131072, 64),
    Shape("float8_e4m3fn", 64, 4096, 16),
    Shape("bfloat16", 1, 131072, 64),
    Shape("bfloat16", 64, 4096, 16),
)


def cache_of(shape: Shape, seed: int) -> tuple[Any, Any, Any]:
    """Key and value pages, and block tables that name them in no order."""
    pages = shape.requests * -(-shape.keys // shape.page_size)

    @jax.jit
    def random(key: Any) -> Any:
        pages_shape = (pages, shape.page_size, shape.key_heads, shape.size)
        return jax.random.normal(key, pages_shape, jnp.bfloat16).astype(shape.stored)

    keys = jax.random.split(jax.random.key(seed))
    order = np.random.default_rng(seed).permutation(pages).astype(np.int32)
    return random(keys[0]), random(keys[1]), jnp.asarray(order.reshape(shape.requests, -1))


def attend(query: Any, cache: Any, lengths: Any, scale: Any, platform: str) -> Any:
    key_pages, value_pages, tables = cache
    return ejkernel.page_attention(
        query, key_pages, value_pages, lengths, tables, k_scale=scale, v_scale=scale, layout="pthd", platform=platform
    )


def error_of(shape: Shape, platform: str, query: Any, cache: Any, lengths: Any, scale: Any) -> float:
    """Norm of the difference from XLA's platform, over what that finds."""
    wanted = np.asarray(jax.jit(functools.partial(attend, platform="xla"))(query, cache, lengths, scale), np.float64)
    found = np.asarray(jax.jit(functools.partial(attend, platform=platform))(query, cache, lengths, scale), np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def measure(shape: Shape, platform: str) -> dict[str, Any]:
    caches = [cache_of(shape, seed) for seed in range(CACHES)]
    lengths = jnp.full((shape.requests,), shape.keys, jnp.int32)
    scale = jnp.ones((), jnp.float32) if shape.stored.startswith("float8") else None
    query = jax.random.normal(jax.random.key(CACHES), (shape.requests, HEADS, SIZE), jnp.bfloat16)
    error = error_of(shape, platform, query, caches[0], lengths, scale)

    @jax.jit
    def layers(query: Any, caches: Any, lengths: Any, scale: Any) -> Any:
        for layer in range(LAYERS):
            query = attend(query, caches[layer % CACHES], lengths, scale, platform)
        return query

    sets, clock = [(query, caches, lengths, scale)], DeviceClock("gpu")
    program = Program(layers, sets, lambda found: {"out": found})
    found = {
        "wall": [seconds / LAYERS for seconds in wall_seconds(layers, sets, ROUNDS, QUEUED)],
        "profiler": [seconds / LAYERS for _ in range(ROUNDS) for seconds in clock.samples(program, 0)],
    }
    if not found["profiler"]:
        sys.exit(f"no device time: {clock.reason or 'runs of one program were not alike'}")
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    fractions = {name: round(shape.bytes / BANDWIDTH / seconds, 3) for name, seconds in middle.items()}
    times = ", ".join(f"{name} {seconds * 1e6:.2f} us a layer, {fractions[name]}" for name, seconds in middle.items())
    print(f"{shape} {platform}: {times} of 4.3 TB/s, error {error:.1e}")
    return {**dataclasses.asdict(shape), "platform": platform, "seconds": found, "fractions": fractions, "error": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of layers.json")
    parser.add_argument("--platforms", default="cuda,triton", help="with commas")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"versions": versions(), "layers": LAYERS, "times": []}
    for shape in SHAPES:
        result["times"] += [measure(shape, platform) for platform in options.platforms.split(",")]
        (folder / "layers.json").write_text(json.dumps(result, indent=1))
    return 1 if any(one["error"] > TOLERANCE for one in result["times"]) else 0


if __name__ == "__main__":
    sys.exit(main())
