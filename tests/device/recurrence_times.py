"""Milliseconds of recurrences on this device, forward with backward in one program: a line of JSON.

    python tests/device/recurrence_times.py --only 'mamba|gla'
    python tests/device/recurrence_times.py --dtype float32 --platform triton,xla --shape 1,4096,16,128 --out FILE

It imports public functions alone, so that it also times an older tree, whose PYTHONPATH it is given. Programs are compiled first,
beside each other. `--out`: also write a record, with versions.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the device

import jax
import jax.numpy as jnp
from recurrence_problems import FAMILIES, SHAPES, SMALL, Shape

from ejkernel_bench.provenance import versions

Arrays = dict[str, Any]


def timed(options: argparse.Namespace) -> dict[str, float]:
    """Of 10 calls in a row until the last result is there, the median of 7."""
    shape = SMALL[0] if options.small else Shape(*options.shape)
    calls, repeats = (1, 1) if options.small else (10, 7)
    programs: dict[str, Any] = {}
    for name, family in FAMILIES.items():
        if not re.search(options.only, name):
            continue
        arrays = {key: in_dtype(x, options.dtype) for key, x in family.make(shape).items()}
        moving = {key: x for key, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        for platform in options.platform:
            run = jax.jit(functools.partial(_gradients, family, arrays, platform or None))
            programs[f"{name} {platform}".strip()] = run.lower(moving), moving
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = dict(zip(programs, pool.map(lambda program: program[0].compile(), programs.values()), strict=True))
    result = {}
    for name, run in compiled.items():
        moving = programs[name][1]
        jax.block_until_ready(run(moving))
        taken = []
        for _ in range(repeats):
            started = time.perf_counter()
            jax.block_until_ready([run(moving) for _ in range(calls)])
            taken.append((time.perf_counter() - started) / calls * 1e3)
        result[name] = statistics.median(taken)
        print(f"  {name} {shape}: {result[name]:.3f} ms", file=sys.stderr, flush=True)
    return result


def in_dtype(array: Any, dtype: str) -> Any:
    """Numbers that a half holds, in the dtype."""
    return array.astype(dtype) if dtype and array.dtype == jnp.bfloat16 else array


def _gradients(family: Any, arrays: Arrays, platform: str | None, moving: Arrays) -> Any:
    def loss(moving: Arrays) -> Any:
        found = family.ours({**arrays, **moving}, platform=platform)
        return jnp.sum((found[0] if isinstance(found, tuple) else found).astype(jnp.float32))

    return jax.grad(loss)(moving)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression for names of families")
    parser.add_argument("--dtype", default="", help="of what is bfloat16 otherwise")
    parser.add_argument(
        "--platform", type=lambda text: text.split(","), default=[""], help="one or more; by default the default order"
    )
    parser.add_argument("--shape", type=lambda text: [int(part) for part in text.split(",")], default=list(SHAPES[0]))
    parser.add_argument("--small", action="store_true", help="to try the script without a GPU")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    found = timed(options)
    if options.out:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        said = {name: value for name, value in vars(options).items() if name != "out"}
        found_here = {"device": jax.devices()[0].device_kind, **versions(())}
        options.out.write_text(
            json.dumps({"date": today, "versions": found_here, "options": said, "milliseconds": found}, indent=1) + "\n"
        )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
