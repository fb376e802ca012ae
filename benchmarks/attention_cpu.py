"""Attention on CPU, forward and backward: ejkernel on XLA beside jax.nn's XLA path.

Every case first passes a comparison of outputs and gradients. Timings of the two alternate, so that whatever else the machine
does hits both; medians, spread and ratios go to a JSON file. Run on a quiet machine:

    python benchmarks/attention_cpu.py --rounds 9 --out benchmarks/results/attention_cpu.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel

TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-2}


@dataclasses.dataclass(frozen=True)
class Problem:
    batch: int
    length: int
    heads: int
    key_heads: int
    size: int
    causal: bool
    dtype: str = "float32"
    window: int | None = None

    @property
    def name(self) -> str:
        kind = "causal" if self.causal else "full"
        window = f"-window{self.window}" if self.window else ""
        return f"B{self.batch}-T{self.length}-H{self.heads}/{self.key_heads}-D{self.size}-{kind}{window}-{self.dtype}"

    def arrays(self) -> tuple[Any, ...]:
        rng = np.random.default_rng(0)
        heads = (self.heads, self.key_heads, self.key_heads, self.heads)
        shapes = [(self.batch, self.length, count, self.size) for count in heads]
        return tuple(jnp.asarray(rng.standard_normal(shape), self.dtype) for shape in shapes)


PROBLEMS = (
    *(
        Problem(batch, length, 8, key_heads, 64, causal)
        for batch, length in ((2, 512), (1, 2048), (1, 4096))
        for key_heads in (8, 2)
        for causal in (False, True)
    ),
    Problem(1, 2048, 8, 8, 64, True, window=256),
    Problem(1, 2048, 8, 8, 64, True, "bfloat16"),
)


def ours(problem: Problem) -> Callable[..., Any]:
    window = None if problem.window is None else (problem.window, 0)

    def attention(query: Any, key: Any, value: Any) -> Any:
        return ejkernel.flash_attention(query, key, value, causal=problem.causal, sliding_window=window, platform="xla")

    return attention


def peer(problem: Problem) -> Callable[..., Any]:
    window = None if problem.window is None else (problem.window, 0)

    def attention(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=problem.causal, local_window_size=window, implementation="xla"
        )

    return attention


def with_backward(attention: Callable[..., Any]) -> Callable[..., Any]:
    def run(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(attention, query, key, value)
        return out, *pull(cotangent)

    return run


def milliseconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return 1e3 * (time.perf_counter() - start)


def alternate(ours: Callable[[], Any], peer: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Times in alternation; the ratio is the peer's over ours, round by round."""
    times: dict[str, list[float]] = {"ours": [], "jax.nn": []}
    for _ in range(rounds):
        times["ours"].append(milliseconds(ours))
        times["jax.nn"].append(milliseconds(peer))
    ratios = [b / a for a, b in zip(times["ours"], times["jax.nn"], strict=True)]
    return {**{name: summary(values) for name, values in times.items()}, "ratio": summary(ratios)}


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    numbers = {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}
    return {name: round(value, 4) for name, value in numbers.items()}


def largest_error(got: Any, wanted: Any) -> float:
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(got, wanted, strict=True)]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def compiled_afresh(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    jax.clear_caches()
    return jax.jit(function).lower(*arrays).compile()


def measure(problem: Problem, rounds: int, compile_rounds: int) -> dict[str, Any]:
    arrays = problem.arrays()
    functions = {"ours": ours(problem), "jax.nn": peer(problem)}
    both = {name: with_backward(function) for name, function in functions.items()}
    compile_times = alternate(
        lambda: compiled_afresh(both["ours"], arrays) and None,
        lambda: compiled_afresh(both["jax.nn"], arrays) and None,
        compile_rounds,
    )
    forward = {name: jax.jit(function).lower(*arrays[:3]).compile() for name, function in functions.items()}
    compiled = {name: jax.jit(function).lower(*arrays).compile() for name, function in both.items()}
    error = largest_error(compiled["ours"](*arrays), compiled["jax.nn"](*arrays))
    if error > TOLERANCE[problem.dtype]:
        raise SystemExit(f"{problem.name}: ours and jax.nn differ by {error:.3g} of the largest magnitude")
    for function in forward.values():
        jax.block_until_ready(function(*arrays[:3]))
    return {
        "name": problem.name,
        "problem": dataclasses.asdict(problem),
        "difference": error,
        "forward_ms": alternate(lambda: forward["ours"](*arrays[:3]), lambda: forward["jax.nn"](*arrays[:3]), rounds),
        "forward_backward_ms": alternate(lambda: compiled["ours"](*arrays), lambda: compiled["jax.nn"](*arrays), rounds),
        "trace_and_compile_ms": compile_times,
        "temporary_bytes": {name: function.memory_analysis().temp_size_in_bytes for name, function in compiled.items()},
    }


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "ejkernel": ejkernel.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "device": jax.devices()[0].device_kind,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each side")
    parser.add_argument("--compile-rounds", type=int, default=3, help="timed compilations of each side")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention_cpu.json")
    options = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(), "cases": []}
    for problem in PROBLEMS:
        if options.only not in problem.name:
            continue
        case = measure(problem, options.rounds, options.compile_rounds)
        report["cases"].append(case)
        ratios = {name: case[name]["ratio"]["median"] for name in ("forward_ms", "forward_backward_ms", "trace_and_compile_ms")}
        print(f"{problem.name:40s} jax.nn / ours: " + "  ".join(f"{k[:-3]} {v:.2f}" for k, v in ratios.items()), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
