"""`linear_recurrence` in Triton on a real GPU: numbers of every config, then times beside XLA.

    python tests/device/linear_recurrence.py --out results

For the benchmark cases of the operation, in bfloat16: outputs and gradients of configs of the search spaces against XLA in float32, each
config twice, bit by bit; then device times by CUPTI, the heuristic's kernel by kernel. Prints tables, writes `linear_recurrence.json`
under `--out` (or `$OUT`), exits with 1 if a number is wrong.

`--cases` names, comma separated; `--most` configs of each case and phase besides the heuristic's (0 = all); `--budget` seconds after
which nothing new is started; `--threads` that compile; `--grid` replaces the search spaces by `chunk,segment,block,warps,stages` items
separated by spaces.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
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
from check_gpu import chosen_of, relative, versions

from ejkernel.operations.linear_recurrence.cases import CASES
from ejkernel.operations.linear_recurrence.interface import OPERATION, LinearRecurrenceInputs, LinearRecurrenceOutputs
from ejkernel.plugin import current_target
from ejkernel_triton.linear_recurrence import config, kernel
from ejkernel_xla.linear_recurrence import config as xla_config
from ejkernel_xla.linear_recurrence import kernel as xla

BANDWIDTH, PRODUCTS = 4.3e12, 790e12
TOLERANCE = {"forward": 8e-3, "backward": 1.6e-2}
NAMES = (
    "bench-scalar-t8192-h32-d128",
    "bench-lightning-t8192-h64-d128",
    "bench-ssd-b4-t4096-h80-n128",
    "bench-gla-t8192-h32-d128",
)


class Problem:
    """A case in bfloat16 with its arrays, and what is right, by XLA from the same numbers in float32."""

    def __init__(self, name: str) -> None:
        case = next(case for case in CASES if case.name == name)
        arrays = {key: jnp.asarray(value, jnp.bfloat16) for key, value in case.arrays(np.random.default_rng(0)).items()}
        bound = OPERATION.canonicalise(**arrays, **case.options)
        self.name, self.call, self.inputs = name, bound.call, bound.inputs
        self.d_out = jax.random.normal(jax.random.key(1), OPERATION.output_specs(self.call).out.shape, jnp.bfloat16)
        self.space = {"forward": config.FORWARD, "backward": config.BACKWARD}

    def function(self, phase: str, module: Any, cfg: Any) -> Callable[..., Any]:
        """Of inputs and cotangent: a dict of arrays."""

        def forward(inputs: LinearRecurrenceInputs, d_out: Any) -> dict[str, Any]:
            return {"out": module.forward(self.call, inputs, cfg).out}

        def backward(inputs: LinearRecurrenceInputs, d_out: Any) -> dict[str, Any]:
            outputs = LinearRecurrenceOutputs(d_out)
            gradients = module.backward(self.call, inputs, outputs, outputs, cfg)
            return {key: value for key, value in gradients._asdict().items() if value is not None}

        return jax.jit(forward if phase == "forward" else backward)

    def exact(self, phase: str) -> dict[str, np.ndarray]:
        def wide(value: Any) -> Any:
            return value.astype(jnp.float32)

        found = self.function(phase, xla, xla_config.CONFIGS.heuristic(self.call, current_target()))
        return {key: np.asarray(value) for key, value in found(jax.tree.map(wide, self.inputs), wide(self.d_out)).items()}

    def limit(self, phase: Any) -> float:
        cost = OPERATION.cost(self.call, phase)
        return max(cost.bytes / BANDWIDTH, cost.flops / PRODUCTS)


def knobs(cfg: Any) -> str:
    return ",".join(str(value) for value in dataclasses.astuple(cfg))


class Report:
    def __init__(self, folder: str, budget: float) -> None:
        self.folder, self.budget, self.started = pathlib.Path(folder), budget, time.monotonic()
        self.result: dict[str, Any] = {"versions": versions(), "numbers": [], "times": [], "kernels": []}

    def remaining(self) -> float:
        return self.budget - (time.monotonic() - self.started)

    def check(self, name: str, passed: bool, detail: str) -> bool:
        self.result["numbers"].append({"check": name, "passed": bool(passed), "detail": detail})
        if not passed:
            print(f"  FAILED {name}: {detail}", flush=True)
        return bool(passed)

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "linear_recurrence.json").write_text(json.dumps(self.result, indent=1))


def samples_of(program: Any, values: tuple[Any, ...], iterations: int, *, kernels: bool = False) -> Any:
    from jax.experimental.mosaic.gpu import profiler

    _, found = profiler.Cupti(finalize=False).measure(program, aggregate=not kernels, iterations=iterations)(*values)
    return found


def run_phase(report: Report, problem: Problem, phase: str, grid: list[Any], options: argparse.Namespace) -> None:
    values = problem.inputs, problem.d_out
    heuristic = problem.space[phase].heuristic(problem.call, current_target())
    found = grid or problem.space[phase].search_space(problem.call, current_target())
    chosen = [heuristic, *grid] if grid else chosen_of(found, heuristic, options.most or len(found))
    chosen = list(dict.fromkeys(chosen))

    def compiled(cfg: Any) -> Any:
        begin = time.monotonic()
        try:
            return problem.function(phase, kernel, cfg).lower(*values).compile(), time.monotonic() - begin
        except Exception as error:  # noqa: BLE001 - a config that does not compile is a finding
            return error, 0.0

    exact = problem.exact(phase)
    limit = problem.limit(phase)
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        for cfg, (program, _) in zip(chosen, pool.map(compiled, chosen), strict=True):
            name = f"{problem.name} {phase} {knobs(cfg)}"
            if isinstance(program, Exception):
                report.check(name, False, f"{type(program).__name__}: {str(program)[:300]}")
                continue
            if report.remaining() < 0:
                break
            got, again = program(*values), program(*values)
            errors = {key: relative(got[key], exact[key]) for key in exact}
            equal = all(bool(jnp.array_equal(got[key], again[key])) for key in got)
            right = equal and all(error < TOLERANCE[phase] for error in errors.values())
            detail = " ".join(f"{key} {error:.1e}" for key, error in errors.items()) + ("" if equal else ", runs differ")
            report.check(name, right, detail)
            del got, again
            taken = samples_of(program, values, 5)
            median = statistics.median(taken)
            row = {
                "case": problem.name, "phase": phase, "name": knobs(cfg), "config": dataclasses.asdict(cfg),
                "heuristic": cfg == heuristic, "milliseconds": median, "spread": (max(taken) - min(taken)) / median,
                "fraction": limit / median * 1e3, "passed": right, "errors": errors,
            }  # fmt: skip
            report.result["times"].append(row)
            mark = "*" if cfg == heuristic else " "
            print(f"  {phase:8s} {mark}{knobs(cfg):24s} {median:8.3f} ms  {row['fraction']:.3f}  {detail}", flush=True)
            if cfg == heuristic:
                kernels = samples_of(program, values, 1, kernels=True)
                for kernel_name, milliseconds in kernels:
                    report.result["kernels"].append([problem.name, phase, kernel_name, milliseconds])
                    print(f"             {kernel_name[:60]:60s} {milliseconds:8.3f} ms", flush=True)
            report.save()


def time_xla(report: Report, problem: Problem, phase: str) -> None:
    cfg = xla_config.CONFIGS.heuristic(problem.call, current_target())
    program = problem.function(phase, xla, cfg).lower(problem.inputs, problem.d_out).compile()
    taken = samples_of(program, (problem.inputs, problem.d_out), 2)
    median = statistics.median(taken)
    row = {"case": problem.name, "phase": phase, "name": "XLA", "milliseconds": median}
    report.result["times"].append(row)
    print(f"  {phase:8s}  {'XLA':24s} {median:8.3f} ms", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of linear_recurrence.json")
    parser.add_argument("--cases", default=",".join(NAMES))
    parser.add_argument("--phases", default="forward,backward")
    parser.add_argument("--most", type=int, default=6)
    parser.add_argument("--budget", type=float, default=240)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--grid", default="")
    parser.add_argument("--skip", default="", help="xla")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    report = Report(options.out, options.budget)
    print(json.dumps(report.result["versions"]), flush=True)
    grid = [config.Config(*map(int, item.split(","))) for item in options.grid.split()]
    for name in options.cases.split(","):
        if report.remaining() < 5:
            break
        problem = Problem(name)
        print(f"{name} at {time.monotonic() - report.started:.0f} s", flush=True)
        for phase in options.phases.split(","):
            run_phase(report, problem, phase, grid, options)
            if "xla" not in options.skip:
                time_xla(report, problem, phase)
        report.save()
    wrong = [row for row in report.result["numbers"] if not row["passed"]]
    print(f"{len(report.result['numbers'])} checks, {len(wrong)} wrong; {time.monotonic() - report.started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
