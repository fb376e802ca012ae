"""`lightning_indexer` in Triton on a real GPU: which tokens are chosen, then times.

    python tests/device/indexer.py --out results

Every config of the search space chooses the tokens of small problems exactly as float64 does (integers, whose scores are exact
and often equal), twice the same. Of the large problems, in random floats, chosen tokens are compared with XLA's (or the
heuristic's), which may differ where scores almost do, and timed (device time by CUPTI) beside our XLA and plain JAX where those
do not take seconds. Prints tables, writes `indexer.json` under `--out` (or `$OUT`), exits with 1 if a choice is wrong.

`--only` problems whose name has one of these texts, comma separated; `--budget` seconds after which nothing new is started (60);
`--threads` that compile (12); `--skip` of xla,plain; `--small` checks small problems only, without a GPU: with
`EJKERNEL_TRITON_INTERPRET=1` in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from check_gpu import knobs
from delta_rule import Report, samples_of
from latent import PLAIN, XLA, run_script

from ejkernel.operations.lightning_indexer import reference
from ejkernel.operations.lightning_indexer.interface import FLOAT8, OPERATION
from ejkernel.plugin import current_target
from ejkernel.testing.checks import widened
from ejkernel_triton.lightning_indexer import config, kernel
from ejkernel_xla.lightning_indexer import kernel as xla

HEADS, SIZE = 64, 128
BANDWIDTH, PRODUCTS = 3.0e12, {"bfloat16": 713e12, FLOAT8: 1400e12}


@dataclasses.dataclass(frozen=True)
class Problem:
    """The last `queries` of `tokens`, for each of `batch` rows."""

    name: str
    queries: int
    tokens: int
    k: int = 2048
    batch: int = 1
    heads: int = HEADS
    stored: str = "bfloat16"
    integers: bool = False
    peers: bool = True

    @property
    def seen(self) -> float:
        """Scores that are needed: of queries that do not read all that they see."""
        ends = np.arange(self.tokens - self.queries + 1, self.tokens + 1, dtype=np.float64)
        return float(self.batch * ends[ends > self.k].sum())

    @property
    def limit(self) -> float:
        """Milliseconds of the products and of reading once and writing once, scores apart."""
        size = jnp.dtype(self.stored).itemsize
        read = self.batch * SIZE * size * (self.tokens + self.queries * self.heads)
        moved = read + self.batch * self.queries * (4 * self.heads + 4 * self.k)
        return max(2 * self.heads * SIZE * self.seen / PRODUCTS[self.stored], moved / BANDWIDTH) * 1e3

    def small(self) -> Problem:
        return dataclasses.replace(
            self, queries=min(self.queries, 5), tokens=300, k=min(self.k, 40), batch=min(self.batch, 2), heads=min(self.heads, 64),
            integers=True,
        )  # fmt: skip

    def bound(self, seed: int) -> Any:
        keys = jax.random.split(jax.random.key(seed), 4)
        shapes = (
            (self.batch, self.queries, self.heads, SIZE),
            (self.batch, self.tokens, SIZE),
            (self.batch, self.queries, self.heads),
        )
        dtypes = (self.stored, self.stored, "float32")
        draw = (
            (lambda key, shape: jax.random.randint(key, shape, -2, 3).astype(jnp.bfloat16))
            if self.integers
            else lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16)
        )
        arrays = [draw(key, shape).astype(dtype) for key, shape, dtype in zip(keys, shapes, dtypes, strict=False)]
        scale = None
        if self.stored == FLOAT8:
            scale = 2.0 ** jax.random.randint(keys[3], (self.batch, self.tokens), -2, 3).astype(jnp.float32)
        lengths = jnp.asarray(
            [max(self.tokens - 100 * row * self.integers, self.queries) for row in range(self.batch)], jnp.int32
        )
        return OPERATION.canonicalise(*arrays, lengths, scale, k=self.k)

    def plain(self) -> Callable[[Any], Any] | None:
        """Scores of all heads of 64 queries at a time, `lax.top_k`; where all rows together see at most 64k tokens."""
        if self.batch * self.tokens > 2**16 or self.stored == FLOAT8:
            return None

        def some(arrays: Any) -> Any:
            query, weights, end, key = arrays
            products = jnp.einsum("hd,sd->hs", query, key, preferred_element_type=jnp.float32)
            scores = jnp.sum(jax.nn.relu(products) * weights[:, None], axis=0)
            hidden = jnp.arange(self.tokens, dtype=jnp.int32) >= end
            return jax.lax.top_k(jnp.where(hidden, -jnp.inf, scores), self.k)[1]

        def run(x: Any) -> Any:
            def row(query: Any, key: Any, weights: Any, ends: Any) -> Any:
                each = lambda arrays: some((*arrays, key))
                return jax.lax.map(each, (query, weights, ends), batch_size=min(64, self.queries))

            return jax.vmap(row)(*x[:4])

        return run


PROBLEMS = (
    Problem("prefill t8192 s8192", 8192, 8192),
    Problem("prefill t8192 s8192 e4m3", 8192, 8192, stored=FLOAT8),
    Problem("chunk t2048 s32768", 2048, 32768),
    Problem("chunk t2048 s131072", 2048, 131072, peers=False),
    Problem("chunk t2048 s131072 e4m3", 2048, 131072, stored=FLOAT8, peers=False),
    Problem("h32 t4096 s4096 k1024", 4096, 4096, 1024, heads=32),
    Problem("decode b64 s32768", 1, 32768, batch=64),
    Problem("decode b64 s32768 e4m3", 1, 32768, batch=64, stored=FLOAT8),
    Problem("decode b128 s8192", 1, 8192, batch=128),
    Problem("decode b1 s131072", 1, 131072),
    Problem("speculative b32 t4 s65536", 4, 65536, batch=32, peers=False),
)


def same_tokens(got: Any, wanted: Any, tokens: int) -> float:
    """Share of wanted tokens that were chosen, of the first queries; both ascend, -1 last."""
    got, wanted = (np.asarray(one[:, :64]).reshape(-1, one.shape[-1]) for one in (got, wanted))
    shares = [np.isin(right[right >= 0], left).mean() for left, right in zip(got, wanted, strict=True) if (right >= 0).any()]
    counts = ((got >= 0).sum(-1) == (wanted >= 0).sum(-1)).all() and (np.diff(np.where(got < 0, tokens, got)) >= 0).all()
    return float(np.mean(shares)) if counts else 0.0


def check_small(report: Report, problem: Problem, chosen: Any) -> bool:
    small = problem.small()
    bound = small.bound(7)
    program = jax.jit(lambda inputs: kernel.forward(bound.call, inputs, chosen).tokens)
    got, again = np.asarray(program(bound.inputs)), np.asarray(program(bound.inputs))
    wanted = reference.forward(bound.call, widened(bound.inputs)).tokens
    wrong = int((got != wanted).sum())
    detail = f"{wrong} of {wanted.size} differ" + ("" if np.array_equal(got, again) else ", runs differ")
    return report.check(f"{problem.name}: {knobs(chosen)}", wrong == 0 and np.array_equal(got, again), detail)


@dataclasses.dataclass
class Candidate:
    name: str
    run: Callable[[Any], Any]
    config: Any = None
    heuristic: bool = False


def candidates(problem: Problem, call: Any, options: argparse.Namespace) -> list[Candidate]:
    """XLA first: its tokens are what those of the others are compared with."""
    found = []
    if problem.peers and "xla" not in options.skip:
        found.append(Candidate(XLA, lambda inputs: xla.forward(call, inputs, None).tokens))
    plain = problem.plain()
    if problem.peers and plain is not None and "plain" not in options.skip:
        found.append(Candidate(PLAIN, plain))
    space, first = config.search_space(call, current_target()), config.heuristic(call, current_target())
    for one in space:
        run = lambda inputs, one=one: kernel.forward(call, inputs, one).tokens
        found.append(Candidate(knobs(one), run, one, one == first))
    return found


def time_one(report: Report, problem: Problem, one: Candidate, program: Any, inputs: Any, wanted: Any) -> Any:
    got = jax.block_until_ready(program(inputs))
    share = 1.0
    if wanted is not None and one.config is not None:
        share = same_tokens(got, wanted, problem.tokens)
        least = 0.99 if problem.stored == FLOAT8 else 0.9995
        report.check(f"{problem.name}: {one.name} beside XLA", share > least, f"{share:.5f}")
    taken = [float(sample) for sample in np.atleast_1d(samples_of(program, (inputs,), 1 if one.config is None else 5))]
    median = statistics.median(taken)
    report.result["times"].append({
        "case": problem.name, "phase": "forward", "name": one.name, "heuristic": one.heuristic, "milliseconds": median,
        "config": None if one.config is None else dataclasses.asdict(one.config), "same": share, "fraction": problem.limit / median,
        "spread": (max(taken) - min(taken)) / median, "clock": "device",
    })  # fmt: skip
    print(
        f"  {'*' if one.heuristic else ' '}{one.name:90s} {median:9.4f} ms "
        f"{2 * problem.heads * SIZE * problem.seen / median / 1e9:6.1f} TF/s  {problem.limit / median:.3f} of the limit  "
        f"same {share:.5f}",
        flush=True,
    )
    if one.heuristic or one.name == XLA:
        kernels = sorted(samples_of(program, (inputs,), 1, kernels=True), key=lambda row: -row[1])[:5]
        report.result["kernels"].append([problem.name, one.name, kernels])
        print("      " + ", ".join(f"{name[:32]} {taken:.4f}" for name, taken in kernels), flush=True)
    return got


def time_problem(report: Report, problem: Problem, options: argparse.Namespace, pool: Any) -> None:
    bound = problem.bound(0)
    found = candidates(problem, bound.call, options)

    def compiled(one: Candidate) -> Any:
        try:
            return jax.jit(one.run).lower(bound.inputs).compile()
        except Exception as error:  # noqa: BLE001 - a config that does not compile is a finding
            return error

    wanted = None
    for one, program in zip(found, list(pool.map(compiled, found)), strict=True):
        if report.remaining() < 0:
            print("  out of time", flush=True)
            return
        try:
            if isinstance(program, Exception):
                raise program
            if one.config is None or check_small(report, problem, one.config):
                got = time_one(report, problem, one, program, bound.inputs, wanted)
                wanted = got if wanted is None and one.name != PLAIN else wanted
        except Exception as error:  # noqa: BLE001 - the others go on
            report.check(f"{problem.name}: {one.name}", one.name == PLAIN, f"{type(error).__name__}: {str(error)[:300]}")
        report.save()
    ours = [row for row in report.result["times"] if row["case"] == problem.name and row["config"]]
    if ours:
        best = min(ours, key=lambda row: row["milliseconds"])
        print(f"  best of {len(ours)}: {best['name']} {best['milliseconds']:.4f} ms", flush=True)


def try_small(report: Report, problem: Problem) -> None:
    """Every config at a small size."""
    for one in config.search_space(problem.small().bound(7).call, current_target()):
        check_small(report, problem, one)
    report.save()


if __name__ == "__main__":
    sys.exit(run_script("indexer", __doc__, 60, PROBLEMS, try_small, time_problem))
