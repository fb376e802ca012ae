"""`native_sparse_selection` in Triton on a real GPU: which blocks are selected, then times.

    python tests/device/selection.py --out results

Every config of the search space selects the blocks of small problems exactly as float64 does (integers, one query head for each
key head, whose weights are often equal), twice the same. Of the large problems, in random floats, selected blocks are compared
with XLA's, which may differ where sums of weights almost do not, and timed (device time by CUPTI) beside XLA. Prints tables, writes
`selection.json` under `--out` (or `$OUT`), exits with 1 if a choice is wrong.

`--only` problems whose name has one of these texts, comma separated; `--budget` seconds after which nothing new is started (60);
`--threads` that compile (12); `--skip` of xla; `--small` checks small problems only, without a GPU: with
`EJKERNEL_TRITON_INTERPRET=1` in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from check_gpu import knobs
from delta_rule import Report, samples_of
from latent import XLA, run_script

from ejkernel.operations.native_sparse_attention.forms import blocks_of
from ejkernel.operations.native_sparse_selection import reference
from ejkernel.operations.native_sparse_selection.interface import OPERATION
from ejkernel.plugin import current_target
from ejkernel.testing.checks import widened
from ejkernel_triton.native_sparse_selection import config, kernel
from ejkernel_xla.native_sparse_selection import kernel as xla

HEADS, KEY_HEADS, SIZE, BLOCK_SIZE, COUNT = 64, 4, 128, 64, 16


@dataclasses.dataclass(frozen=True)
class Problem:
    """All tokens of `batch` rows or, with `decoding`, their last ones."""

    name: str
    tokens: int
    batch: int = 1
    heads: int = HEADS
    count: int = COUNT
    block_size: int = BLOCK_SIZE
    sequences: int = 0
    decoding: bool = False
    integers: bool = False
    dtype: str = "bfloat16"

    def small(self) -> Problem:
        return dataclasses.replace(
            self, tokens=210, block_size=5, heads=KEY_HEADS, batch=min(self.batch, 3), count=9, integers=True,
            sequences=min(self.sequences, 4),
        )  # fmt: skip

    def bound(self, seed: int) -> Any:
        keys = jax.random.split(jax.random.key(seed), 2)
        bounds = jnp.asarray(np.linspace(0, self.tokens, self.sequences + 1), jnp.int32) if self.sequences else None
        blocks = blocks_of(self.tokens, self.block_size, bounds)
        queries, entries = 1 if self.decoding else self.tokens, blocks.starts.shape[0]

        def draw(key: Any, *shape: int) -> Any:
            found = jax.random.randint(key, shape, -1, 2) if self.integers else jax.random.normal(key, shape, jnp.bfloat16)
            return found.astype(self.dtype)

        query = draw(keys[0], self.batch, queries, self.heads, SIZE)
        means = draw(keys[1], self.batch, entries, KEY_HEADS, SIZE)
        lse = jnp.full(query.shape[:3], np.log(entries) + 3, jnp.float32)
        first = None if bounds is None else blocks.token_entries[None, -queries:]
        own = blocks.token_numbers[None, -queries:]
        return OPERATION.canonicalise(query, means, lse, own, first, count=self.count)


PROBLEMS = (
    Problem("t8192", 8192),
    Problem("t32768", 32768),
    Problem("t131072", 131072),
    Problem("t8192 packed", 8192, sequences=8),
    Problem("b4 t4096", 4096, batch=4),
    Problem("t8192 float32", 8192, dtype="float32"),
    Problem("decode b64 s32768", 32768, batch=64, decoding=True),
    Problem("decode b1 s131072", 131072, decoding=True),
)


def same_blocks(got: Any, wanted: Any) -> float:
    """Share of rows of numbers that are equal, of the last queries, which have most blocks."""
    return float(jnp.mean((got[:, -4096:] == wanted[:, -4096:]).all(-1)))


def check_small(report: Report, problem: Problem, chosen: Any) -> bool:
    bound = problem.small().bound(7)
    program = jax.jit(lambda inputs: kernel.forward(bound.call, inputs, chosen).blocks)
    got, again = np.asarray(program(bound.inputs)), np.asarray(program(bound.inputs))
    wanted = reference.forward(bound.call, widened(bound.inputs)).blocks
    wrong = int((got != wanted).sum())
    detail = f"{wrong} of {wanted.size} differ" + ("" if np.array_equal(got, again) else ", runs differ")
    return report.check(f"{problem.name}: {knobs(chosen)}", wrong == 0 and np.array_equal(got, again), detail)


def time_problem(report: Report, problem: Problem, options: argparse.Namespace, pool: Any) -> None:
    """XLA first: its blocks are what those of the configs are compared with."""
    bound = problem.bound(0)
    first = config.heuristic(bound.call, current_target())
    found = [] if "xla" in options.skip else [None]
    found += config.search_space(bound.call, current_target())

    def compiled(one: Any) -> Any:
        forward = xla.forward if one is None else kernel.forward
        try:
            return jax.jit(lambda inputs: forward(bound.call, inputs, one).blocks).lower(bound.inputs).compile()
        except Exception as error:  # noqa: BLE001 - a config that does not compile is a finding
            return error

    wanted = None
    for one, program in zip(found, list(pool.map(compiled, found)), strict=True):
        name = XLA if one is None else knobs(one)
        if report.remaining() < 0:
            print("  out of time", flush=True)
            return
        if isinstance(program, Exception):
            report.check(f"{problem.name}: {name}", False, f"{type(program).__name__}: {str(program)[:300]}")
            continue
        if one is not None and not check_small(report, problem, one):
            continue
        got = jax.block_until_ready(program(bound.inputs))
        wanted = got if wanted is None else wanted
        same = same_blocks(got, wanted)
        report.check(f"{problem.name}: {name} beside the first", same > 0.99, f"{same:.5f} of the rows are equal")
        taken = [float(sample) for sample in np.atleast_1d(samples_of(program, (bound.inputs,), 1 if one is None else 5))]
        median = statistics.median(taken)
        report.result["times"].append({
            "case": problem.name, "phase": "forward", "name": name, "heuristic": one == first, "milliseconds": median,
            "config": None if one is None else dataclasses.asdict(one), "same": same, "clock": "device",
            "spread": (max(taken) - min(taken)) / median,
        })  # fmt: skip
        print(f"  {'*' if one == first else ' '}{name:70s} {median:9.4f} ms  same {same:.5f}", flush=True)
        if one in (None, first):
            kernels = sorted(samples_of(program, (bound.inputs,), 1, kernels=True), key=lambda row: -row[1])[:5]
            report.result["kernels"].append([problem.name, name, kernels])
            print("      " + ", ".join(f"{name[:32]} {taken:.4f}" for name, taken in kernels), flush=True)
        report.save()


def try_small(report: Report, problem: Problem) -> None:
    """Every config at a small size."""
    for one in config.search_space(problem.small().bound(7).call, current_target()):
        check_small(report, problem, one)
    report.save()


if __name__ == "__main__":
    sys.exit(run_script("selection", __doc__, 60, PROBLEMS, try_small, time_problem))
