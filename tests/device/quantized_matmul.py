"""`quantized_matmul` in Triton on a real GPU: numbers of every format and config, then times beside XLA and plain bfloat16.

    python tests/device/quantized_matmul.py --out results

Numbers: every format in both layouts against the float64 reference, forward and backward, 4-bit affine weights with every config of
the search spaces, each twice, bit by bit. Times: configs at the sizes of a model, each compared with XLA in float32, beside XLA and
a plain product of bfloat16 weights (`plain`). Device times by CUPTI, per product, over more copies of the weights than L2 holds;
"backward" is the gradient of x, "all" that of scales and zeros too. Prints tables, writes `quantized_matmul.json` under
`--out` (or `$OUT`), exits with 1 if a number is wrong.

`--only` of numbers,times; `--problems` names, comma separated; `--most` configs of each problem and phase besides the heuristic's
(-1 = all); `--budget` seconds after which nothing new is started; `--threads` that compile; `--small` runs the numbers in Triton's
interpreter, without a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from check_gpu import chosen_of
from delta_rule import Report, distances, knobs, samples_of

import ejkernel
from ejkernel.operations.quantized_matmul import reference
from ejkernel.operations.quantized_matmul.cases import grouped_arrays, packed
from ejkernel.operations.quantized_matmul.interface import OPERATION, QuantizedMatmulOutputs
from ejkernel.plugin import Target, current_target
from ejkernel.quantization import dequantize
from ejkernel.testing.checks import widened
from ejkernel_triton.quantized_matmul import config, kernel
from ejkernel_xla.quantized_matmul import config as xla_config, kernel as xla

TOLERANCE = 1e-2
BEYOND_L2 = 200e6
SPACES = {"forward": config.FORWARD, "backward": config.BACKWARD, "all": config.BACKWARD}


class Shape(NamedTuple):
    """sizes: rows of each group, with a matrix of its own; () = one matrix for all rows."""

    rows: int
    inner: int
    columns: int
    mode: str = "affine"
    bits: int = 4
    group: int = 64
    transpose: bool = False
    dtype: str = "bfloat16"
    phases: tuple[str, ...] = ("forward",)
    sizes: tuple[int, ...] = ()

    @property
    def read(self) -> float:
        """Share of the weights that are of groups with rows."""
        return sum(size > 0 for size in self.sizes) / len(self.sizes) if self.sizes else 1.0

    @property
    def options(self) -> dict[str, Any]:
        return {"mode": self.mode, "bits": self.bits, "group_size": self.group, "transpose": self.transpose}

    @property
    def stored(self) -> tuple[int, int]:
        return (self.columns, self.inner) if self.transpose else (self.inner, self.columns)

    def arrays(self, seed: int) -> Any:
        """The call and its inputs."""
        rng = np.random.default_rng(seed)
        if self.sizes:
            form = self.mode, self.bits, self.group
            drawn = grouped_arrays(self.rows, self.inner, self.columns, self.sizes, form, transpose=self.transpose)
            made = {**drawn(rng)}
        else:
            x = (rng.standard_normal((self.rows, self.inner)) / self.inner**0.5).astype(np.float32)
            made = {"x": x, **packed(rng, *self.stored, self.mode, self.bits, self.group)}
        made = {name: jnp.asarray(one, self.dtype if one.dtype == np.float32 else one.dtype) for name, one in made.items()}
        return OPERATION.canonicalise(**made, **self.options)


FORMATS = {
    "affine2": ("affine", 2, 64),
    "affine3": ("affine", 3, 64),
    "affine4-g32": ("affine", 4, 32),
    "affine4": ("affine", 4, 64),
    "affine4-g128": ("affine", 4, 128),
    "affine5": ("affine", 5, 64),
    "affine6": ("affine", 6, 64),
    "affine8": ("affine", 8, 64),
    "nf4": ("nf4", 4, 64),
    "mxfp4": ("mxfp4", 4, 32),
    "mxfp8": ("mxfp8", 8, 32),
    "nvfp4": ("nvfp4", 4, 16),
    "nvfp8": ("nvfp8", 8, 16),
}
UP, DOWN = (4096, 14336), (14336, 4096)
BOTH = ("forward", "backward")
PROBLEMS = {
    "affine4-1-up": Shape(1, *UP, phases=BOTH),
    "affine4-16-up": Shape(16, *UP, phases=BOTH),
    "affine4-64-up": Shape(64, *UP, phases=BOTH),
    "affine4-4096-up": Shape(4096, *UP, phases=(*BOTH, "all")),
    "affine4-1-up-transposed": Shape(1, *UP, transpose=True),
    "affine4-16-up-transposed": Shape(16, *UP, transpose=True, phases=BOTH),
    "affine4-64-up-transposed": Shape(64, *UP, transpose=True),
    "affine4-16-down": Shape(16, *DOWN),
    **{
        f"{name}-16-up": Shape(16, *UP, *form)
        for name, form in FORMATS.items()
        if name not in ("affine4", "affine5", "affine6")
    },
    "affine4-256-up": Shape(256, *UP),
    "affine4-512-up": Shape(512, *UP),
    "affine4-1024-up": Shape(1024, *UP),
    "mxfp4-64-up": Shape(64, *UP, *FORMATS["mxfp4"]),
    "nf4-64-up": Shape(64, *UP, *FORMATS["nf4"]),
    "affine4-float16-16-up": Shape(16, *UP, dtype="float16"),
}


def of_phase(phase: str, module: Any, call: Any, inputs: Any, grad: Any, cfg: Any) -> dict[str, Any]:
    if phase == "forward":
        return {"out": module.forward(call, inputs, cfg).out}
    cotangents = QuantizedMatmulOutputs(grad)
    found = module.backward(call, inputs, cotangents, cotangents, cfg)._asdict()
    return {name: value for name, value in found.items() if value is not None and (phase == "all" or name == "x")}


def failing(report: Report, name: str, error: Exception) -> None:
    report.check(name, False, f"{type(error).__name__}: {str(error)[:300]}")


def formats(small: bool) -> list[tuple[str, Shape, int]]:
    """Sizes that fill no tile's last row or column: names, shapes, and configs besides the heuristic's."""
    rows, long, short = (3, 192, 40) if small else (37, 1152, 360)
    found = []
    for name in ("affine3", "affine4", "nf4", "nvfp4") if small else FORMATS:
        for transpose in (False, True):
            shape = Shape(rows, *((long, short) if transpose else (short, long)), *FORMATS[name], transpose=transpose)
            found.append((f"{name}{'-transposed' if transpose else ''}", shape, 99 if name == "affine4" and not small else 0))
    return found


def check_numbers(report: Report, problems: Sequence[tuple[str, Shape, int]], options: argparse.Namespace) -> None:
    with concurrent.futures.ThreadPoolExecutor(1 if options.small else options.threads) as pool:
        jobs = [(name, pool.submit(checked, shape, most, options)) for name, shape, most in problems]
        for name, job in jobs:
            try:
                rows_found = job.result()
            except Exception as error:  # noqa: BLE001 - the others are still of interest
                failing(report, name, error)
                continue
            for phase, cfg, errors, equal in rows_found:
                detail = " ".join(f"{key} {error:.1e}" for key, error in errors.items()) + ("" if equal else ", runs differ")
                passed = equal and all(error < TOLERANCE for error in errors.values())
                report.check(f"{name} {phase} {knobs(cfg)}", passed, detail)
    wrong = sum(not row["passed"] for row in report.result["numbers"])
    print(
        f"numbers: {len(report.result['numbers'])} checks, {wrong} wrong, {-report.remaining() + report.budget:.0f} s",
        flush=True,
    )
    report.save()


def checked(shape: Shape, most: int, options: argparse.Namespace) -> list[tuple[str, Any, dict[str, float], bool]]:
    with interpreted(options):
        bound = shape.arrays(0)
        call, inputs = bound.call, bound.inputs
        exact = reference.forward(call, widened(inputs))
        grad = jnp.asarray(np.random.default_rng(1).standard_normal(exact.out.shape), shape.dtype)
        wanted = reference.backward(call, widened(inputs), exact, QuantizedMatmulOutputs(np.asarray(grad).astype(np.float64)))
        found = []
        for phase in ("forward", "all"):
            space = SPACES[phase]
            like = {"out": exact.out} if phase == "forward" else {k: v for k, v in wanted._asdict().items() if v is not None}
            heuristic = space.heuristic(call, current_target())
            for cfg in chosen_of(space.search_space(call, current_target()), heuristic, most):
                program = jax.jit(lambda inputs, grad, phase=phase, cfg=cfg: of_phase(phase, kernel, call, inputs, grad, cfg))
                got, again = program(inputs, grad), program(inputs, grad)
                errors = {
                    key: float(np.linalg.norm(np.asarray(got[key], np.float64) - value) / max(np.linalg.norm(value), 1e-30))
                    for key, value in like.items()
                }
                found.append((phase, cfg, errors, all(bool(jnp.array_equal(got[key], again[key])) for key in got)))
        return found


@contextlib.contextmanager
def interpreted(options: argparse.Namespace) -> Any:
    """Dispatch for a GPU that is not there."""
    with ejkernel.use(target=Target("gpu", "NVIDIA H100 80GB HBM3", "9.0")) if options.small else contextlib.nullcontext():
        yield


class Problem:
    """A shape with copies of its weights, more than L2 holds."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name, self.shape = name, shape
        bound = shape.arrays(0)
        self.call, first = bound.call, bound.inputs
        size = sum(array.nbytes for array in first[1:4] if array is not None) * shape.read
        self.copies = 1 if shape.rows > 1024 else -int(-BEYOND_L2 // size)
        more = [first._replace(w=first.w ^ jnp.uint32(0)) for _ in range(self.copies - 1)]
        self.inputs = tuple(jax.block_until_ready([first, *more]))
        self.grad = jax.random.normal(jax.random.key(0), (1, shape.rows, shape.columns), shape.dtype)

    @property
    def values(self) -> tuple[Any, Any]:
        return self.inputs, self.grad

    def program(self, phase: str, cfg: Any) -> Any:
        """Compiled, over all copies of the weights: a config of ours, None for XLA, "exact", "plain"."""
        if cfg == "exact":
            return self._exact(phase)
        if cfg == "plain":
            return self._plain(phase)
        module = xla if cfg is None else kernel
        used = xla_config.CONFIGS.heuristic(self.call, current_target()) if cfg is None else cfg

        def run(inputs: Any, grad: Any) -> Any:
            return [of_phase(phase, module, self.call, one, grad, used) for one in inputs]

        return jax.jit(run).lower(*self.values).compile()

    def _exact(self, phase: str) -> Any:
        floats = [name for name in OPERATION.differentiable if getattr(self.call, name) is not None]
        floats = [name for name in floats if getattr(self.call, name).dtype != "uint8"]
        specs = {name: dataclasses.replace(getattr(self.call, name), dtype="float32") for name in floats}
        call = dataclasses.replace(self.call, **specs)
        used = xla_config.CONFIGS.heuristic(call, current_target())

        def run(inputs: Any, grad: Any) -> Any:
            wide = inputs[0]._replace(**{name: getattr(inputs[0], name).astype(jnp.float32) for name in floats})
            return [of_phase(phase, xla, call, wide, grad.astype(jnp.float32), used)]

        return jax.jit(run).lower(*self.values).compile()

    def _plain(self, phase: str) -> Any:
        """Weights of the dtype of x, as many copies as above L2; returns the function and its arrays."""
        shape = self.shape
        first = self.inputs[0]
        zeros = None if first.zeros is None else first.zeros[0]
        form = {name: value for name, value in shape.options.items() if name != "transpose"}
        dense = jax.jit(lambda w, s, z: dequantize(w, s, z, dtype=shape.dtype, **form))(first.w[0], first.scales[0], zeros)
        copies = 1 if shape.rows > 1024 else -int(-BEYOND_L2 // (dense.nbytes * shape.read))
        weights = tuple(dense + jnp.zeros_like(dense) for _ in range(copies))

        def run(weights: Any, x: Any, grad: Any) -> Any:
            flip = shape.transpose != (phase != "forward")
            left = x if phase == "forward" else grad
            if shape.sizes:
                return [jax.lax.ragged_dot(left, w.mT if flip else w, jnp.array(shape.sizes, jnp.int32)) for w in weights]
            return [left @ (w.T if flip else w) for w in weights]

        return jax.jit(run).lower(weights, first.x[0], self.grad[0]).compile(), (weights, first.x[0], self.grad[0]), copies


def compiled(problem: Problem, phase: str, cfg: Any) -> Any:
    try:
        return problem.program(phase, cfg)
    except Exception as error:  # noqa: BLE001 - a config that does not compile is a finding
        return error


def check_and_time(report: Report, problem: Problem, phase: str, cfg: Any, program: Any, exact: Any, heuristic: bool) -> None:
    name = "XLA" if cfg is None else cfg if cfg == "plain" else knobs(cfg)
    where = f"{problem.name} {phase} {name}"
    try:
        if isinstance(program, Exception):
            raise program
        values, copies, errors, equal = problem.values, problem.copies, {}, True
        if cfg == "plain":
            program, values, copies = program
        else:
            got, again = jax.block_until_ready((program(*values), program(*values)))
            errors = {key: float(value) for key, value in distances(got[0], exact).items()}
            equal = all(bool(jnp.array_equal(got[0][key], again[0][key])) for key in got[0])
            del got, again
        taken = [one / copies for one in samples_of(program, values, 5)]
    except Exception as error:  # noqa: BLE001 - the other rows are still of interest
        failing(report, where, error)
        return
    detail = " ".join(f"{key} {error:.1e}" for key, error in errors.items()) + ("" if equal else ", runs differ")
    if cfg is not None and cfg != "plain":
        report.check(where, equal and all(error < TOLERANCE for error in errors.values()), detail)
    median = statistics.median(taken)
    first = problem.inputs[0]
    weights = sum(array.nbytes for array in first[1:4] if array is not None) * problem.shape.read
    bytes_moved = first.x.nbytes + weights + problem.grad.nbytes
    row = {
        "case": problem.name, "phase": phase, "name": name, "heuristic": heuristic, "milliseconds": median, "copies": copies,
        "config": dataclasses.asdict(cfg) if dataclasses.is_dataclass(cfg) and not isinstance(cfg, type) else None,
        "spread": (max(taken) - min(taken)) / median, "errors": errors, "terabytes_per_second": bytes_moved / median / 1e9,
    }  # fmt: skip
    report.result["times"].append(row)
    print(
        f"  {phase:8s} {'*' if heuristic else ' '}{name:26s} {median:8.4f} ms  {bytes_moved / median / 1e9:5.2f} TB/s {detail}",
        flush=True,
    )
    if heuristic:
        kernels = samples_of(program, values, 1, kernels=True)
        report.result["kernels"].append([problem.name, phase, kernels])
        print("      " + ", ".join(f"{one[:24]} {taken:.4f}" for one, taken in kernels[:4]), flush=True)


def check_times(report: Report, problems: Mapping[str, Shape], options: argparse.Namespace) -> None:
    """Programs of a problem are compiled by many threads, beside the runs of the one before, then run one by one."""
    for name in options.problems.split(","):
        try:
            problem = Problem(name, problems[name])
        except Exception as error:  # noqa: BLE001 - the other rows are still of interest
            failing(report, name, error)
            continue
        for phase in problem.shape.phases:
            if report.remaining() < 0:
                print("  out of time", flush=True)
                return
            space = SPACES[phase]
            heuristic = space.heuristic(problem.call, current_target())
            found = space.search_space(problem.call, current_target())
            found = chosen_of(found, heuristic, options.most if options.most >= 0 else len(found))
            wanted = ["exact", *found, None, *(["plain"] if phase != "all" else [])]
            with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
                programs = list(pool.map(lambda cfg, phase=phase, problem=problem: compiled(problem, phase, cfg), wanted))
            print(f"{name} {phase}, compiled at {time.monotonic() - report.started:.0f} s", flush=True)
            if isinstance(programs[0], Exception):
                failing(report, f"{name} {phase} exact", programs[0])
                continue
            exact = programs[0](*problem.values)[0]
            for cfg, program in zip(wanted[1:], programs[1:], strict=True):
                check_and_time(report, problem, phase, cfg, program, exact, cfg == heuristic)
            report.save()


def main(name: str, about: str | None, problems: Mapping[str, Shape], numbers: Any) -> int:
    """`numbers` takes whether they are small and gives what `check_numbers` takes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help=f"folder of {name}.json")
    parser.add_argument("--only", default="numbers,times")
    parser.add_argument("--problems", default=",".join(problems))
    parser.add_argument("--most", type=int, default=3)
    parser.add_argument("--budget", type=float, default=130)
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="numbers in Triton's interpreter")
    options = parser.parse_args()
    if options.small != bool(os.environ.get("EJKERNEL_TRITON_INTERPRET")):
        print("set EJKERNEL_TRITON_INTERPRET=1 for --small, and only then")
        return 2
    if jax.default_backend() != "gpu" and not options.small:
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    report = Report(options.out, options.budget, name)
    print(json.dumps(report.result["versions"]), flush=True)
    if "numbers" in options.only:
        check_numbers(report, numbers(options.small), options)
    if "times" in options.only and not options.small:
        check_times(report, problems, options)
    return report.end()


if __name__ == "__main__":
    sys.exit(main("quantized_matmul", __doc__, PROBLEMS, formats))
