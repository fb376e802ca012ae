"""`delta_rule` in Triton on a real GPU: numbers of every config, then times beside XLA and peers.

    python tests/device/delta_rule.py --out results

In bfloat16: outputs and gradients of configs of the search spaces against XLA in float32, each config twice, bit by bit; device
times by CUPTI, the heuristic's kernel by kernel, XLA's, and those of jax-linear-attention and flash-linear-attention where they are
installed, forward and forward with backward. Prints tables, writes `delta_rule.json` under `--out` (or `$OUT`), exits with 1 if a
number is wrong.

`--problems` names, comma separated; `--most` configs of each problem and phase besides the heuristic's (-1 = all), or the grid of
`--segments`, `--blocks` and `--stages`, comma separated, around it, for example

    python tests/device/delta_rule.py --problems gated-b1-t32768-h8-d128 --segments 1,2,4,8,16 --blocks 16,32,64 --skip xla,fla

where a list that is not given is the heuristic's; `--budget`
seconds after which nothing new is started; `--threads` that compile; `--skip` of xla,peers,fla.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from check_gpu import chosen_of, in_float32, versions

from ejkernel.operations.delta_rule.interface import OPERATION, DeltaRuleInputs, DeltaRuleOutputs
from ejkernel.plugin import current_target
from ejkernel_triton.delta_rule import config, kernel
from ejkernel_xla.delta_rule import config as xla_config, kernel as xla

TOLERANCE = {"forward": 1e-2, "backward": 2e-2}


class Shape(NamedTuple):
    """decay: "scalar", "channel", "general" (per channel, with a and b) or ""."""

    batch: int
    length: int
    heads: int
    width: int
    channels: int
    decay: str
    dtype: str = "bfloat16"
    state: bool = False
    sequences: int = 0
    strength: float = 0.1


PROBLEMS = {
    "gated-b1-t8192-h32-d128": Shape(1, 8192, 32, 128, 128, "scalar"),
    "gated-b2-t4096-h16-d128": Shape(2, 4096, 16, 128, 128, "scalar"),
    "gated-b4-t2048-h32-d128": Shape(4, 2048, 32, 128, 128, "scalar"),
    "gated-b1-t32768-h16-d128": Shape(1, 32768, 16, 128, 128, "scalar"),
    "gated-b1-t8192-h8-d128": Shape(1, 8192, 8, 128, 128, "scalar"),
    "gated-b1-t32768-h8-d128": Shape(1, 32768, 8, 128, 128, "scalar"),
    "gated-slow-b1-t32768-h8-d128": Shape(1, 32768, 8, 128, 128, "scalar", strength=0.001),
    "gated-packed-t32768-h4-d128": Shape(1, 32768, 4, 128, 128, "scalar", sequences=3, strength=0.001),
    "channel-slow-b1-t32768-h8-d128": Shape(1, 32768, 8, 128, 128, "channel", strength=0.001),
    "gated-b1-t8192-h16-d128-v256": Shape(1, 8192, 16, 128, 256, "scalar"),
    "gated-b1-t8192-h8-d256-v512": Shape(1, 8192, 8, 256, 512, "scalar"),
    "gated-b2-t4096-h32-d64": Shape(2, 4096, 32, 64, 64, "scalar"),
    "gated-packed-t8192-h32-d128": Shape(1, 8192, 32, 128, 128, "scalar", sequences=8),
    "gated-float32-b1-t2048-h16-d128": Shape(1, 2048, 16, 128, 128, "scalar", "float32"),
    "gated-float16-b1-t2048-h16-d128": Shape(1, 2048, 16, 128, 128, "scalar", "float16"),
    "delta-b1-t8192-h32-d128": Shape(1, 8192, 32, 128, 128, ""),
    "channel-b1-t8192-h32-d128": Shape(1, 8192, 32, 128, 128, "channel"),
    "channel-strong-b1-t8192-h32-d128": Shape(1, 8192, 32, 128, 128, "channel", strength=3.0),
    "channel-b2-t4096-h16-d128": Shape(2, 4096, 16, 128, 128, "channel"),
    "channel-b2-t4096-h32-d64": Shape(2, 4096, 32, 64, 64, "channel"),
    "channel-float32-b1-t2048-h16-d128": Shape(1, 2048, 16, 128, 128, "channel", "float32"),
    "general-b2-t4096-h32-d64": Shape(2, 4096, 32, 64, 64, "general"),
    "general-b1-t8192-h32-d64": Shape(1, 8192, 32, 64, 64, "general"),
    "general-b2-t4096-h16-d128": Shape(2, 4096, 16, 128, 128, "general"),
    "general-float32-b1-t1024-h8-d64": Shape(1, 1024, 8, 64, 64, "general", "float32"),
    **{f"decode-b{batch}-h32-d128": Shape(batch, 1, 32, 128, 128, "scalar", state=True) for batch in (1, 8, 64, 256)},
}


class Problem:
    """A shape with its arrays; what is right is XLA's from the same numbers in float32."""

    def __init__(self, name: str) -> None:
        shape = self.shape = PROBLEMS[name]
        keys = iter(jax.random.split(jax.random.key(0), 10))
        tokens = shape.batch, shape.length, shape.heads

        def normal(*sizes: int) -> Any:
            return jax.random.normal(next(keys), (*tokens, *sizes), jnp.float32)

        made = {name: normal(shape.width) for name in ("query", "key")}
        made["value"] = normal(shape.channels)
        if shape.decay != "general":
            made["beta"] = jax.nn.sigmoid(normal())
        if shape.decay:
            drawn = normal(*[] if shape.decay == "scalar" else [shape.width])
            made["decay"] = -0.6065 * jax.nn.sigmoid(drawn) if shape.decay == "general" else -shape.strength * abs(drawn)
        if shape.decay == "general":
            unit = normal(shape.width)
            unit /= jnp.linalg.norm(unit, axis=-1, keepdims=True)
            made["a"], made["b"] = unit * jax.nn.sigmoid(normal(1)), -unit
        made = {name: array if name == "decay" else array.astype(shape.dtype) for name, array in made.items()}
        if shape.state:
            made["initial_state"] = jax.random.normal(next(keys), (shape.batch, *tokens[2:], shape.width, shape.channels))
        if shape.sequences:
            made["cu_seqlens"] = jnp.linspace(0, shape.length, shape.sequences + 1).astype(jnp.int32)
        bound = OPERATION.canonicalise(**made, use_qk_l2norm=shape.decay != "general", return_state=shape.state)
        self.name, self.call, self.inputs = name, bound.call, bound.inputs
        self.d_out = jax.random.normal(next(keys), OPERATION.output_specs(self.call).out.shape, shape.dtype)
        self.space = {"forward": config.FORWARD, "backward": config.BACKWARD}
        self.phases = ["forward"] if shape.state else ["forward", "backward"]

    @property
    def values(self) -> tuple[Any, Any]:
        return self.inputs, self.d_out

    def function(self, phase: str, module: Any, cfg: Any) -> Any:
        """Of inputs and cotangent: a dict of arrays."""

        def forward(inputs: DeltaRuleInputs, d_out: Any) -> dict[str, Any]:
            found = module.forward(self.call, inputs, cfg)
            return {key: value for key, value in found._asdict().items() if value is not None}

        def backward(inputs: DeltaRuleInputs, d_out: Any) -> dict[str, Any]:
            outputs = DeltaRuleOutputs(d_out)
            gradients = module.backward(self.call, inputs, outputs, outputs, cfg)
            return {key: value for key, value in gradients._asdict().items() if value is not None}

        return jax.jit(forward if phase == "forward" else backward)

    def program(self, phase: str, cfg: Any) -> Any:
        """Compiled: a config of ours, None for XLA, "exact" for XLA from the same numbers in float32."""
        if cfg is not None and cfg != "exact":
            return self.function(phase, kernel, cfg).lower(*self.values).compile()
        space = xla_config.FORWARD if phase == "forward" else xla_config.BACKWARD
        if cfg is None:
            return self.function(phase, xla, space.heuristic(self.call, current_target())).lower(*self.values).compile()
        specs = {name: dataclasses.replace(spec, dtype="float32") for name, spec in self._float_specs()}
        call = dataclasses.replace(self.call, **specs)
        other = object.__new__(Problem)
        other.call = call
        found = other.function(phase, xla, space.heuristic(call, current_target()))
        return jax.jit(lambda *values: found(*in_float32(values))).lower(*self.values).compile()

    def _float_specs(self) -> list[tuple[str, Any]]:
        pairs = ((name, getattr(self.call, name)) for name in OPERATION.differentiable)
        return [(name, spec) for name, spec in pairs if spec is not None]


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
    """What was found, in `<name>.json`."""

    def __init__(self, folder: str, budget: float, name: str = "delta_rule") -> None:
        self.folder, self.budget, self.started, self.name = pathlib.Path(folder), budget, time.monotonic(), name
        names = ("numbers", "times", "kernels", "peers")
        self.result: dict[str, Any] = {"versions": versions(), **{name: [] for name in names}}

    def remaining(self) -> float:
        return self.budget - (time.monotonic() - self.started)

    def check(self, name: str, passed: bool, detail: str) -> bool:
        self.result["numbers"].append({"check": name, "passed": bool(passed), "detail": detail})
        if not passed:
            print(f"  FAILED {name}: {detail}", flush=True)
        return bool(passed)

    def peer(self, case: str, peer: str, phase: str, taken: list[float], **more: Any) -> None:
        median = statistics.median(taken)
        self.result["peers"].append({"case": case, "peer": peer, "phase": phase, "milliseconds": median, **more})
        print(f"  {peer} {phase:8s} {median:8.4f} ms {more or ''}", flush=True)

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{self.name}.json").write_text(json.dumps(self.result, indent=1))

    def end(self) -> int:
        """Save and say what was checked; the exit status."""
        self.save()
        wrong = [row for row in self.result["numbers"] if not row["passed"]]
        print(f"{len(self.result['numbers'])} checks, {len(wrong)} wrong; {time.monotonic() - self.started:.0f} s")
        return 1 if wrong else 0


def samples_of(program: Any, values: tuple[Any, ...], iterations: int, *, kernels: bool = False) -> Any:
    from jax.experimental.mosaic.gpu import profiler

    _, found = profiler.Cupti(finalize=False).measure(program, aggregate=not kernels, iterations=iterations)(*values)
    return found


def chosen(problem: Problem, phase: str, options: argparse.Namespace) -> list[Any]:
    """The heuristic's config, those to compare it with, and XLA."""
    space = problem.space[phase]
    heuristic = space.heuristic(problem.call, current_target())
    grid = {"segments": options.segments, "block_v": options.blocks, "num_stages": options.stages}
    grid = {name: [int(value) for value in values.split(",")] for name, values in grid.items() if values}
    if grid:
        changes = (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
        found = [heuristic, *(dataclasses.replace(heuristic, **change) for change in changes)]
    else:
        found = space.search_space(problem.call, current_target())
        found = chosen_of(found, heuristic, options.most if options.most >= 0 else len(found))
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
        "heuristic": cfg == heuristic, "milliseconds": median, "spread": (max(taken) - min(taken)) / median, "errors": errors,
    }  # fmt: skip
    report.result["times"].append(row)
    mark = "*" if cfg == heuristic else " "
    print(f"  {phase:8s} {mark}{name:24s} {median:8.4f} ms  {detail}", flush=True)
    if cfg == heuristic:
        kernels = samples_of(program, problem.values, 1, kernels=True)
        report.result["kernels"].append([problem.name, phase, kernels])
        print("      " + ", ".join(f"{kernel_name[:24]} {taken:.4f}" for kernel_name, taken in kernels), flush=True)


def jla_programs(problem: Problem) -> dict[str, Any]:
    from jla.ops.mosaic_gpu import gated_delta_rule, kda, rwkv7

    x = problem.inputs
    arrays = x.query, x.key, x.value, x.decay, x.beta
    options: dict[str, Any] = {"use_qk_l2norm": True}
    if problem.shape.decay == "general":  # its a reads and its b writes
        function, arrays = rwkv7.rwkv7, (x.query, x.key, x.value, x.decay, x.b, x.a)
        options = {"scale": problem.call.softmax_scale, "lower_bound": -0.61}
    elif problem.shape.decay == "channel":
        function = kda.kda
    elif problem.shape.decay == "scalar":
        function = gated_delta_rule.gated_delta_rule
    else:
        return {}
    function = functools.partial(function, **options)

    def forward(*arrays: Any) -> Any:
        return function(*arrays)[0]

    def both(*arrays: Any) -> Any:
        out, pull = jax.vjp(forward, *arrays)
        return out, pull(problem.d_out)

    return {"forward": (jax.jit(forward), arrays), "both": (jax.jit(both), arrays)}


def time_jla(report: Report, problem: Problem, exact: Any) -> None:
    try:
        for phase, (function, arrays) in jla_programs(problem).items():
            out = function(*arrays)
            error = distances({"out": out if phase == "forward" else out[0]}, {"out": exact["out"]})["out"]
            report.peer(problem.name, "jla", phase, samples_of(function, arrays, 7), error=float(error))
    except Exception as error:  # noqa: BLE001 - a peer that does not run is a finding
        print(f"  jla: {type(error).__name__}: {str(error)[:300]}", flush=True)


def graph_times(run: Any) -> list[float]:
    """Milliseconds of a function of torch, replayed as a CUDA graph."""
    import torch

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    taken = []
    for _ in range(7):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end))
    return taken


def time_fla(report: Report, problem: Problem) -> None:
    """Times in a CUDA graph."""
    try:
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        function: Any = {"scalar": chunk_gated_delta_rule, "channel": chunk_kda}[problem.shape.decay]
        x = problem.inputs
        names = "query", "key", "value", "decay", "beta"
        arrays = [torch.from_dlpack(getattr(x, name)).clone().requires_grad_() for name in names]
        d_out = torch.from_dlpack(problem.d_out).clone()

        def forward() -> Any:
            return function(*arrays, use_qk_l2norm_in_kernel=True)[0]

        def both() -> Any:
            forward().backward(d_out)
            for array in arrays:
                array.grad = None

        def inference() -> Any:
            with torch.no_grad():
                return forward()

        for phase, run in (("forward", inference), ("both", both)):
            report.peer(problem.name, "fla", phase, graph_times(run))
    except Exception as error:  # noqa: BLE001 - a peer that does not run is a finding
        print(f"  fla: {type(error).__name__}: {str(error)[:300]}", flush=True)


def run(report: Report, options: argparse.Namespace) -> None:
    """One problem and phase after the other: all its programs are compiled by many threads, then run one by one."""
    for name in options.problems.split(","):
        problem = Problem(name)
        for phase in (phase for phase in problem.phases if phase in options.phases):
            heuristic = problem.space[phase].heuristic(problem.call, current_target())
            wanted = ["exact", *chosen(problem, phase, options)]
            with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
                programs = list(pool.map(lambda cfg, phase=phase, problem=problem: compiled(problem, phase, cfg), wanted))
            print(f"{name} {phase}, compiled at {time.monotonic() - report.started:.0f} s", flush=True)
            if options.compile:
                continue
            exact = programs[0](*problem.values)
            for cfg, program in zip(wanted[1:], programs[1:], strict=True):
                if report.remaining() < 0:
                    print("  out of time", flush=True)
                    return
                check_and_time(report, problem, phase, cfg, program, exact, heuristic)
                report.save()
            if phase == "forward" and "peers" not in options.skip and problem.shape.dtype == "bfloat16":
                time_jla(report, problem, exact)
            del exact, programs
        if options.compile:
            if "peers" not in options.skip and problem.shape.dtype == "bfloat16":
                for function, arrays in jla_programs(problem).values():
                    function.lower(*arrays).compile()
            continue
        if "peers" not in options.skip and "fla" not in options.skip and len(problem.phases) == 2:
            time_fla(report, problem)
        report.save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of delta_rule.json")
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--phases", default="forward,backward")
    parser.add_argument("--most", type=int, default=6)
    for name in ("segments", "blocks", "stages"):
        parser.add_argument(f"--{name}", default="", help="of a grid of configs")
    parser.add_argument("--budget", type=float, default=240)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--skip", default="", help="of xla,peers,fla")
    parser.add_argument("--compile", action="store_true", help="compile only, into JAX_COMPILATION_CACHE_DIR")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    report = Report(options.out, options.budget)
    print(json.dumps(report.result["versions"]), flush=True)
    run(report, options)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
