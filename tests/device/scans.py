"""Scans in Triton on a real GPU: numbers of every config, then times beside XLA and peers.

    python tests/device/scans.py --out results

They are `selective_scan`, `rwkv4`, and `linear_recurrence` with a bonus or wide values.

In bfloat16 (A, dt, w, u in float32, as models hold them): outputs and gradients of configs of the search spaces against XLA in
float32, each config twice, bit by bit; device times by CUPTI, XLA's, and those of jax-linear-attention and flash-linear-attention
where they are installed. Prints tables, writes `scans.json` under `--out` (or `$OUT`), exits with 1 if a number is wrong.

`--problems` names, comma separated; `--most` configs of each problem and phase besides the heuristic's (-1 = all); `--budget`
seconds after which nothing new is started; `--threads` that compile; `--skip` of xla,peers.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import os
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from check_gpu import chosen_of
from delta_rule import Report, check_and_time, compiled, graph_times, samples_of

from ejkernel.operations import get_operation
from ejkernel.plugin import current_target


class Shape(NamedTuple):
    """width: of the state of a channel; 0 for `rwkv4`. heads: of `linear_recurrence`, with channels of value; else 0. documents:
    of `selective_scan`, packed in one row; 0 for whole rows."""

    batch: int
    length: int
    channels: int
    width: int = 0
    state: bool = False
    dtype: str = "bfloat16"
    heads: int = 0
    bonus: bool = False
    documents: int = 0

    @property
    def operation(self) -> str:
        return "linear_recurrence" if self.heads else "selective_scan" if self.width else "rwkv4"


PROBLEMS = {
    "mamba-b2-t4096-i4096-n16": Shape(2, 4096, 4096, 16),
    "mamba-b1-t8192-i5120-n16": Shape(1, 8192, 5120, 16),
    "mamba-b8-t2048-i2048-n16": Shape(8, 2048, 2048, 16),
    "mamba-b1-t32768-i1536-n16": Shape(1, 32768, 1536, 16),
    "mamba-b2-t2048-i2048-n64": Shape(2, 2048, 2048, 64),
    "mamba-float32-b1-t2048-i2048-n16": Shape(1, 2048, 2048, 16, dtype="float32"),
    "mamba-b1-t8192-i4096-n16-8-documents": Shape(1, 8192, 4096, 16, documents=8),
    "mamba-b1-t8192-i4096-n16-80-documents": Shape(1, 8192, 4096, 16, documents=80),
    "rwkv4-b8-t4096-c2048": Shape(8, 4096, 2048),
    "rwkv4-b1-t8192-c4096": Shape(1, 8192, 4096),
    "rwkv6-b2-t4096-h32-d64": Shape(2, 4096, 64, 64, heads=32, bonus=True),
    "gla-b1-t4096-h16-d128-v512": Shape(1, 4096, 512, 128, heads=16),
    "mamba-step-b1-i4096-n16": Shape(1, 1, 4096, 16, True),
    "mamba-step-b64-i4096-n16": Shape(64, 1, 4096, 16, True),
    "mamba-step-b256-i4096-n16": Shape(256, 1, 4096, 16, True),
}


class Problem:
    """A shape with its arrays; what is right is XLA's from the same numbers in float32."""

    def __init__(self, name: str) -> None:
        shape = self.shape = PROBLEMS[name]
        self.name, self.operation = name, shape.operation
        owner = get_operation(self.operation)
        make = {"linear_recurrence": _linear, "selective_scan": _mamba, "rwkv4": _rwkv4}[self.operation]
        bound = owner.canonicalise(**make(shape))
        self.call, self.inputs, self.owner = bound.call, bound.inputs, owner
        specs = owner.output_specs(self.call)
        keys = iter(jax.random.split(jax.random.key(1), 2))
        self.cotangents = type(specs)(
            *(None if spec is None else jax.random.normal(next(keys), spec.shape, spec.dtype) for spec in specs)
        )
        config = self.module("triton", "config")
        self.space = {"forward": config.FORWARD, "backward": config.BACKWARD}
        self.phases = ["forward"] if shape.state else ["forward", "backward"]

    def module(self, platform: str, part: str) -> Any:
        return importlib.import_module(f"ejkernel_{platform}.{self.operation}.{part}")

    @property
    def values(self) -> tuple[Any, Any]:
        return self.inputs, self.cotangents

    def function(self, phase: str, module: Any, cfg: Any) -> Any:
        """Of inputs and cotangents: a dict of arrays."""

        def run(inputs: Any, cotangents: Any) -> dict[str, Any]:
            if phase == "forward":
                found = module.forward(self.call, inputs, cfg)
            else:
                found = module.backward(self.call, inputs, cotangents, cotangents, cfg)
            return {key: value for key, value in found._asdict().items() if value is not None}

        return jax.jit(run)

    def program(self, phase: str, cfg: Any) -> Any:
        """Compiled: a config of ours, None for XLA, "exact" for XLA from the same numbers in float32."""
        if cfg is not None and cfg != "exact":
            return self.function(phase, self.module("triton", "kernel"), cfg).lower(*self.values).compile()
        xla, space = self.module("xla", "kernel"), self.module("xla", "config").CONFIGS
        if cfg is None:
            return self.function(phase, xla, space.heuristic(self.call, current_target())).lower(*self.values).compile()
        names = [name for name in self.owner.differentiable if getattr(self.call, name) is not None]
        specs = {name: dataclasses.replace(getattr(self.call, name), dtype="float32") for name in names}
        other = object.__new__(Problem)
        other.call = dataclasses.replace(self.call, **specs)
        found = other.function(phase, xla, space.heuristic(other.call, current_target()))

        def widened(array: Any) -> Any:
            return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array

        wide = jax.jit(lambda *values: found(*jax.tree.map(widened, values)))
        return wide.lower(*self.values).compile()


def _mamba(shape: Shape) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    batch, length, channels, width, state, dtype = shape[:6]

    def normal(*sizes: int) -> Any:
        return jax.random.normal(next(keys), sizes, jnp.float32)

    made = {
        "x": normal(batch, length, channels).astype(dtype),
        "A": -jnp.tile(jnp.arange(1, width + 1, dtype=jnp.float32), (channels, 1)),
        "B": normal(batch, length, width).astype(dtype),
        "C": normal(batch, length, width).astype(dtype),
        "D": normal(channels),
        "dt": (0.1 * jax.nn.softplus(normal(batch, length, channels))).astype(dtype),
    }
    if state:
        made["initial_state"] = normal(batch, channels, width)
    if shape.documents:
        made["initial_state"] = normal(shape.documents, channels, width)
        inner = jnp.sort(jax.random.randint(next(keys), (shape.documents - 1,), 1, length))
        made["cu_seqlens"] = jnp.concatenate([jnp.zeros(1, jnp.int32), inner, jnp.full(1, length, jnp.int32)])
    return made


def _rwkv4(shape: Shape) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    tokens = shape.batch, shape.length, shape.channels
    made = {name: jax.random.normal(next(keys), (shape.channels,)) for name in ("w", "u")}
    return made | {name: jax.random.normal(next(keys), tokens).astype(shape.dtype) for name in ("k", "v")}


def _linear(shape: Shape) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    tokens = shape.batch, shape.length, shape.heads
    sizes = {"query": shape.width, "key": shape.width, "value": shape.channels}
    made: dict[str, Any] = {
        name: jax.random.normal(next(keys), (*tokens, size)).astype(shape.dtype) for name, size in sizes.items()
    }
    made["gk"] = -0.1 * jnp.abs(jax.random.normal(next(keys), (*tokens, shape.width)))
    if shape.bonus:
        made["bonus"] = jax.random.normal(next(keys), (shape.heads, shape.width))
    return made


def time_jla(report: Report, problem: Problem) -> None:
    """jax-linear-attention has Mamba-1; its kernels take one dtype and float32 matrices."""
    from jla.ops import linear_attention

    x = problem.inputs
    arrays = x.C, x.B, x.x, x.dt, x.A[0], x.D[0]
    options: dict[str, Any] = {}
    if x.cu_seqlens is not None:
        tokens = jnp.arange(x.x.shape[1], dtype=jnp.int32)
        options["segment_ids"] = jnp.searchsorted(x.cu_seqlens[0], tokens, side="right").astype(jnp.int32)[None]

    def forward(C: Any, B: Any, u: Any, dt: Any, A: Any, D: Any) -> Any:
        found = linear_attention("mamba1", C, B, u, dt=dt, a=A, d=D, scale=1.0, **options)
        return found[0] if isinstance(found, tuple) else found

    def both(*arrays: Any) -> Any:
        out, pull = jax.vjp(forward, *arrays)
        return out, pull(problem.cotangents.out)

    for phase, function in (("forward", jax.jit(forward)), ("both", jax.jit(both))):
        report.peer(problem.name, "jla", phase, samples_of(function, arrays, 7))


def time_fla(report: Report, problem: Problem) -> None:
    """flash-linear-attention has RWKV-4; times of a CUDA graph."""
    import torch
    from fla.ops.rwkv4 import fused_recurrent_rwkv4

    x = problem.inputs
    w, u, k, v = (torch.from_dlpack(array).clone().requires_grad_() for array in (x.w[0], x.u[0], x.k, x.v))
    batch, _, channels = problem.call.k.shape
    state = torch.zeros(batch, 3, 1, channels, device="cuda")
    state[:, 2] = -1e30
    d_out = torch.from_dlpack(problem.cotangents.out).clone()

    def forward() -> Any:
        return fused_recurrent_rwkv4(w, u, k, v, state)[0]

    def both() -> Any:
        out = forward()
        out.backward(d_out.to(out.dtype))
        for array in (w, u, k, v):
            array.grad = None

    def inference() -> Any:
        with torch.no_grad():
            return forward()

    for phase, run in (("forward", inference), ("both", both)):
        report.peer(problem.name, "fla", phase, graph_times(run))


def chosen(problem: Problem, phase: str, options: argparse.Namespace) -> list[Any]:
    """The heuristic's config, those to compare it with, and XLA."""
    space = problem.space[phase]
    heuristic = space.heuristic(problem.call, current_target())
    found = space.search_space(problem.call, current_target())
    found = chosen_of(found, heuristic, options.most if options.most >= 0 else len(found))
    return [*dict.fromkeys(found), *([] if "xla" in options.skip else [None])]


def run(report: Report, options: argparse.Namespace) -> None:
    """All programs are compiled by many threads, then run one by one."""
    problems = [Problem(name) for name in options.problems.split(",")]
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        jobs = []
        for problem in problems:
            for phase in problem.phases:
                wanted = ["exact", *chosen(problem, phase, options)]
                jobs.append((problem, phase, wanted, [pool.submit(compiled, problem, phase, cfg) for cfg in wanted]))
        concurrent.futures.wait([job for *_, programs in jobs for job in programs])  # XLA times kernels when it compiles
        for problem, phase, wanted, programs in jobs:
            print(f"{problem.name} {phase}, at {time.monotonic() - report.started:.0f} s", flush=True)
            exact = programs[0].result()(*problem.values)
            heuristic = problem.space[phase].heuristic(problem.call, current_target())
            for cfg, program in zip(wanted[1:], programs[1:], strict=True):
                if report.remaining() < 0:
                    print("  out of time", flush=True)
                    pool.shutdown(wait=False, cancel_futures=True)
                    return
                check_and_time(report, problem, phase, cfg, program.result(), exact, heuristic)
                report.save()
            peer = {"selective_scan": time_jla, "rwkv4": time_fla}.get(problem.operation)
            if phase == problem.phases[-1] and peer and "peers" not in options.skip and problem.shape.dtype == "bfloat16":
                try:
                    peer(report, problem)
                except Exception as error:  # noqa: BLE001 - a peer that does not run is a finding
                    print(f"  peer: {type(error).__name__}: {str(error)[:300]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of scans.json")
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--most", type=int, default=6)
    parser.add_argument("--budget", type=float, default=240)
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--skip", default="", help="of xla,peers")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    report = Report(options.out, options.budget, "scans")
    print(json.dumps(report.result["versions"]), flush=True)
    run(report, options)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
