"""`linear_recurrence` in Triton on a real GPU: numbers of every config, then times beside XLA.

    python tests/device/linear_recurrence.py --out results

For the benchmark cases of the operation, in bfloat16: outputs and gradients of configs of the search spaces, always those that
store states among them, against XLA in float32, each config twice, bit by bit; device times by CUPTI, kernel by kernel for the
heuristic's and for those that store states, and XLA's. Prints tables, writes `linear_recurrence.json` under `--out` (or `$OUT`),
exits with 1 if a number is wrong.

`--cases` names, comma separated, of the operation's cases or of `PACKED`, Mamba-2 with eight documents; `--most` configs of each
case and phase besides the heuristic's (0 = all); `--budget` seconds after which nothing new is started; `--threads` that compile;
`--grid` replaces the search spaces by items `chunk,segment,block,warps,stages`, with `,1` to store states, separated by spaces;
`--skip xla`.
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
from typing import Any

import jax
import jax.numpy as jnp
from check_gpu import chosen_of, in_float32, versions

from ejkernel.call.case import Case
from ejkernel.operations.linear_recurrence.cases import CASES, arrays
from ejkernel.operations.linear_recurrence.interface import OPERATION, LinearRecurrenceInputs, LinearRecurrenceOutputs
from ejkernel.plugin import current_target
from ejkernel.testing.shapes import Zeros
from ejkernel_triton.linear_recurrence import config, kernel
from ejkernel_xla.linear_recurrence import config as xla_config, kernel as xla

BANDWIDTH, PRODUCTS = 4.3e12, 790e12
RATE, DECAYS = 0.05, ("g", "g_gamma", "gk")
TOLERANCE = {"forward": 8e-3, "backward": 1.6e-2}
NAMES = (
    "bench-scalar-t8192-h32-d128",
    "bench-lightning-t8192-h64-d128",
    "bench-ssd-b4-t4096-h80-n128",
    "bench-gla-t8192-h32-d128",
)
DOCUMENTS = (0, 683, 1463, 2341, 3317, 4389, 5559, 6827, 8192)
PACKED = tuple(
    Case(
        f"ssd-docs8-t8192-h32-n{width}",
        arrays(1, 8192, 1, width, 64, value_heads=32, decays="g", value_scale=True, skip="head", bounds=DOCUMENTS),
    )
    for width in (64, 128)
)


class Problem:
    """A case in bfloat16 with its arrays; what is right is XLA's from the same numbers in float32."""

    def __init__(self, name: str) -> None:
        case = next(case for case in (*CASES, *PACKED) if case.name == name)
        shapes = case.arrays(Zeros())
        keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
        given = {}
        for key, (field, zeros) in zip(keys[1:], shapes.items(), strict=True):
            normal = jax.random.normal(key, zeros.shape)
            given[field] = (-RATE * abs(normal) if field in DECAYS else normal).astype(jnp.bfloat16)
            if field == "cu_seqlens":
                given[field] = jnp.asarray(zeros)
        bound = OPERATION.canonicalise(**given, **case.options)
        self.name, self.call, self.inputs = name, bound.call, bound.inputs
        self.d_out = jax.random.normal(keys[0], OPERATION.output_specs(self.call).out.shape, jnp.bfloat16)
        self.space = {"forward": config.FORWARD, "backward": config.BACKWARD}

    @property
    def values(self) -> tuple[Any, Any]:
        return self.inputs, self.d_out

    def function(self, phase: str, module: Any, cfg: Any) -> Any:
        """Of inputs and cotangent: a dict of arrays."""

        def forward(inputs: LinearRecurrenceInputs, d_out: Any) -> dict[str, Any]:
            return {"out": module.forward(self.call, inputs, cfg).out}

        def backward(inputs: LinearRecurrenceInputs, d_out: Any) -> dict[str, Any]:
            outputs = LinearRecurrenceOutputs(d_out)
            gradients = module.backward(self.call, inputs, outputs, outputs, cfg)
            return {key: value for key, value in gradients._asdict().items() if value is not None}

        return jax.jit(forward if phase == "forward" else backward)

    def program(self, phase: str, cfg: Any) -> Any:
        """Compiled: a config of ours, None for XLA, "exact" for XLA from the same numbers in float32."""
        if isinstance(cfg, config.Config):
            return self.function(phase, kernel, cfg).lower(*self.values).compile()
        xla_space = xla_config.FORWARD if phase == "forward" else xla_config.BACKWARD
        xla_cfg = xla_space.heuristic(self.call, current_target())
        found = self.function(phase, xla, xla_cfg)
        if cfg is None:
            return found.lower(*self.values).compile()
        return jax.jit(lambda *values: found(*in_float32(values))).lower(*self.values).compile()

    def limit(self, phase: Any) -> float:
        cost = OPERATION.cost(self.call, phase)
        return max(cost.bytes / BANDWIDTH, cost.flops / PRODUCTS)


@jax.jit  # pyright: ignore[reportUntypedFunctionDecorator]
def distances(got: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Relative error in the norm of every array; NaN where anything is."""

    def one(key: str) -> Any:
        exact = wanted[key].astype(jnp.float32)
        return jnp.linalg.norm((got[key].astype(jnp.float32) - exact).ravel()) / jnp.linalg.norm(exact.ravel())

    return {key: one(key) for key in wanted}


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


def _config_of(item: str) -> config.Config:
    *numbers, stored = map(int, item.split(",") if item.count(",") == 5 else [*item.split(","), "0"])
    return config.Config(*numbers, store_states=bool(stored))


def chosen(problem: Problem, phase: str, options: argparse.Namespace) -> list[Any]:
    """The heuristic's config, those to compare it with, and XLA."""
    space = problem.space[phase]
    heuristic = space.heuristic(problem.call, current_target())
    found = space.search_space(problem.call, current_target())
    grid = [_config_of(item) for item in options.grid.split()]
    stored = [cfg for cfg in found if cfg.store_states]
    found = [heuristic, *grid] if options.grid else [*chosen_of(found, heuristic, options.most or len(found)), *stored]
    return [*dict.fromkeys(found), *([] if "xla" in options.skip else [None])]


def compiled(problem: Problem, phase: str, cfg: Any) -> Any:
    try:
        return problem.program(phase, cfg)
    except Exception as error:  # noqa: BLE001 - a config that does not compile is a finding
        return error


def check_and_time(report: Report, problem: Problem, phase: str, cfg: Any, program: Any, exact: Any, heuristic: Any) -> None:
    name = "XLA" if cfg is None else knobs(cfg)
    if isinstance(program, Exception):
        report.check(f"{problem.name} {phase} {name}", False, f"{type(program).__name__}: {str(program)[:300]}")
        return
    try:
        got, again = jax.block_until_ready((program(*problem.values), program(*problem.values)))
    except jax.errors.JaxRuntimeError as error:
        report.check(f"{problem.name} {phase} {name}", False, str(error)[:300])
        return
    errors = {key: float(value) for key, value in distances(got, exact).items()}
    equal = all(bool(jnp.array_equal(got[key], again[key])) for key in got)
    right = equal and all(error < TOLERANCE[phase] for error in errors.values())
    detail = " ".join(f"{key} {error:.1e}" for key, error in errors.items()) + ("" if equal else ", runs differ")
    if cfg is not None:
        report.check(f"{problem.name} {phase} {name}", right, detail)
    del got, again
    taken = samples_of(program, problem.values, 2 if cfg is None else 7)
    median = statistics.median(taken)
    row = {
        "case": problem.name, "phase": phase, "name": name, "config": None if cfg is None else dataclasses.asdict(cfg),
        "heuristic": cfg == heuristic, "milliseconds": median, "spread": (max(taken) - min(taken)) / median,
        "fraction": problem.limit(phase) / median * 1e3, "errors": errors,
    }  # fmt: skip
    report.result["times"].append(row)
    mark = "*" if cfg == heuristic else " "
    print(f"  {phase:8s} {mark}{name:20s} {median:8.3f} ms  {row['fraction']:.3f}  {detail}", flush=True)
    if cfg is not None and (cfg == heuristic or cfg.store_states):
        kernels = samples_of(program, problem.values, 1, kernels=True)
        report.result["kernels"].append([problem.name, phase, kernels])
        print("      " + ", ".join(f"{kernel_name[:24]} {taken:.3f}" for kernel_name, taken in kernels), flush=True)


def run(report: Report, options: argparse.Namespace) -> None:
    """One case and phase after the other: all its programs are compiled by many threads, then run one by one."""
    for name in options.cases.split(","):
        problem = Problem(name)
        for phase in options.phases.split(","):
            heuristic = problem.space[phase].heuristic(problem.call, current_target())
            wanted = ["exact", *chosen(problem, phase, options)]
            with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
                programs = list(pool.map(lambda cfg, phase=phase, problem=problem: compiled(problem, phase, cfg), wanted))
            print(f"{name} {phase}, compiled at {time.monotonic() - report.started:.0f} s", flush=True)
            exact = programs[0](*problem.values)
            for cfg, program in zip(wanted[1:], programs[1:], strict=True):
                if report.remaining() < 0:
                    print("  out of time", flush=True)
                    return
                check_and_time(report, problem, phase, cfg, program, exact, heuristic)
                report.save()


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
    run(report, options)
    report.save()
    wrong = [row for row in report.result["numbers"] if not row["passed"]]
    print(f"{len(report.result['numbers'])} checks, {len(wrong)} wrong; {time.monotonic() - report.started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
