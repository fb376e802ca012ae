"""Every implementation over a grid of shapes, and where the default order does not choose the fastest.

    python tests/device/orders.py --out results

For `flash_attention` (lengths, heads and masks of a grid) and `paged_attention` (prefill, mixed, decode), bfloat16: device time by
JAX's profiler of each implementation that takes the call, forward and backward, each compared with the chosen one's numbers. Marks
a line where another is faster by more than `--margin`, writes `orders.json` under `--out` (or `$OUT`), exits with 1 if numbers
differ.

`--only` of attention,pages; `--cases` a regular expression for their names; `--budget` seconds after which nothing new is started;
`--threads` that compile.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from delta_rule import Report

import ejkernel
from ejkernel_bench._clock import DeviceClock
from ejkernel_bench._program import Program

RUNS = 7
TOLERANCE = 2e-2
"""Of the norm of the chosen implementation's results: two roundings to bfloat16, and weights in bfloat16."""
TOKENS = ((32, 128), (16, 256), (8, 512), (4, 1024), (4, 2048), (1, 8192))
HEADS = ((32, 8, 128, 128), (16, 16, 128, 128), (32, 32, 64, 64), (8, 4, 256, 256), (16, 16, 192, 128))
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": 1024},
    "cap": {"causal": True, "logits_soft_cap": 50.0},
}


class Problem(NamedTuple):
    name: str
    function: str
    """A public one."""
    options: dict[str, Any]
    make: Callable[[], tuple[Any, ...]]
    """Its arrays."""
    phases: tuple[str, ...] = ("forward",)


def normal(seed: int, *shapes: tuple[int, ...]) -> list[Any]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def attention_problems() -> Iterator[Problem]:
    for (batch, tokens), heads, (mask, options) in itertools.product(TOKENS, HEADS, MASKS.items()):
        if mask == "window" and tokens < 2048:
            continue
        many, few, size, value = heads
        shapes = (batch, tokens, many, size), (batch, tokens, few, size), (batch, tokens, few, value)
        width = f"{size}" if size == value else f"{size}/{value}"
        name = f"B{batch} T{tokens} H{many}/{few} D{width} {mask}"
        make = functools.partial(lambda *shapes: tuple(normal(0, *shapes)), *shapes)
        yield Problem(name, "flash_attention", options, make, ("forward", "backward"))


def page_problems() -> Iterator[Problem]:
    """New tokens of each request over what it has stored."""
    for name, new, stored in (
        ("prefill 4 x 1024 of 8192", [1024] * 4, [8192] * 4),
        ("prefill 1 x 2048 of 2048", [2048], [2048]),
        ("prefill 8 x 512 of 512", [512] * 8, [512] * 8),
        ("mixed 60 x 1, 2 x 1024 of 4096", [1] * 60 + [1024] * 2, [4096] * 62),
        ("mixed 60 x 1, 2 x 256 of 4096", [1] * 60 + [256] * 2, [4096] * 62),
        ("few 32 x 4 of 4096", [4] * 32, [4096] * 32),
        ("decode 64 x 1 of 4096", [1] * 64, [4096] * 64),
        ("decode 8 x 1 of 1024", [1] * 8, [1024] * 8),
    ):
        for heads, page in itertools.product(((32, 8, 128), (16, 16, 128), (64, 8, 64)), (16, 64)):
            make = functools.partial(pages_of, new, stored, heads, page)
            label = f"{name} H{heads[0]}/{heads[1]} D{heads[2]} page {page}"
            yield Problem(label, "unified_attention", {}, make)


def pages_of(new: list[int], stored: list[int], heads: tuple[int, int, int], page: int) -> tuple[Any, ...]:
    """Arguments of `unified_attention`; block tables name pages in no order."""
    many, few, size = heads
    pages = -(-max(stored) // page)
    held = (len(new) * pages, page, few, size)
    order = jax.random.permutation(jax.random.key(1), len(new) * pages).astype(jnp.int32)
    starts = jnp.cumsum(jnp.asarray([0, *new], jnp.int32))
    return (
        *normal(0, (sum(new), many, size), held, held),
        jnp.asarray(stored, jnp.int32),
        order.reshape(len(new), pages),
        starts,
    )


def compiled(problem: Problem, arrays: tuple[Any, ...], phase: str, platform: str) -> Any:
    """The program and what it is called with; an exception as a finding."""
    function = functools.partial(getattr(ejkernel, problem.function), **problem.options, platform=platform)
    try:
        if phase == "forward":
            return jax.jit(function).lower(*arrays).compile(), arrays
        out, pull = jax.jit(lambda *arrays: jax.vjp(function, *arrays))(*arrays)
        cotangent = jax.random.normal(jax.random.key(1), out.shape, out.dtype)
        return jax.jit(lambda pull, cotangent: pull(cotangent)).lower(pull, cotangent).compile(), (pull, cotangent)
    except Exception as error:  # noqa: BLE001 - what does not compile is a finding
        return error


def device_milliseconds(program: Any, arrays: tuple[Any, ...]) -> float:
    """The median of some runs; kernels that overlap count once."""
    clock = DeviceClock("gpu")
    taken = clock.samples(Program(program, [arrays] * RUNS, lambda found: {"out": found}), 0)
    if not taken:
        raise RuntimeError(clock.reason or "runs of one program were not alike")
    return 1e3 * statistics.median(taken)


def difference(got: Any, wanted: Any) -> float:
    def one(a: Any, b: Any) -> Any:
        exact = b.astype(jnp.float32)
        return jnp.linalg.norm((a.astype(jnp.float32) - exact).ravel()) / jnp.linalg.norm(exact.ravel())

    return max(float(x) for x in jax.tree.leaves(jax.tree.map(one, got, wanted)))


def measure(report: Report, problem: Problem, phase: str, margin: float, threads: int) -> None:
    given = problem.make()
    explained = ejkernel.explain(problem.function, *given, **problem.options)
    decision = getattr(explained, phase).to_dict()
    usable = [row["implementation"] for row in decision["candidates"] if row["verdict"] in ("chosen", "available")]
    chosen = decision["chosen"]
    names = [chosen, *(name for name in usable if name not in (chosen, "xla"))]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        programs = list(pool.map(lambda name: compiled(problem, given, phase, name), names))
    times: dict[str, float] = {}
    wanted = None
    for name, found in zip(names, programs, strict=True):
        label = f"{problem.name} {phase} {name}"
        try:
            if isinstance(found, Exception):
                raise found
            program, arrays = found
            got = jax.block_until_ready(program(*arrays))
            wanted = got if wanted is None else wanted
            error = difference(got, wanted)
            report.check(label, error < TOLERANCE, f"{error:.1e}")
            times[name] = device_milliseconds(program, arrays)
        except Exception as error:  # noqa: BLE001 - the others are measured all the same
            report.check(label, False, f"{type(error).__name__}: {str(error)[:200]}")
    row = {
        "case": problem.name,
        "function": problem.function,
        "options": problem.options,
        "phase": phase,
        "chosen": chosen,
        "arrays": [[list(array.shape), str(array.dtype)] for array in given],
        "milliseconds": times,
    }
    report.result["times"].append(row)
    best = min(times, key=lambda name: times[name], default=chosen)
    mark = " "
    if chosen in times and times[chosen] > (1 + margin) * times[best]:
        mark = "!"
        report.result["slower"].append([problem.name, phase, chosen, best, times[chosen] / times[best]])
    listed = ", ".join(f"{name} {milliseconds:.4f}" for name, milliseconds in times.items())
    print(f"{mark} {problem.name:44s} {phase:8s} {listed}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of orders.json")
    parser.add_argument("--only", default="attention,pages")
    parser.add_argument("--cases", default="")
    parser.add_argument("--budget", type=float, default=400)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--margin", type=float, default=0.05)
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    report = Report(options.out, options.budget, "orders")
    report.result["slower"] = []
    makers = {"attention": attention_problems, "pages": page_problems}
    for only in options.only.split(","):
        for problem in makers[only]():
            if not re.search(options.cases, problem.name):
                continue
            for phase in problem.phases:
                if report.remaining() < 0:
                    break
                measure(report, problem, phase, options.margin, options.threads)
                report.save()
    report.save()
    print(f"{len(report.result['times'])} calls, default slower in {len(report.result['slower'])}:")
    for name, phase, chosen, best, ratio in report.result["slower"]:
        print(f"  {name} {phase}: {chosen}, {best} is {ratio:.2f} times as fast")
    return 1 if any(not row["passed"] for row in report.result["numbers"]) else 0


if __name__ == "__main__":
    sys.exit(main())
