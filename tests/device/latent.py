"""Attention over latents in Triton on a real GPU: `latent_paged_attention` and `sparse_latent_attention`, forward.

    python tests/device/latent.py --out results

Every config of the search space: first numbers of a small problem of the same kind against float64 and two equal runs, then the
large problem, compared with XLA's result and timed (device time by CUPTI) beside our XLA and plain JAX.
Prints tables, writes `latent.json` under `--out` (or `$OUT`), exits with 1 if a number is
wrong.

`--only` problems whose name has one of these texts, comma separated; `--budget` seconds after which nothing new is started (140);
`--threads` that compile (12); `--skip` of xla,plain; `--small` checks small problems only, without a GPU: with
`EJKERNEL_TRITON_INTERPRET=1` in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from check_gpu import knobs
from delta_rule import Report, samples_of

import ejkernel
from ejkernel.operations import get_operation, operation_module
from ejkernel.plugin import Target, current_target
from ejkernel.testing.checks import widened

LATENT, ROTARY = 512, 64
TOLERANCE = 1e-2
BANDWIDTH, PRODUCTS = 3.0e12, 713e12
H100 = Target("gpu", "NVIDIA H100 80GB HBM3", "9.0")
XLA, PLAIN = "our XLA", "plain JAX"


@dataclasses.dataclass(frozen=True)
class Paged:
    """Requests of equal length with some new tokens each, over pages."""

    name: str
    heads: int
    requests: int
    keys: int
    page_size: int
    tokens: int = 1
    stored: str = "bfloat16"
    options: tuple[tuple[str, Any], ...] = ()

    operation = "latent_paged_attention"

    @property
    def bytes(self) -> float:
        per_key = (LATENT + ROTARY) * jnp.dtype(self.stored).itemsize
        rows = self.requests * self.tokens * self.heads
        return self.requests * self.keys * per_key + rows * (2 * LATENT + ROTARY) * 2

    @property
    def products(self) -> float:
        seen = self.tokens * self.keys - self.tokens * (self.tokens - 1) / 2
        return 2 * self.requests * self.heads * seen * (2 * LATENT + ROTARY)

    def small(self) -> Paged:
        return dataclasses.replace(self, requests=5, keys=300, tokens=min(self.tokens, 5))

    def arguments(self, seed: int, *, ragged: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arrays and options; ragged ones have lengths of all kinds, and NaN in every slot that no request uses."""
        rng = np.random.default_rng(seed)
        new = np.full(self.requests, self.tokens)
        lengths = np.full(self.requests, self.keys)
        if ragged:
            new[1:] = rng.integers(0, self.tokens + 1, self.requests - 1)
            lengths[1:4] = rng.integers(self.tokens, self.keys, 3)
            lengths[-1] = new[-1]
        width = -(-self.keys // self.page_size)
        tables = rng.permutation(self.requests * width).reshape(self.requests, width).astype(np.int32)
        shape = (self.requests * width, self.page_size, LATENT + ROTARY)
        pages = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        if ragged and self.stored != "int8":
            used = np.zeros(shape[:2], bool)
            for row, length in zip(tables, lengths, strict=True):
                slot = np.arange(length)
                used[row[slot // self.page_size], slot % self.page_size] = True
            pages = jnp.where(jnp.asarray(used)[..., None], pages, jnp.nan)
        arrays: dict[str, Any] = {"pages": pages if self.stored == "bfloat16" else (pages * 4).astype(self.stored)}
        total = int(new.sum()) + (2 if ragged else 0)
        for key, (name, channels) in enumerate((("query_nope", LATENT), ("query_pe", ROTARY))):
            arrays[name] = jax.random.normal(jax.random.key(100 + 10 * seed + key), (total, self.heads, channels), jnp.bfloat16)
        arrays |= {
            "query_start_loc": jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32),
            "kv_lens": jnp.asarray(lengths, jnp.int32),
            "block_tables": jnp.asarray(tables),
        }
        options = dict(self.options)
        if self.stored != "bfloat16":
            options |= {"k_scale": jnp.float32(0.25), "v_scale": jnp.float32(0.5)}
        return arrays, options

    def plain(self, call: Any) -> Callable[[Any], Any] | None:
        """All keys of the requests gathered; for requests of equal length, without a window or a soft cap."""
        if self.options or self.requests * self.tokens * self.heads * self.keys > 2**30:
            return None

        def run(x: Any) -> Any:
            shape = (self.requests, self.tokens, self.heads)
            keys = x.pages[0][x.block_tables[0]].reshape(self.requests, -1, LATENT + ROTARY)[:, : self.keys]
            keys = keys.astype(jnp.bfloat16)
            query = jnp.concatenate([x.query_nope[0], x.query_pe[0]], -1).reshape(*shape, -1)
            logits = jnp.einsum("rthc,rkc->rthk", query, keys, preferred_element_type=jnp.float32) * call.softmax_scale
            if x.key_scale is not None:
                logits = logits * x.key_scale[0, 0]
            hidden = jnp.arange(self.keys)[None, :] > self.keys - self.tokens + jnp.arange(self.tokens)[:, None]
            weights = jax.nn.softmax(jnp.where(hidden[None, :, None], -jnp.inf, logits), -1).astype(keys.dtype)
            out = jnp.einsum("rthk,rkc->rthc", weights, keys[..., :LATENT], preferred_element_type=jnp.float32)
            if x.value_scale is not None:
                out = out * x.value_scale[0, 0]
            return out.astype(query.dtype).reshape(1, -1, self.heads, LATENT)

        return run


@dataclasses.dataclass(frozen=True)
class Sparse:
    """Queries that name some of the tokens up to their own, or of all where there are more tokens than queries."""

    name: str
    heads: int
    queries: int
    tokens: int
    slots: int
    batch: int = 1

    operation = "sparse_latent_attention"

    @property
    def bytes(self) -> float:
        rows = self.batch * self.queries * self.heads
        read = min(self.tokens, self.queries * self.slots) * self.batch
        return 2 * read * (LATENT + ROTARY) + rows * (2 * LATENT + ROTARY) * 2

    @property
    def products(self) -> float:
        return 2 * self.batch * self.queries * self.heads * self.slots * (2 * LATENT + ROTARY)

    def small(self) -> Sparse:
        return dataclasses.replace(self, queries=min(self.queries, 4), tokens=500, slots=130, batch=min(self.batch, 2))

    def arguments(self, seed: int, *, ragged: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        shape, size = (self.batch, self.queries, self.slots), LATENT + ROTARY
        end = jnp.arange(self.queries)[:, None] + 1 if self.queries == self.tokens else self.tokens
        keys = jax.random.split(jax.random.key(seed), 3)
        scores = jax.random.uniform(keys[0], (*shape[:2], self.tokens))
        score, indices = jax.lax.top_k(jnp.where(jnp.arange(self.tokens) < end, scores, -1.0), self.slots)
        indices = jnp.where(score >= 0, indices, -1).astype(jnp.int32)
        latents = jax.random.normal(keys[1], (self.batch, self.tokens, size), jnp.bfloat16)
        if ragged:
            indices = indices.at[:, 1].set(-1)
            named = np.zeros((self.batch, self.tokens), bool)
            for row, tokens in enumerate(np.asarray(indices)):
                named[row, tokens[tokens >= 0]] = True
            latents = jnp.where(jnp.asarray(named)[..., None], latents, jnp.nan)
        query = jax.random.normal(keys[2], (*shape[:2], self.heads, size), jnp.bfloat16)
        arrays = {"query": query, "key_value": latents, "token_indices": indices}
        return arrays, {"value_size": LATENT, "is_distinct": True}

    def plain(self, call: Any) -> Callable[[Any], Any] | None:
        """The tokens of 64 queries are gathered at a time."""

        def run(x: Any) -> Any:
            def some(arrays: Any) -> Any:
                query, chosen, member = arrays
                found = x.key_value[member][jnp.maximum(chosen, 0)]
                logits = jnp.einsum("hc,kc->hk", query, found, preferred_element_type=jnp.float32) * call.softmax_scale
                weights = jax.nn.softmax(jnp.where(chosen[None] >= 0, logits, -1e30), -1).astype(query.dtype)
                weights = jnp.where(chosen[None] >= 0, weights, 0)
                return jnp.einsum("hk,kv->hv", weights, found[:, :LATENT], preferred_element_type=jnp.float32).astype(
                    query.dtype
                )

            rows = self.batch * self.queries
            member = jnp.repeat(jnp.arange(self.batch), self.queries)
            arrays = x.query.reshape(rows, self.heads, -1), x.token_indices.reshape(rows, -1), member
            out = jax.lax.map(some, arrays, batch_size=min(64, rows))
            return out.reshape(self.batch, self.queries, self.heads, LATENT)

        return run


PROBLEMS = (
    Paged("decode h128 b128 4k page 64", 128, 128, 4096, 64),
    Paged("decode h16 b128 4k page 64", 16, 128, 4096, 64),
    Paged("decode h64 b256 1k page 16", 64, 256, 1024, 16),
    Paged("decode h128 b16 8k page 64", 128, 16, 8192, 64),
    Paged("decode h128 b1 32k page 32", 128, 1, 32768, 32),
    Paged("decode h16 b128 4k page 64 e4m3", 16, 128, 4096, 64, stored="float8_e4m3fn"),
    Paged("decode h128 b128 4k page 64 e4m3", 128, 128, 4096, 64, stored="float8_e4m3fn"),
    Paged("speculative h16 b64 4k page 64 4 new", 16, 64, 4096, 64, 4),
    Paged("speculative h128 b64 4k page 64 2 new", 128, 64, 4096, 64, 2),
    Paged("prefill h16 4 x 512 of 4k page 64", 16, 4, 4096, 64, 512),
    Paged("prefill h128 2 x 512 of 4k page 64", 128, 2, 4096, 64, 512),
    Paged("window h32 b64 4k page 16", 32, 64, 4096, 16, 2, options=(("sliding_window", 1024), ("logits_soft_cap", 30.0))),
    Sparse("sparse h128 t8192 k2048", 128, 8192, 8192, 2048),
    Sparse("sparse h16 t8192 k2048", 16, 8192, 8192, 2048),
    Sparse("sparse decode h128 b64 32k k2048", 128, 1, 32768, 2048, 64),
    Sparse("sparse decode h128 b1 32k k2048", 128, 1, 32768, 2048),
)


def bind(shape: Any, seed: int, *, ragged: bool = False) -> tuple[Any, Any]:
    arrays, options = shape.arguments(seed, ragged=ragged)
    bound = get_operation(shape.operation).canonicalise(**arrays, return_lse=True, **options)
    return bound.call, bound.inputs


def call_of(shape: Any) -> Any:
    """The call of the large problem, without its arrays."""
    found: list[Any] = []
    jax.eval_shape(lambda: found.append(bind(shape, 0)[0]))
    return found[0]


def module(platform: str, shape: Any, part: str) -> Any:
    return importlib.import_module(f"ejkernel_{platform}.{shape.operation}.{part}")


def relative(got: Any, wanted: Any) -> float:
    """Relative L2 error; NaN where anything is NaN or an infinity has no partner."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    if not np.array_equal(np.isneginf(got), np.isneginf(wanted)):
        return float("nan")
    finite = np.isfinite(wanted)
    got, wanted = got[finite], wanted[finite]
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30))


@jax.jit
def distance(got: Any, wanted: Any) -> Any:
    """Relative L2 error of large arrays, on the device."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)


class Small:
    """A small problem of the same kind, which every config must get right."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape
        self.call, self.inputs = bind(shape.small(), 7, ragged=True)
        reference = operation_module(shape.operation, "reference")
        self.exact = reference.forward(self.call, widened(self.inputs))
        self.kernel = module("triton", shape, "kernel")

    def program(self, cfg: Any) -> Any:
        return jax.jit(lambda inputs: self.kernel.forward(self.call, inputs, cfg)).lower(self.inputs).compile()

    def check(self, report: Report, cfg: Any, program: Any) -> bool:
        got, again = program(self.inputs), program(self.inputs)
        errors = relative(got.out, self.exact.out), relative(got.lse, self.exact.lse)
        equal = np.array_equal(np.asarray(got.out).view(np.uint16), np.asarray(again.out).view(np.uint16))
        detail = f"out {errors[0]:.1e} lse {errors[1]:.1e}" + ("" if equal else ", runs differ")
        passed = equal and errors[0] < TOLERANCE and errors[1] < 2e-3
        return report.check(f"{self.shape.name}: {knobs(cfg)}", passed, detail)


@dataclasses.dataclass
class Candidate:
    name: str
    run: Callable[[Any], Any]
    config: Any = None
    heuristic: bool = False


def candidates(shape: Any, call: Any, options: argparse.Namespace) -> list[Candidate]:
    """XLA first: its result is what those of the others are compared with."""
    target, config, kernel = current_target(), module("triton", shape, "config"), module("triton", shape, "kernel")
    heuristic, found = config.heuristic(call, target), []
    if "xla" not in options.skip:
        xla = module("xla", shape, "kernel")
        space = xla if hasattr(xla, "CONFIGS") else module("xla", shape, "config")
        chosen = space.CONFIGS.heuristic(call, target)
        found.append(Candidate(XLA, lambda inputs: xla.forward(call, inputs, chosen).out))
    plain = shape.plain(call)
    if plain is not None and "plain" not in options.skip:
        found.append(Candidate(PLAIN, plain))
    for cfg in config.search_space(call, target):
        run = lambda inputs, cfg=cfg: kernel.forward(call, inputs, cfg).out
        found.append(Candidate(knobs(cfg), run, cfg, cfg == heuristic))
    return found


def time_one(report: Report, shape: Any, one: Candidate, programs: Any, sets: list[Any], wanted: Any) -> Any:
    """Compare with what is wanted, time, print; the result."""
    single, several, _ = programs
    got = single(sets[0])
    error = 0.0 if wanted is None else float(distance(got, wanted))
    report.check(f"{shape.name}: {one.name} beside XLA", error < 2e-2, f"{error:.1e}")
    taken = [sample / len(sets) for sample in np.atleast_1d(samples_of(several, (sets,), 2 if one.config is None else 7))]
    median = statistics.median(taken)
    limit = max(shape.bytes / BANDWIDTH, shape.products / PRODUCTS) * 1e3
    report.result["times"].append({
        "case": shape.name, "phase": "forward", "name": one.name, "heuristic": one.heuristic, "milliseconds": median,
        "config": None if one.config is None else dataclasses.asdict(one.config), "error": error, "fraction": limit / median,
        "spread": (max(taken) - min(taken)) / median, "clock": "device",
    })  # fmt: skip
    print(
        f"  {'*' if one.heuristic else ' '}{one.name:105s} {median:8.4f} ms {shape.bytes / median / 1e9:5.2f} TB/s "
        f"{shape.products / median / 1e9:6.1f} TF/s  {limit / median:.3f} of the limit  error {error:.1e}",
        flush=True,
    )
    if one.heuristic:
        kernels = samples_of(single, (sets[0],), 1, kernels=True)
        report.result["kernels"].append([shape.name, "forward", kernels])
        print("      " + ", ".join(f"{name[:32]} {taken:.4f}" for name, taken in kernels), flush=True)
    return got


def time_problem(report: Report, shape: Any, options: argparse.Namespace, pool: Any) -> None:
    call, inputs = bind(shape, 0)
    count = int(max(1, min(6, 300e6 // shape.bytes)))  # more than the L2 cache holds
    sets = [inputs, *(bind(shape, seed)[1] for seed in range(1, count))]
    found, small = candidates(shape, call, options), Small(shape)

    def compiled(one: Candidate) -> Any:
        try:
            single = jax.jit(one.run).lower(sets[0]).compile()
            several = jax.jit(lambda sets: [one.run(inputs) for inputs in sets]).lower(sets).compile()
            return single, several, one.config and small.program(one.config)
        except Exception as error:  # noqa: BLE001 - a config that does not compile is a finding
            return error

    programs = list(pool.map(compiled, found))
    wanted = None
    for one, program in zip(found, programs, strict=True):
        if report.remaining() < 0:
            print("  out of time", flush=True)
            return
        try:
            if isinstance(program, Exception):
                raise program
            if one.config is None or small.check(report, one.config, program[2]):
                got = time_one(report, shape, one, program, sets, wanted)
                wanted = got if one.name == XLA else wanted
        except Exception as error:  # noqa: BLE001 - the others go on
            report.check(f"{shape.name}: {one.name}", one.name == PLAIN, f"{type(error).__name__}: {str(error)[:300]}")
        report.save()
    ours = [row for row in report.result["times"] if row["case"] == shape.name and row["config"]]
    if ours:
        best = min(ours, key=lambda row: row["milliseconds"])
        print(f"  best of {len(ours)}: {best['name']} {best['milliseconds']:.4f} ms", flush=True)


def try_small(report: Report, shape: Any) -> None:
    """Every config at a small size."""
    small = Small(shape)
    for cfg in module("triton", shape, "config").search_space(call_of(shape), current_target()):
        small.check(report, cfg, small.program(cfg))
    report.save()


def run_script(
    name: str,
    description: str | None,
    budget: float,
    problems: Sequence[Any],
    try_small: Callable[[Report, Any], None],
    time_problem: Callable[[Report, Any, argparse.Namespace, Any], None],
) -> int:
    """The command line of a script over named problems; its exit status. Writes `<name>.json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help=f"folder of {name}.json")
    parser.add_argument("--only", default="", help="texts of which a problem's name has one")
    parser.add_argument("--budget", type=float, default=budget)
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--skip", default="", help="of xla,plain")
    parser.add_argument("--small", action="store_true", help="small problems only, also without a GPU")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not options.small:
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    report = Report(options.out, options.budget, name)
    print(json.dumps(report.result["versions"]), flush=True)
    chosen = [problem for problem in problems if any(text in problem.name for text in options.only.split(","))]
    target = contextlib.nullcontext() if on_gpu else ejkernel.use(target=H100)
    with target, concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        for problem in chosen:
            if report.remaining() < 0:
                print(f"{problem.name}: out of time", flush=True)
                continue
            print(f"{problem.name}, at {time.monotonic() - report.started:.0f} s", flush=True)
            try:
                try_small(report, problem) if options.small else time_problem(report, problem, options, pool)
            except Exception as error:  # noqa: BLE001 - the other problems go on
                report.check(problem.name, False, f"{type(error).__name__}: {str(error)[:300]}")
    return report.end()


if __name__ == "__main__":
    sys.exit(run_script("latent", __doc__, 140, PROBLEMS, try_small, time_problem))
