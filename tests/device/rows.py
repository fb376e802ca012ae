"""Operations over rows on a real GPU: `layer_norm`, `rms_norm`, `softmax`, `rope`, `mean_pooling` in Triton.

    python tests/device/rows.py --out results

First numbers at many widths against the float64 references, equal runs, and offsets beyond 2^31 elements. Then, for the shapes of
the targets, configs of the search space: each is compared with XLA's result in float32 and timed (device time by CUPTI), beside
textbook jnp, our XLA platform, torch.compile and Liger where they can be imported. Prints tables, writes `rows.json` under
`--out` (or `$OUT`), exits with 1 if a number is wrong.

`--only softmax,rope`, `--budget` seconds after which nothing new is started (280), `--most` configs for each shape and phase (10;
0 = all), `--threads` that compile (4), `--skip numbers,sweep,peers`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import check_gpu
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.plugin import current_target

TOLERANCE = {"float32": 2e-5, "bfloat16": 8e-3, "float16": 1.5e-3}
NARROW = (1, 2, 7, 8, 33, 64, 100, 128, 200, 256, 513, 1000)
WIDTHS = (*NARROW, 1024, 3000, 4096, 4099, 8192, 12288, 16384, 20000, 32768, 40000, 131072)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: an operation, shapes of its arrays by name, and options."""

    operation: str
    shapes: dict[str, tuple[int, ...]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    float32: tuple[str, ...] = ()
    """Arrays that are float32 whatever the others are."""

    @property
    def name(self) -> str:
        return f"{self.operation} " + "x".join(map(str, next(iter(self.shapes.values()))))

    def arrays(self, seed: int, dtype: str = "bfloat16") -> dict[str, Any]:
        def make(key, name, shape):
            if name == "cu_seqlens":
                return jnp.asarray([0, 40000, 50000, 50256, 65536][: shape[0]], jnp.int32)
            if name == "where":
                return jax.random.bernoulli(key, 0.6, shape)
            return jax.random.normal(key, shape, jnp.float32 if name in self.float32 else dtype)

        keys = jax.random.split(jax.random.key(seed), len(self.shapes))
        return {name: make(key, name, shape) for key, (name, shape) in zip(keys, self.shapes.items(), strict=True)}


def norm(operation: str, rows: int, width: int) -> Problem:
    return Problem(operation, {"x": (rows, width), "scale": (width,), "offset": (width,)})


def rotary(layout: str, batch: int, length: int, query: int, key: int, width: int, **options: Any) -> Problem:
    def heads(count: int) -> tuple[int, ...]:
        return (batch, count, length, width) if layout == "BHTD" else (batch, length, count, width)

    shapes = {"query": heads(query), "key": heads(key), "cos": (length, width // 2), "sin": (length, width // 2)}
    return Problem("rope", shapes, {"layout": layout, **options}, ("cos", "sin"))


TIMED = (
    norm("layer_norm", 16384, 4096),
    norm("layer_norm", 131072, 128),
    norm("layer_norm", 8192, 8192),
    norm("layer_norm", 8192, 16384),
    norm("layer_norm", 2048, 32768),
    Problem("softmax", {"x": (32768, 4096)}),
    Problem("softmax", {"x": (131072, 128)}),
    Problem("softmax", {"x": (1024, 131072)}),
    rotary("BTHD", 4, 8192, 32, 8, 128),
    rotary("BHTD", 4, 8192, 32, 8, 128),
    Problem("mean_pooling", {"x": (8, 8192, 32, 128)}),
    Problem("mean_pooling", {"x": (1, 65536, 32, 128), "cu_seqlens": (5,)}),
)


def checked_problems(operation: str) -> list[Problem]:
    """Small problems over many widths and flags."""
    if operation in ("layer_norm", "rms_norm"):
        return [norm(operation, 13, width) for width in WIDTHS] + [
            Problem(operation, {"x": (37, 640)}), Problem(operation, {"x": (70001, 128), "scale": (128,)}),
            Problem(operation, {"x": (3, 5, 512), "scale": (512,)}, {"scale_offset": 1.0}),
        ]  # fmt: skip
    if operation == "softmax":
        return [Problem("softmax", {"x": (13, width)}, {"scale": 0.7}) for width in WIDTHS] + [
            Problem("softmax", {"x": (4, 3, 9, width), "where": where})
            for width in (100, 4096, 40000)
            for where in ((4, 3, 9, width), (4, 1, 9, width), (9, 1), (4, 1, 1, 1), (1, 3, 1, width))
        ]
    if operation == "rope":
        rope = functools.partial(rotary, batch=3, length=77, query=6, key=2)
        return [
            rope(layout, width=width, interleaved=interleaved)
            for layout in ("BTHD", "BHTD")
            for width in (2, 26, 64, 128, 256)
            for interleaved in (False, True)
        ]
    dense = [(3, length, 5, width) for length in (1, 255, 256, 257, 5000) for width in (7, 128)]
    return [Problem("mean_pooling", {"x": shape}) for shape in dense] + [
        Problem("mean_pooling", {"x": (1, 65600, 2, 16), "cu_seqlens": (count,)}) for count in (1, 2, 5)
    ]


class Prepared:
    """A problem with its canonical call, inputs on the device, cotangents, and what XLA makes of them in float32."""

    def __init__(self, problem: Problem, dtype: str, seed: int = 0) -> None:
        self.operation = importlib.import_module(f"ejkernel.operations.{problem.operation}.interface").OPERATION
        self.kernel = importlib.import_module(f"ejkernel_triton.{problem.operation}.kernel")
        self.config = importlib.import_module(f"ejkernel_triton.{problem.operation}.config")
        self.reference = importlib.import_module(f"ejkernel.operations.{problem.operation}.reference")
        self.xla = importlib.import_module(f"ejkernel_xla.{problem.operation}.kernel")
        bound = self.operation.canonicalise(**problem.arrays(seed, dtype), **problem.options)
        self.call = dataclasses.replace(bound.call, save_residuals=True)
        self.light = bound.call
        self.inputs = bound.inputs
        public = self.operation.public(self.call)
        specs = self.operation.output_specs(self.call)._asdict()
        keys = jax.random.split(jax.random.key(seed + 1), len(public))
        self.cotangents = self.operation.Outputs(**{
            name: jax.random.normal(key, specs[name].shape, specs[name].dtype) for key, name in zip(keys, public, strict=True)
        })  # fmt: skip
        self.public = public
        self.floors: dict[str, float] = {}

    def outputs(self) -> Any:
        return jax.jit(lambda inputs: self.xla.forward(self.call, inputs, None))(self.inputs)

    def exact(self) -> dict[str, np.ndarray]:
        """Results and gradients in float64 on the host; `floors` gets the magnitude that d_x is a difference of."""
        wide = [jax.tree.map(_wide, values) for values in (self.inputs, self.cotangents)]
        outputs = self.reference.forward(self.call, wide[0])
        gradients = self.reference.backward(self.call, wide[0], outputs, wide[1])
        if "rstd" in outputs._fields:
            weight = 1.0 if wide[0].scale is None else wide[0].scale[0] + self.call.scale_offset
            self.floors["d_x"] = float(np.linalg.norm(wide[1].out * weight * outputs.rstd[..., None]))
        return self.named(outputs, gradients)

    def named(self, outputs: Any, gradients: Any) -> dict[str, Any]:
        found = {name: getattr(outputs, name) for name in self.public}
        return found | {f"d_{key}": value for key, value in gradients._asdict().items() if value is not None}

    def ours(self, forward: Any = None, backward: Any = None) -> dict[str, Any]:
        """Results and gradients of the kernels."""
        target = current_target()
        forward = forward or self.config.FORWARD.heuristic(self.call, target)
        backward = backward or self.config.BACKWARD.heuristic(self.call, target)

        @jax.jit
        def run(inputs, cotangents):
            outputs = self.kernel.forward(self.call, inputs, forward)
            return outputs, self.kernel.backward(self.call, inputs, outputs, cotangents, backward)

        return self.named(*run(self.inputs, self.cotangents))


def _wide(value: Any) -> np.ndarray:
    value = np.asarray(value)
    return value if value.dtype in (np.bool_, np.int32) else value.astype(np.float64)


class Rows:
    """One row per check."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, check: str, passed: bool, detail: str) -> None:
        self.rows.append({"check": check, "passed": bool(passed), "detail": detail})
        if not passed:
            print(f"  FAILED {check}: {detail}", flush=True)

    def compare(
        self, check: str, got: dict[str, Any], wanted: dict[str, Any], limit: float, floors: dict[str, float] | None = None
    ) -> None:
        errors = {key: _relative(got[key], wanted[key], (floors or {}).get(key, 0.0)) for key in wanted}
        self.add(check, all(e <= limit for e in errors.values()), " ".join(f"{k} {e:.1e}" for k, e in errors.items()))


def _relative(got: Any, wanted: Any, floor: float = 0.0) -> float:
    """Relative L2 error, NaN where anything is; on the device unless `wanted` is on the host."""
    if isinstance(wanted, np.ndarray):
        return check_gpu.relative(got, wanted, floor)
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm(got - wanted) / jnp.maximum(jnp.linalg.norm(wanted), 1e-30))


def check_numbers(operation: str, rows: Rows, budget: float) -> None:
    for index, problem in enumerate(checked_problems(operation)):
        for dtype in ("bfloat16", "float32") if index % 3 == 0 else ("bfloat16",):
            if check_gpu.remaining(budget) < 0:
                return
            prepared = Prepared(problem, dtype, index)
            got = prepared.ours()
            wanted = prepared.exact()
            rows.compare(f"{problem.name} {problem.options or ''} {dtype}", got, wanted, TOLERANCE[dtype], prepared.floors)
    timed = next(problem for problem in (*TIMED, norm("rms_norm", 16384, 4096)) if problem.operation == operation)
    prepared = Prepared(timed, "bfloat16")
    first = jax.tree.map(np.asarray, prepared.ours())
    equal = all(
        all(
            np.array_equal(first[key].view(np.uint16), np.asarray(value).view(np.uint16))
            for key, value in prepared.ours().items()
        )
        for _ in range(2)
    )
    rows.add(f"{timed.name}: three equal runs", equal, "bit by bit")


def check_large(operation: str, rows: Rows) -> None:
    """More than 2^31 elements, the last rows of which show whether offsets are 64 bits wide."""
    if operation not in ("softmax", "layer_norm"):
        return
    kernel = importlib.import_module(f"ejkernel_triton.{operation}.kernel")
    config = importlib.import_module(f"ejkernel_triton.{operation}.config")
    xla = importlib.import_module(f"ejkernel_xla.{operation}.kernel")
    interface = importlib.import_module(f"ejkernel.operations.{operation}.interface")
    x = jax.jit(lambda: jax.random.normal(jax.random.key(0), (560_000, 4096), jnp.bfloat16))()

    def run(module, x, configs):
        call = dataclasses.replace(interface.OPERATION.canonicalise(x).call, save_residuals=True)
        inputs = interface.OPERATION.Inputs(x)
        choose = [c.heuristic(call, current_target()) if c else None for c in configs]
        outputs = module.forward(call, inputs, choose[0])
        gradients = module.backward(call, inputs, outputs, interface.OPERATION.Outputs(x), choose[1])
        return outputs.out[-64:], gradients.x[-64:]

    got = jax.jit(lambda x: run(kernel, x, (config.FORWARD, config.BACKWARD)))(x)
    wanted = jax.jit(lambda x: run(xla, x, (None, None)))(x[-64:])
    errors = [_relative(*pair) for pair in zip(got, wanted, strict=True)]
    rows.add(f"{operation} beyond 2^31 elements", max(errors) < 8e-3, " ".join(f"{e:.1e}" for e in errors))


# Speed


@dataclasses.dataclass
class Candidate:
    """One function of the prepared input sets, named."""

    name: str
    phase: str
    function: Callable[..., Any]
    chosen: bool = False
    wanted: Any = None


def moved_bytes(prepared: Prepared, phase: str) -> int:
    """What has to pass memory; the gradients of cos and sin are not asked for."""
    asked = "forward" if prepared.operation.name == "rope" else phase
    return prepared.operation.cost(prepared.light, asked).bytes


def gradients_of_interest(prepared: Prepared, gradients: Any) -> list[Any]:
    left_out = ("cos", "sin")
    return [value for name, value in gradients._asdict().items() if value is not None and name not in left_out]


def candidates(prepared: Prepared, most: int) -> list[Candidate]:
    target, found = current_target(), []

    def forward(module, cfg, call):
        return lambda inputs, outputs, cotangents: [
            getattr(module.forward(call, inputs, cfg), name) for name in prepared.public
        ]

    def backward(module, cfg, call):
        return lambda inputs, outputs, cotangents: gradients_of_interest(
            prepared, module.backward(call, inputs, outputs, cotangents, cfg)
        )

    for phase, make, call in (("forward", forward, prepared.light), ("backward", backward, prepared.call)):
        space = prepared.config.FORWARD if phase == "forward" else prepared.config.BACKWARD
        heuristic, configs = space.heuristic(call, target), space.search_space(call, target)
        for cfg in check_gpu.chosen_of(configs, heuristic, most or len(configs)):
            found.append(Candidate(check_gpu.knobs(cfg), phase, make(prepared.kernel, cfg, call), cfg == heuristic))
        found.append(Candidate("our XLA", phase, make(prepared.xla, None, call)))
        found.append(Candidate("textbook jnp", phase, textbook(prepared, phase)))
    return found


def textbook(prepared: Prepared, phase: str) -> Callable[..., Any]:
    """What a user would write, differentiated by JAX."""
    call = prepared.call

    def norm_of(x, scale, offset):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, -1, keepdims=True) if call_name == "layer_norm" else 0.0
        rstd = jax.lax.rsqrt(jnp.mean((wide - mean) ** 2, -1, keepdims=True) + call.epsilon)
        return ((wide - mean) * rstd * scale[0] + offset[0]).astype(x.dtype)

    def softmax_of(x):
        return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)

    def rope_of(query, key, cos, sin):
        def rotate(x):
            first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
            c, s = (jnp.expand_dims(value, 1 if call.heads_first else 2) for value in (cos, sin))
            return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1).astype(x.dtype)

        return rotate(query), rotate(key)

    def pooling_of(x, cu_seqlens=None):
        if cu_seqlens is None:
            return jnp.mean(x.astype(jnp.float32), axis=1, keepdims=True).astype(x.dtype)
        ids = jnp.searchsorted(cu_seqlens[0], jnp.arange(x.shape[1]), side="right") - 1
        total = jax.ops.segment_sum(x[0].astype(jnp.float32), ids, cu_seqlens.shape[1] - 1, indices_are_sorted=True)
        return (total / jnp.diff(cu_seqlens[0])[:, None, None]).astype(x.dtype)[None]

    call_name = prepared.operation.name
    function = {"softmax": softmax_of, "rope": rope_of, "mean_pooling": pooling_of}.get(call_name, norm_of)
    moving = {"rope": 2, "softmax": 1, "mean_pooling": 1}.get(call_name, 3)

    def run(inputs, outputs, cotangents):
        given = [value for value in inputs if value is not None]
        if phase == "forward":
            return jax.tree.leaves(function(*given))
        _, pull = jax.vjp(lambda *free: function(*free, *given[moving:]), *given[:moving])
        grads = [getattr(cotangents, name) for name in prepared.public]
        return list(pull(tuple(grads) if len(grads) > 1 else grads[0]))

    return run


def time_problem(problem: Problem, rows: Rows, options: argparse.Namespace) -> list[dict[str, Any]]:
    prepared = Prepared(problem, "bfloat16")
    set_bytes = sum(value.nbytes for value in jax.tree.leaves((prepared.inputs, prepared.cotangents)))
    sets = []
    for seed in range(max(1, min(8, -(-300_000_000 // set_bytes)))):
        one = Prepared(problem, "bfloat16", 10 * seed)
        sets.append((one.inputs, one.outputs(), one.cotangents))
    found = candidates(prepared, options.most)
    wanted = {c.phase: jax.jit(c.function)(*map(_float32, sets[0])) for c in found if c.name == "textbook jnp"}

    def compiled(candidate):
        single = jax.jit(candidate.function).lower(*sets[0]).compile()
        several = jax.jit(lambda sets: [candidate.function(*values) for values in sets]).lower(sets).compile()
        return single, several

    results = []
    share = (options.budget - (time.monotonic() - check_gpu.started)) / max(1, options.left)
    deadline = time.monotonic() + max(share, 3)
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        order = sorted(found, key=lambda c: not (c.chosen or c.name in ("our XLA", "textbook jnp")))
        while order and time.monotonic() < deadline:
            batch, order = order[: options.threads], order[options.threads :]
            for candidate, (single, several) in zip(batch, pool.map(compiled, batch), strict=True):
                got = single(*sets[0])
                rows.compare(
                    f"{problem.name} {candidate.phase} {candidate.name}",
                    {str(i): value for i, value in enumerate(got)},
                    {str(i): value for i, value in enumerate(wanted[candidate.phase])},
                    2e-2,
                )
                results.append(timed(problem, prepared, candidate, several, sets))
    for phase in ("forward", "backward"):
        ranked = sorted((r for r in results if r["phase"] == phase and r["ours"]), key=lambda r: r["microseconds"])
        best = [(row["name"], round(row["fraction"], 3)) for row in ranked[:3]]
        print(f"  best of {len(ranked)} {phase} {problem.name}: {best}", flush=True)
    return results


def _float32(values: Any) -> Any:
    def one(value):
        return value.astype(jnp.float32) if jnp.issubdtype(value.dtype, jnp.floating) else value

    return jax.tree.map(one, values)


def timed(problem: Problem, prepared: Prepared, candidate: Candidate, program: Any, sets: list[Any]) -> dict[str, Any]:
    from jax.experimental.mosaic.gpu import profiler

    _, milliseconds = profiler.Cupti(finalize=False).measure(program, iterations=5)(sets)
    samples = [value / 1e3 / len(sets) for value in (milliseconds if isinstance(milliseconds, list) else [milliseconds])]
    return result_row(problem.name, candidate.phase, candidate.name, samples, moved_bytes(prepared, candidate.phase), {
        "chosen": candidate.chosen, "ours": candidate.name not in ("our XLA", "textbook jnp"), "clock": "device",
    })  # fmt: skip


def result_row(problem: str, phase: str, name: str, samples: list[float], moved: int, more: dict[str, Any]) -> dict[str, Any]:
    median = statistics.median(samples)
    row = {
        "problem": problem, "phase": phase, "name": name, "microseconds": median * 1e6,
        "spread": (max(samples) - min(samples)) / median, "fraction": moved / check_gpu.BANDWIDTH / median, **more,
    }  # fmt: skip
    mark = "*" if more.get("chosen") else " "
    print(f"  {problem:34s} {phase:8s} {mark}{name:62s} {row['microseconds']:9.1f} us  {row['fraction']:.3f}", flush=True)
    return row


# Peers


def torch_functions() -> dict[str, dict[str, Callable[..., Any]]]:
    """Functions of torch tensors by operation and peer."""
    import torch

    functions = torch.nn.functional

    def rope(query, key, cos, sin):
        def rotate(x):
            first, second = x.chunk(2, dim=-1)
            return torch.cat([first * c - second * s, second * c + first * s], dim=-1).to(x.dtype)

        c, s = cos[None, :, None], sin[None, :, None]
        return rotate(query), rotate(key)

    found = {
        "layer_norm": {"torch.compile": torch.compile(lambda x, s, o: functions.layer_norm(x, x.shape[-1:], s, o, 1e-6))},
        "softmax": {"torch.compile": torch.compile(lambda x: torch.softmax(x, -1))},
        "rope": {"torch.compile": torch.compile(rope)},
        "mean_pooling": {"torch.compile": torch.compile(lambda x: x.mean(1))},
    }
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        found["layer_norm"]["Liger"] = lambda x, s, o: LigerLayerNormFunction.apply(x, s, o, 1e-6)
        found["softmax"]["Liger"] = LigerSoftmaxFunction.apply
    return found


def time_peers(problem: Problem, peers: dict[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """Time torch functions by events around a queue that the host fills ahead of time."""
    import torch
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # backward is timed again and again over the same forward
    if "cu_seqlens" in problem.shapes or problem.options.get("layout") == "BHTD":
        return []
    prepared, rows = Prepared(problem, "bfloat16"), []
    for name, function in peers.items():
        count = 4
        sets = []
        for _ in range(count):
            arrays = [
                torch.randn(*shape, device="cuda", dtype=torch.float32 if key in problem.float32 else torch.bfloat16)
                for key, shape in problem.shapes.items()
            ]
            sets.append([a if a.dtype == torch.float32 else a.requires_grad_() for a in arrays])
        outs = [function(*values) for values in sets]
        outs = [out if isinstance(out, tuple) else (out,) for out in outs]
        grads = [tuple(torch.randn_like(o) for o in out) for out in outs]

        def forward(i, function=function, sets=sets):
            with torch.no_grad():
                return function(*sets[i])

        def backward(i, sets=sets, outs=outs, grads=grads):
            return torch.autograd.grad(outs[i], [a for a in sets[i] if a.requires_grad], grads[i], retain_graph=True)

        for phase, call in (("forward", forward), ("backward", backward)):
            samples = []
            for repeat in range(6):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(20_000_000)
                begin.record()
                for i in range(count):
                    call(i)
                end.record()
                torch.cuda.synchronize()
                if repeat:
                    samples.append(begin.elapsed_time(end) / 1e3 / count)
            moved = moved_bytes(prepared, phase)
            rows.append(result_row(problem.name, phase, name, samples, moved, {"ours": False, "clock": "events"}))
        del sets, outs, grads
        torch.cuda.empty_cache()
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of rows.json")
    parser.add_argument("--only", default="", help="operations, comma separated")
    parser.add_argument("--budget", type=float, default=280, help="seconds after which nothing new is started")
    parser.add_argument("--most", type=int, default=10, help="configs for each shape and phase; 0 = all")
    parser.add_argument("--threads", type=int, default=4, help="threads that compile")
    parser.add_argument("--skip", default="", help="of numbers,sweep,peers")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    operations = [one for one in options.only.split(",") if one] or [
        "layer_norm",
        "softmax",
        "rope",
        "mean_pooling",
        "rms_norm",
    ]
    skip, rows, times = set(options.skip.split(",")), Rows(), []
    versions = check_gpu.versions()
    print(json.dumps(versions), flush=True)

    def save(stage: str) -> None:
        print(f"[{stage}: done at {time.monotonic() - check_gpu.started:.0f} s]", flush=True)
        folder = pathlib.Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rows.json").write_text(json.dumps({"versions": versions, "checks": rows.rows, "times": times}, indent=1))

    if "numbers" not in skip:
        for operation in operations:
            check_numbers(operation, rows, options.budget * 0.3)
            check_large(operation, rows)
            save(f"numbers of {operation}")
    problems = [problem for problem in TIMED if problem.operation in operations]
    reserve = 0 if "peers" in skip else 45
    options.budget -= reserve
    for index, problem in enumerate(problems if "sweep" not in skip else ()):
        options.left = len(problems) - index
        times += time_problem(problem, rows, options)
        save(problem.name)
    options.budget += reserve
    if "peers" not in skip and importlib.util.find_spec("torch"):
        peers = torch_functions()
        for problem in problems:
            if check_gpu.remaining(options.budget) > 5:
                times += time_peers(problem, peers[problem.operation])
        save("peers")
    wrong = [row for row in rows.rows if not row["passed"]]
    print(f"{len(rows.rows)} checks, {len(wrong)} wrong")
    for row in wrong:
        print(f"  {row['check']}: {row['detail']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
