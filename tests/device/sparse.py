"""Native sparse attention in Triton on a real GPU: numbers of every config, then times beside XLA, plain JAX and a peer.

    python tests/device/sparse.py --out results

Outputs and gradients: of every config at the problems named `numbers-...`, against the reference in float64; of some configs at the
others, of real sizes, against XLA in float32 from the same numbers; each config twice, bit by bit. Device times by CUPTI, the
heuristic's kernel by kernel, XLA's, those of dense attention under the same mask in plain JAX where that fits, and those of
flash-linear-attention where it is installed. Prints tables, writes `sparse.json` under `--out` (or `$OUT`), exits with 1 if a
number is wrong.

`--only` names of problems, comma separated; `--most` configs of each large problem and phase besides the heuristic's (-1 = all);
`--budget` seconds after which nothing new is started; `--threads` that compile; `--skip` of xla,plain,fla; `--small`: a few tiny
problems, on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from typing import Any, NamedTuple

if "--small" in sys.argv:
    os.environ["EJKERNEL_TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from check_gpu import chosen_of
from delta_rule import Report, distances, graph_times, knobs, samples_of

from ejkernel.operations.native_sparse_attention import reference
from ejkernel.operations.native_sparse_attention.interface import OPERATION, NativeSparseAttentionOutputs
from ejkernel.plugin import Target, current_target
from ejkernel_triton.native_sparse_attention import config, kernel
from ejkernel_xla.native_sparse_attention import config as xla_config, kernel as xla

TOLERANCE = {"bfloat16": {"forward": 1e-2, "backward": 2e-2}, "float16": {"forward": 2e-3, "backward": 4e-3}}
TOLERANCE["float32"] = {"forward": 1e-5, "backward": 2e-5}
PHASES = ("forward", "backward")


class Shape(NamedTuple):
    """chosen: "random" blocks besides the query's own and the first, or the last ones ("near")."""

    length: int
    heads: int
    key_heads: int
    size: int = 128
    slots: int = 16
    block_size: int = 64
    batch: int = 1
    dtype: str = "bfloat16"
    chosen: str = "random"
    sequences: int = 0
    value_size: int = 0


PROBLEMS = {
    "numbers-t512-h16-k1-d128": Shape(512, 16, 1, slots=4),
    "numbers-t512-h8-k2-d64-bs32": Shape(512, 8, 2, 64, 6, 32),
    "numbers-t400-h6-k2-d96-v40-bs48": Shape(400, 6, 2, 96, 3, 48, value_size=40),
    "numbers-t300-h8-k2-d256-bs16": Shape(300, 8, 2, 256, 5, 16, dtype="float16"),
    "numbers-t500-h8-k2-d128-packed": Shape(500, 8, 2, slots=4, sequences=5),
    "numbers-t300-h4-k2-d64-float32": Shape(300, 4, 2, 64, 4, 32, dtype="float32"),
    "numbers-t300-h80-k1-d64-bs128": Shape(300, 80, 1, 64, 2, 128),
    "t8192-h64-k4-d128": Shape(8192, 64, 4),
    "t8192-h64-k4-d128-near": Shape(8192, 64, 4, chosen="near"),
    "t8192-h64-k4-d128-packed": Shape(8192, 64, 4, sequences=8),
    "t8192-h64-k4-d64": Shape(8192, 64, 4, 64),
    "t32768-h64-k4-d128": Shape(32768, 64, 4),
    "b4-t4096-h32-k8-d128": Shape(4096, 32, 8, batch=4),
    "t8192-h16-k16-d128": Shape(8192, 16, 16),
}
SMALL = {
    "numbers-t40-h4-k2-d16": Shape(40, 4, 2, 16, 3, 16),
    "t48-h4-k2-d16-packed": Shape(48, 4, 2, 16, 2, 16, sequences=3),
}


@functools.lru_cache
def target() -> Target:
    return current_target() if jax.default_backend() == "gpu" else Target("gpu", "NVIDIA H100 80GB HBM3", "9.0")


class Problem:
    """A shape with its arrays, and what is right."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name, self.shape = name, shape
        rng = np.random.default_rng(0)
        keys = iter(jax.random.split(jax.random.key(0), 4))

        def normal(heads: int, size: int) -> Any:
            return jax.random.normal(next(keys), (shape.batch, shape.length, heads, size), jnp.float32).astype(shape.dtype)

        made = {
            "query": normal(shape.heads, shape.size),
            "key": normal(shape.key_heads, shape.size),
            "value": normal(shape.key_heads, shape.value_size or shape.size),
        }
        bounds = np.linspace(0, shape.length, max(shape.sequences, 1) + 1).astype(np.int32)
        made["block_indices"] = jnp.asarray(_blocks(shape, bounds, rng))
        if shape.sequences:
            made["cu_seqlens"] = jnp.asarray(bounds)
        bound = OPERATION.canonicalise(**made, block_size=shape.block_size)
        self.call = dataclasses.replace(bound.call, save_residuals=True)
        self.inputs = bound.inputs
        self.d_out = normal(shape.heads, shape.value_size or shape.size)
        self.outputs: Any = None
        self.space = {"forward": config.FORWARD, "backward": config.BACKWARD}

    @property
    def values(self) -> tuple[Any, Any, Any]:
        """Inputs, outputs as exact as they are known, cotangent."""
        return self.inputs, self.outputs, self.d_out

    def keep(self, exact: dict[str, Any]) -> None:
        """What forward gives is given to backward."""
        self.outputs = NativeSparseAttentionOutputs(exact["out"].astype(self.call.query.dtype), exact["lse"])

    def function(self, phase: str, module: Any, cfg: Any) -> Any:
        """Of `values`: a dict of arrays."""

        def run(inputs: Any, outputs: Any, d_out: Any) -> dict[str, Any]:
            if phase == "forward":
                found = module.forward(self.call, inputs, cfg)
            else:
                found = module.backward(self.call, inputs, outputs, NativeSparseAttentionOutputs(d_out), cfg)
            return {key: value for key, value in found._asdict().items() if value is not None}

        return jax.jit(run)

    def program(self, phase: str, cfg: Any) -> Any:
        """Compiled: a config of ours, or None for XLA."""
        shapes = self.inputs, OPERATION.output_specs(self.call), self.d_out
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
        if cfg is not None:
            return self.function(phase, kernel, cfg).lower(*shapes).compile()
        return self.function(phase, xla, xla_config.heuristic(self.call, target())).lower(*shapes).compile()

    def exact(self, phase: str) -> dict[str, Any]:
        """From the same numbers: the reference in float64 for small problems, XLA in float32 for large ones."""
        if self.name.startswith("numbers") or "--small" in sys.argv:
            inputs = type(self.inputs)(*(None if x is None else _wide(x) for x in self.inputs))
            if phase == "forward":
                found: Any = reference.forward(self.call, inputs)
            else:
                found = reference.backward(self.call, inputs, self.outputs, NativeSparseAttentionOutputs(_wide(self.d_out)))
            return {key: jnp.asarray(x, jnp.float32) for key, x in found._asdict().items() if x is not None}
        specs = {name: dataclasses.replace(getattr(self.call, name), dtype="float32") for name in OPERATION.differentiable}
        other = object.__new__(Problem)
        other.call = dataclasses.replace(self.call, **specs)
        run = other.function(phase, xla, xla_config.heuristic(other.call, target()))
        return run(*jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.float32), self.values))


def _wide(x: Any) -> Any:
    return np.asarray(x) if x.dtype == jnp.int32 else np.asarray(x.astype(jnp.float32), np.float64)


def _blocks(shape: Shape, bounds: Any, rng: Any) -> Any:
    """Every query's own block, the first one and others; -1 where a sequence has fewer."""
    token = np.arange(shape.length)
    own = (token - bounds[np.searchsorted(bounds, token, side="right") - 1]) // shape.block_size
    rows = (shape.batch, shape.length, shape.key_heads)
    if shape.chosen == "near":
        return np.broadcast_to((own[:, None] - np.arange(shape.slots))[None, :, None], (*rows, shape.slots)).astype(np.int32)
    blocks = int(own.max()) + 1
    found = np.full((*rows, shape.slots), -1, np.int32)
    count = min(shape.slots, blocks)
    for row in range(shape.batch):
        scores = rng.random((shape.length, shape.key_heads, blocks), np.float32)
        scores[:, :, 0] = 2
        np.put_along_axis(scores, np.broadcast_to(own[:, None, None], (shape.length, shape.key_heads, 1)), 3, axis=2)
        scores = np.where(np.arange(blocks) <= own[:, None, None], scores, -1)
        best = np.argpartition(-scores, count - 1, axis=2)[:, :, :count]
        found[row, :, :, :count] = np.where(np.take_along_axis(scores, best, axis=2) < 0, -1, best)
    return found


def times_of(program: Any, values: Any, count: int) -> list[float]:
    if jax.default_backend() == "gpu":
        return samples_of(program, values, count)
    start = time.perf_counter()
    jax.block_until_ready(program(*values))
    return [(time.perf_counter() - start) * 1000]


def plain(problem: Problem) -> dict[str, Any]:
    """Dense attention under the same mask in plain JAX, head by head: what one writes without such an operation."""
    shape, call = problem.shape, problem.call
    groups = shape.heads // shape.key_heads

    def one(query: Any, key: Any, value: Any, blocks: Any) -> Any:
        own = jnp.arange(shape.length) // shape.block_size
        seen = jnp.any(blocks[:, :, None] == jnp.arange(-(-shape.length // shape.block_size)), axis=1)[:, own]
        seen &= jnp.arange(shape.length)[None] <= jnp.arange(shape.length)[:, None]
        logits = jnp.einsum("td,jd->tj", query, key, preferred_element_type=jnp.float32) * call.softmax_scale
        weights = jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1).astype(value.dtype)
        return weights @ value

    @jax.checkpoint
    def head(arrays: Any) -> Any:
        return one(*arrays)

    def attend(query: Any, key: Any, value: Any, blocks: Any) -> Any:
        key, value, blocks = (jnp.repeat(x[0], groups, axis=1).swapaxes(0, 1) for x in (key, value, blocks))
        return jax.lax.map(head, (query[0].swapaxes(0, 1), key, value, blocks)).swapaxes(0, 1)[None]

    def forward(inputs: Any, outputs: Any, d_out: Any) -> Any:
        return attend(inputs.query, inputs.key, inputs.value, inputs.block_indices)

    def backward(inputs: Any, outputs: Any, d_out: Any) -> Any:
        def out(query: Any, key: Any, value: Any) -> Any:
            return attend(query, key, value, inputs.block_indices)

        _, pull = jax.vjp(out, inputs.query, inputs.key, inputs.value)
        return pull(d_out)

    return {"forward": jax.jit(forward), "both": jax.jit(backward)}


def fla(problem: Problem) -> dict[str, Any]:
    """flash-linear-attention's selected branch."""
    import torch
    from fla.ops.nsa.parallel import parallel_nsa

    shape, x = problem.shape, problem.inputs
    query, key, value = (torch.from_dlpack(array).clone().requires_grad_() for array in x[:3])
    blocks = torch.from_dlpack(x.block_indices).clone().long()
    gate = torch.ones(shape.batch, shape.length, shape.heads, device="cuda", dtype=query.dtype)
    d_out = torch.from_dlpack(problem.d_out).clone()

    def forward() -> Any:
        return parallel_nsa(
            query, key, value, g_slc=gate, block_indices=blocks, block_counts=shape.slots, block_size=shape.block_size,
            scale=problem.call.softmax_scale,
        )  # fmt: skip

    def both() -> Any:
        forward().backward(d_out)
        for array in (query, key, value):
            array.grad = None

    def inference() -> Any:
        with torch.no_grad():
            return forward()

    return {"forward": inference, "both": both}


def check_and_time(report: Report, problem: Problem, phase: str, cfg: Any, program: Any, exact: Any, heuristic: bool) -> None:
    name = "XLA" if cfg is None else knobs(cfg)
    got, again = jax.block_until_ready((program(*problem.values), program(*problem.values)))
    exact = {key: exact[key] for key in got}
    if "lse" in got:
        known = jnp.isfinite(exact["lse"])
        got["lse"], exact["lse"] = (jnp.where(known, x["lse"], 0) for x in (got, exact))
        again["lse"] = jnp.where(known, again["lse"], 0)
    errors = {key: float(value) for key, value in distances(got, exact).items()}
    equal = all(bool(jnp.array_equal(got[key], again[key])) for key in got)
    detail = " ".join(f"{key} {error:.1e}" for key, error in errors.items()) + ("" if equal else ", runs differ")
    if cfg is not None:
        right = equal and all(error < TOLERANCE[problem.shape.dtype][phase] for error in errors.values())
        report.check(f"{problem.name} {phase} {name}", right, detail)
    del got, again
    taken = times_of(program, problem.values, 2 if cfg is None else 7)
    median = statistics.median(taken)
    report.result["times"].append({
        "case": problem.name, "phase": phase, "name": name, "config": None if cfg is None else dataclasses.asdict(cfg),
        "heuristic": heuristic, "milliseconds": median, "spread": (max(taken) - min(taken)) / median, "errors": errors,
    })  # fmt: skip
    print(f"  {phase:8s} {'*' if heuristic else ' '}{name:24s} {median:8.4f} ms  {detail}", flush=True)
    if heuristic and jax.default_backend() == "gpu":
        kernels = samples_of(program, problem.values, 1, kernels=True)
        report.result["kernels"].append([problem.name, phase, kernels])
        print("      " + ", ".join(f"{each.removeprefix('native_sparse_attention_')[:24]} {ms:.4f}" for each, ms in kernels))


def run_phase(report: Report, problem: Problem, phase: str, options: argparse.Namespace, pool: Any) -> None:
    heuristic = problem.space[phase].heuristic(problem.call, target())
    found = problem.space[phase].search_space(problem.call, target())
    every = options.most < 0 or (problem.name.startswith("numbers") and not options.small)
    found = chosen_of(found, heuristic, len(found) if every else options.most)
    if "xla" not in options.skip and not problem.name.startswith("numbers"):
        found = [*found, None]
    programs = [pool.submit(problem.program, phase, cfg) for cfg in found]
    concurrent.futures.wait(programs)
    exact = problem.exact(phase)
    if phase == "forward":
        problem.keep(exact)
    for cfg, program in zip(found, programs, strict=True):
        if report.remaining() < 0:
            print("  out of time", flush=True)
            return
        try:
            check_and_time(report, problem, phase, cfg, program.result(), exact, cfg == heuristic)
        except Exception as error:  # noqa: BLE001 - a config that does not compile or run is a finding
            report.check(f"{problem.name} {phase} {cfg}", False, f"{type(error).__name__}: {str(error)[:300]}")
        report.save()


def run_peers(report: Report, problem: Problem, options: argparse.Namespace) -> None:
    shape = problem.shape
    simple = not problem.name.startswith("numbers") and not shape.sequences and report.remaining() > 0
    if simple and "plain" not in options.skip and shape.batch == 1 and shape.length <= 8192:
        try:
            for phase, program in plain(problem).items():
                report.peer(problem.name, "plain", phase, times_of(program, problem.values, 2))
        except Exception as error:  # noqa: BLE001 - what does not fit is a finding
            print(f"  plain: {type(error).__name__}: {str(error)[:300]}", flush=True)
    if simple and "fla" not in options.skip:
        try:
            for phase, program in fla(problem).items():
                report.peer(problem.name, "fla", phase, graph_times(program))
        except Exception as error:  # noqa: BLE001 - a peer that does not run is a finding
            print(f"  fla: {type(error).__name__}: {str(error)[:200]}", flush=True)


def run(name: str, description: str | None, make: Any, problems: Any, small: Any, peers: Any) -> int:
    """Exit code.

    Args:
        name: of the report.
        description: for `--help`.
        make: of a name and a shape: the problem.
        problems, small: shapes by name; `small` for `--small`.
        peers: of a report, a problem and the options: times others.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of the report")
    parser.add_argument("--only", default="")
    parser.add_argument("--most", type=int, default=5)
    parser.add_argument("--budget", type=float, default=140)
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--skip", default="", help="of xla and the peers")
    parser.add_argument("--small", action="store_true", help="tiny problems, on a CPU in Triton's interpreter")
    options = parser.parse_args()
    if jax.default_backend() != "gpu" and not options.small:
        print(f"needs a GPU or --small, JAX has {jax.devices()}")
        return 2
    report = Report(options.out, options.budget, name)
    print(json.dumps(report.result["versions"]), flush=True)
    problems = small if options.small else problems
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        for each in options.only.split(",") if options.only else problems:
            if report.remaining() < 0:
                break
            print(f"{each}, at {time.monotonic() - report.started:.0f} s", flush=True)
            try:
                problem = make(each, problems[each])
                for phase in PHASES:
                    run_phase(report, problem, phase, options, pool)
                peers(report, problem, options)
            except Exception as error:  # noqa: BLE001 - the next problem may run
                report.check(each, False, f"{type(error).__name__}: {str(error)[:300]}")
            report.save()
    return report.end()


if __name__ == "__main__":
    sys.exit(run("sparse", __doc__, Problem, PROBLEMS, SMALL, run_peers))
