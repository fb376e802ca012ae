"""`gated_linear_unit` and `sample_tokens` on a real GPU: numbers against float64, then device times.

    python tests/device/glu_sample.py --out results

Every case of core in every dtype and, for one of them, every config; then times of Triton (every config with `--sweep`), of our
XLA and of plain JAX: gate and up [16384, 14336] in bfloat16, apart and packed; tokens of 1 to 256 rows of 128256 logits with top_k
50 and top_p 0.9, where plain JAX sorts. Writes `glu_sample.json` under `--out` (or `$OUT`), exits with 1 if a number is wrong.

`--small`: numbers alone, also in the interpreter of Triton; `--only gated_linear_unit`; `--budget` seconds (280).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from check_gpu import seconds, versions

import ejkernel
from ejkernel.plugin import current_target
from ejkernel.testing.problem import DTYPES, Problem, cases_of
from ejkernel.utils.tolerance import FORWARD, GRADIENT, deviation

OPERATIONS = ("gated_linear_unit", "sample_tokens")
VOCABULARY = 128256
BEGIN = time.monotonic()


def _close(problem: Problem, got: dict[str, Any], wanted: dict[str, Any], table: Any) -> str:
    """What is further from the reference than allowed; NaN is looked at where the reference has none."""
    wrong = []
    for name, value in got.items():
        known = ~np.isnan(wanted[name])
        found = deviation(np.where(known, np.asarray(value, np.float64), 0), np.where(known, wanted[name], 0))
        if not found.within(table[problem.held_to]):
            wrong.append(f"{name} {found.norm:.1e}")
    return ", ".join(wrong)


def check_numbers(operation: str, small: bool, budget: float) -> list[str]:
    wrong: list[str] = []
    cases = [case for case in cases_of(operation) if not (small and "wide" in case.name)]
    space = importlib.import_module(f"ejkernel_triton.{operation}.config").FORWARD
    for case in cases:
        for dtype in DTYPES[:1] if small else DTYPES:
            if time.monotonic() - BEGIN > budget:
                print(f"{operation}: out of time before {case.name} {dtype}")
                return wrong
            problem = Problem(operation, case, dtype, "triton")
            if not case.fits(dtype) or problem.refusal() is not None:
                continue
            every = case is cases[0] and not small
            for config in space.search_space(problem.bound.call, current_target()) if every else (None,):
                found = _close(problem, problem.outputs(config), problem.expected_outputs._asdict(), FORWARD)
                if problem.owner.differentiable:
                    found += _close(problem, problem.gradients(config), problem.expected_gradients, GRADIENT)
                if found:
                    wrong.append(f"{operation} {case.name} {dtype} {config}: {found}")
    print(f"{operation}: {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
    return wrong


def _sorted_sample(logits: Any, key: Any) -> Any:
    """What users write: a sort, and a threshold from its cumulative sums."""
    wide = logits.astype(jnp.float32)
    values = -jnp.sort(-wide, axis=-1)
    weights = jnp.exp(values - values[:, :1]).at[:, 50:].set(0)
    before = jnp.cumsum(weights, axis=-1) - weights
    kept = before < 0.9 * jnp.sum(weights, axis=-1, keepdims=True)
    least = jnp.min(jnp.where(kept & (weights > 0), values, jnp.inf), axis=-1, keepdims=True)
    return jax.random.categorical(key, jnp.where(wide >= least, wide, -jnp.inf), axis=-1)


def _ours(platform: str, top_k: Any, config: Any = None) -> Callable[..., Any]:
    return lambda logits, key: ejkernel.sample_tokens(logits, key, top_k=top_k, top_p=0.9, platform=platform, cfg=config)


def _plain_unit(gate: Any, up: Any = None) -> Any:
    gate, up = jnp.split(gate, 2, axis=-1) if up is None else (gate, up)
    return jax.nn.silu(gate) * up


def _configs(operation: str, problem: tuple[Any, ...], options: dict[str, Any], sweep: bool) -> list[Any]:
    if not sweep:
        return [None]
    call = ejkernel.explain(operation, *problem, **options, platform="triton").forward.call
    return importlib.import_module(f"ejkernel_triton.{operation}.config").FORWARD.search_space(call, current_target())


def time_units(sweep: bool) -> list[dict[str, Any]]:
    rows = []
    for packed in (False, True):
        shape = (16384, 14336 * (2 if packed else 1))
        arrays = [jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in range(1 if packed else 2)]
        grad = jax.random.normal(jax.random.key(2), (16384, 14336), jnp.bfloat16)
        candidates: dict[str, Callable[..., Any]] = {"plain JAX": _plain_unit}
        candidates["our XLA"] = lambda *given: ejkernel.gated_linear_unit(*given, platform="xla")
        for config in _configs("gated_linear_unit", tuple(arrays), {}, sweep):
            run = lambda *given, config=config: ejkernel.gated_linear_unit(*given, platform="triton", cfg=config)
            candidates[f"Triton {config or ''}".strip()] = run
        for name, run in candidates.items():
            sets, what = [tuple(arrays)], "packed" if packed else "apart"
            rows.append(_row("gated_linear_unit", what, "forward", name, run, sets, 3 * grad.nbytes))
            pull = lambda grad, *given, run=run: jax.vjp(run, *given)[1](grad)
            rows.append(_row("gated_linear_unit", what, "backward", name, pull, [(grad, *arrays)], 5 * grad.nbytes))
    return rows


def time_samples(sweep: bool) -> list[dict[str, Any]]:
    rows = []
    for count in (1, 16, 64, 256):
        logits = 3 * jax.random.normal(jax.random.key(0), (count, VOCABULARY), jnp.bfloat16)
        key, counts = jax.random.key(1), jnp.full(count, 50)
        candidates: dict[str, Callable[..., Any]] = {"plain JAX": _sorted_sample}
        candidates |= {"our XLA, top_k an int": _ours("xla", 50), "our XLA": _ours("xla", counts)}
        for config in _configs("sample_tokens", (logits, key), {"top_p": 0.9}, sweep):
            candidates[f"Triton {config or ''}".strip()] = _ours("triton", counts, config)
        for name, run in candidates.items():
            rows.append(_row("sample_tokens", str(count), "forward", name, run, [(logits, key)], logits.nbytes))
    return rows


def _row(operation: str, problem: str, phase: str, name: str, run: Any, sets: list[Any], moved: int) -> dict[str, Any]:
    samples, clock = seconds(run, sets)
    median = statistics.median(samples)
    spread = (max(samples) - min(samples)) / median
    row = {"operation": operation, "problem": problem, "phase": phase, "name": name, "clock": clock}
    row |= {"microseconds": median * 1e6, "spread": spread, "terabytes_per_second": moved / median / 1e12}
    print(
        f"{operation:18} {problem:7} {phase:9} {name:44} {median * 1e6:9.1f} us  {moved / median / 1e12:5.2f} TB/s", flush=True
    )
    return row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only", default=",".join(OPERATIONS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--budget", type=float, default=280)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    asked = [name for name in OPERATIONS if name in options.only.split(",")]
    wrong = [line for name in asked for line in check_numbers(name, options.small, 0.6 * options.budget)]
    times: list[dict[str, Any]] = []
    if not options.small:
        for name, run in zip(OPERATIONS, (time_units, time_samples), strict=True):
            times += run(options.sweep) if name in asked else []
        options.out.mkdir(parents=True, exist_ok=True)
        result = {"versions": versions(), "wrong": wrong, "times": times}
        (options.out / "glu_sample.json").write_text(json.dumps(result, indent=1, default=dataclasses.asdict) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
