"""Check the GPU plugins on a real GPU: numbers against float64, every transformation, determinism, memory, then speed.

    python tests/device/check_gpu.py --out results

Prints tables and writes `check_gpu.json`. Exits with 1 if any number is wrong. README.md beside this says how to run it
elsewhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel.errors import NoKernelError
from ejkernel.operations.rms_norm import reference
from ejkernel.operations.rms_norm.interface import OPERATION, RmsNormInputs, RmsNormOutputs
from ejkernel.plugin import current_target

BANDWIDTH = 4.3e12
"""Bytes per second of a copy on one H200, read and write counted."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 1e-3}
"""Relative L2 error; the low-precision dtypes are limited by the rounding of the result."""
WIDTHS = (
    1,
    2,
    3,
    7,
    8,
    16,
    31,
    33,
    64,
    100,
    128,
    200,
    256,
    512,
    513,
    1000,
    1024,
    2048,
    3000,
    4096,
    4099,
    8192,
    12288,
    16384,
    40000,
)
FEW_WIDTHS = (1, 33, 128, 1000, 4096, 8192)
SHAPES = ((16384, 4096), (131072, 128), (8192, 8192))
started = time.monotonic()


def remaining(budget: float) -> float:
    return budget - (time.monotonic() - started)


# Numbers


def loss_parts(x, scale, offset, grad, *, platform, **options):
    out, pullback = jax.vjp(lambda x, s, o: ejkernel.rms_norm(x, s, o, platform=platform, **options), x, scale, offset)
    return out, *pullback(grad)


def exact(x, scale, offset, grad, *, epsilon=1e-6, scale_offset=0.0):
    """Output, gradients, and the magnitude that d_x is a difference of; NumPy float64."""
    wide = [None if v is None else np.asarray(v, np.float64) for v in (x, scale, offset, grad)]
    bound = OPERATION.canonicalise(x, scale, offset, epsilon=epsilon, scale_offset=scale_offset)
    call = dataclasses.replace(bound.call, save_residuals=True)
    inputs = RmsNormInputs(wide[0], *(None if v is None else v[None] for v in wide[1:3]))
    outputs = reference.forward(call, inputs)
    got = reference.backward(call, inputs, outputs, RmsNormOutputs(wide[3]))
    weight = 1.0 if scale is None else wide[1] + scale_offset
    uncancelled = np.linalg.norm(wide[3] * weight * outputs.rstd[..., None])
    flat = [None if v is None else v[0] for v in (got.scale, got.offset)]
    return (outputs.out, got.x, *flat), uncancelled


def in_float32(values: Any) -> Any:
    """Of arrays, those of floats in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, values)


def relative(got, wanted, floor=0.0):
    """Relative L2 error; NaN where anything is NaN."""
    got = np.asarray(got, np.float64)
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), floor, 1e-30))


def arrays(shape, dtype, seed, scale=True, offset=False):
    rng = np.random.default_rng(seed)

    def make(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return make(*shape), make(shape[-1]) if scale else None, make(shape[-1]) if offset else None, make(*shape)


class Numbers:
    """Collects one row per check: name, errors or verdict, passed."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, passed: bool | None, detail: str) -> None:
        self.rows.append({"platform": self.platform, "check": name, "passed": passed, "detail": detail})
        if passed is not True:
            print(f"  {self.platform:7s} {'REFUSED' if passed is None else 'FAILED '} {name}: {detail}", flush=True)

    def compare(self, name: str, shape, dtype: str, *, scale=True, offset=False, **options) -> None:
        values = arrays(shape, dtype, len(self.rows), scale, offset)
        run = jax.jit(functools.partial(loss_parts, platform=self.platform, **options))
        try:
            got = run(*values)
        except NoKernelError as refusal:
            self.add(name, None, next(line.strip() for line in str(refusal).splitlines() if self.platform in line.split()))
            return
        wanted, floor = exact(*values, **options)
        floors = (0.0, floor, 0.0, 0.0)
        errors = {
            key: relative(g, w, f)
            for key, g, w, f in zip(("out", "d_x", "d_scale", "d_offset"), got, wanted, floors, strict=True)
            if w is not None
        }
        passed = all(error <= TOLERANCE[dtype] for error in errors.values())
        self.add(name, passed, " ".join(f"{key} {error:.1e}" for key, error in errors.items()))


def check_numbers(platform: str) -> list[dict[str, Any]]:
    numbers = Numbers(platform)
    for width in WIDTHS:
        numbers.compare(f"width {width} bfloat16", (3, 13, width), "bfloat16", offset=width % 2 == 0, epsilon=1e-5)
    for dtype, width in itertools.product(("float32", "float16"), FEW_WIDTHS):
        numbers.compare(f"width {width} {dtype}", (37, width), dtype, offset=True)
    numbers.compare("scale_offset", (5, 7, 256), "float32", scale_offset=1.0)
    numbers.compare("no parameters", (129, 384), "float32", scale=False)
    numbers.compare("offset only", (129, 384), "float32", scale=False, offset=True)
    numbers.compare("one row", (1, 640), "float32")
    numbers.compare("no rows", (0, 640), "float32")
    numbers.compare("rows 200003 x 16", (200003, 16), "float32", offset=True)
    numbers.compare("rows 70001 x 128", (70001, 128), "bfloat16")
    check_mixed(numbers)
    check_vmap(numbers)
    check_determinism(numbers)
    check_offsets(numbers)
    return numbers.rows


def check_mixed(numbers: Numbers) -> None:
    """Parameters of another dtype than x."""
    x, scale, _, grad = arrays((50, 512), "bfloat16", 5)
    scale = scale.astype(jnp.float32)
    got = jax.jit(functools.partial(loss_parts, platform=numbers.platform))(x, scale, None, grad)
    wanted, floor = exact(x, scale, None, grad)
    errors = [relative(got[0], wanted[0]), relative(got[1], wanted[1], floor), relative(got[2], wanted[2])]
    numbers.add("float32 scale, bfloat16 x", max(errors) < 6e-3 and got[2].dtype == jnp.float32, f"{max(errors):.1e}")


def check_vmap(numbers: Numbers) -> None:
    """Folded batches against a loop of references; parameters shared and one per member."""
    x, _, _, grad = arrays((6, 9, 5, 320), "float32", 7)
    scales = jnp.asarray(np.random.default_rng(8).standard_normal((6, 320)), jnp.float32)
    for name, in_axis, scale in (("shared", None, scales[0]), ("per member", 0, scales)):
        run = jax.vmap(functools.partial(loss_parts, platform=numbers.platform), (0, in_axis, None, 0))
        got = jax.jit(run)(x, scale, None, grad)
        members = [exact(x[i], scales[0] if in_axis is None else scales[i], None, grad[i])[0] for i in range(6)]
        errors = [relative(got[k], np.stack([member[k] for member in members])) for k in range(3)]
        numbers.add(f"vmap, parameters {name}", max(errors) < 1e-5, " ".join(f"{e:.1e}" for e in errors))


def check_determinism(numbers: Numbers) -> None:
    for shape in ((4096, 1024), (131072, 128)):
        values = arrays(shape, "bfloat16", 11, offset=True)
        run = jax.jit(functools.partial(loss_parts, platform=numbers.platform))
        first = [np.asarray(v).view(np.uint16) for v in run(*values)]
        equal = sum(
            all(np.array_equal(a, np.asarray(b).view(np.uint16)) for a, b in zip(first, run(*values), strict=True))
            for _ in range(30)
        )
        numbers.add(f"30 equal runs {shape}", equal == 30, f"{equal} of 30 equal bit by bit")


def check_offsets(numbers: Numbers) -> None:
    """More than 2^31 elements: the last rows show whether offsets are 64 bits wide."""
    rows, width = 560_000, 4096
    x = jax.jit(
        lambda: jnp.sin(jax.lax.iota(jnp.int32, rows).astype(jnp.float32))[:, None] * jnp.cos(jnp.arange(width) * 0.37)
    )()
    x = x.astype(jnp.bfloat16)
    scale = jnp.ones((width,), jnp.bfloat16)
    out, d_x, d_scale, _ = jax.jit(functools.partial(loss_parts, platform=numbers.platform))(x, scale, None, x)
    tail = [np.asarray(v[-64:]).astype(np.float64) for v in (x, out, d_x)]
    rstd = 1 / np.sqrt(np.mean(tail[0] ** 2, -1, keepdims=True) + 1e-6)
    normalised = tail[0] * rstd
    wanted = rstd * (tail[0] - normalised * np.mean(tail[0] * normalised, -1, keepdims=True))
    errors = [relative(tail[1], normalised), relative(tail[2], wanted, np.linalg.norm(tail[0] * rstd))]
    passed = max(errors) < 6e-3 and bool(jnp.isfinite(d_scale).all())
    numbers.add(f"{rows} x {width}: beyond 2^31 elements", passed, " ".join(f"{e:.1e}" for e in errors))


# Speed


def device_seconds(function, sets, repeats: int) -> list[float]:
    """Device time of one call: a program that calls once per input set, by CUPTI."""
    from jax.experimental.mosaic.gpu import profiler

    program = jax.jit(lambda sets: [function(*values) for values in sets])
    _, times = profiler.Cupti(finalize=False).measure(program, iterations=repeats)(sets)
    times = times if isinstance(times, list) else [times]
    return [milliseconds / 1e3 / len(sets) for milliseconds in times]


def wall_seconds(function, sets, repeats: int, queued: int = 5) -> list[float]:
    """Wall time of one call, in a queue of so many programs that call once per input set."""
    program = jax.jit(lambda sets: [function(*values) for values in sets])
    jax.block_until_ready(program(sets))
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready([program(sets) for _ in range(queued)])
        samples.append((time.perf_counter() - begin) / queued / len(sets))
    return samples


def seconds(function, sets, repeats: int = 7) -> tuple[list[float], str]:
    try:
        return device_seconds(function, sets, repeats), "device"
    except (RuntimeError, TypeError) as error:
        print(f"  CUPTI: {error}; wall time instead", flush=True)
        return wall_seconds(function, sets, repeats), "wall"


def timed(name: str, phase: str, shape, function, sets) -> dict[str, Any]:
    samples, clock = seconds(function, sets)
    rows, width = shape
    moved = (2 if phase == "forward" else 3) * rows * width * 2
    median = statistics.median(samples)
    row = {
        "name": name, "phase": phase, "shape": list(shape), "clock": clock, "microseconds": median * 1e6,
        "spread": (max(samples) - min(samples)) / median, "terabytes_per_second": moved / median / 1e12,
        "fraction": moved / BANDWIDTH / median,
    }  # fmt: skip
    print(
        f"  {phase:8s} {rows:6d} x {width:<5d} {name:34s} {row['microseconds']:8.1f} us"
        f"  {row['terabytes_per_second']:5.2f} TB/s  {row['fraction']:.2f} of {BANDWIDTH / 1e12} TB/s  spread {row['spread']:.2f}",
        flush=True,
    )
    return row


def input_sets(shape):
    """Enough sets that a round does not fit into the L2 cache, on the device."""
    count = max(4, -(-400_000_000 // (shape[0] * shape[1] * 6)))
    keys = jax.random.split(jax.random.key(0), count)

    @jax.jit
    def make(key):
        kx, ks, kg = jax.random.split(key, 3)
        return (
            jax.random.normal(kx, shape, jnp.bfloat16),
            jax.random.normal(ks, shape[1:], jnp.bfloat16),
            jax.random.normal(kg, shape, jnp.bfloat16),
        )

    return [make(key) for key in keys]


def time_platforms(platforms) -> list[dict[str, Any]]:
    rows = []
    for shape in SHAPES:
        sets = input_sets(shape)
        for platform in platforms:
            norm = functools.partial(ejkernel.rms_norm, platform=platform)
            rows.append(timed(platform, "forward", shape, lambda x, s, g, norm=norm: norm(x, s), sets))
            pull = jax.jit(lambda x, s, norm=norm: jax.vjp(norm, x, s)[1])
            pulled = [(pull(x, s), g) for x, s, g in sets]
            rows.append(timed(platform, "backward", shape, lambda pullback, g: pullback(g), pulled))
    return rows


def sweep(platform: str, budget: float) -> list[dict[str, Any]]:
    """Time configs of the search space, the implementation called directly."""
    kernel = importlib.import_module(f"ejkernel_{platform}.rms_norm.kernel")
    config = importlib.import_module(f"ejkernel_{platform}.rms_norm.config")
    target, rows = current_target(), []
    for shape in SHAPES:
        sets = input_sets(shape)
        x, scale, _ = sets[0]
        call = dataclasses.replace(OPERATION.canonicalise(x, scale).call, save_residuals=True)
        light = dataclasses.replace(call, save_residuals=False)

        def forward(x, s, g, cfg, call=light):
            return kernel.forward(call, RmsNormInputs(x, s[None]), cfg).out

        def backward(x, s, g, rstd, cfg, call=call):
            return kernel.backward(call, RmsNormInputs(x, s[None]), RmsNormOutputs(None, rstd), RmsNormOutputs(g), cfg)

        rstd = jax.jit(lambda x: jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1) + 1e-6))
        wider = [(*values, rstd(values[0])) for values in sets]
        for phase, function, space, values in (
            ("forward", forward, config.FORWARD, sets), ("backward", backward, config.BACKWARD, wider)
        ):  # fmt: skip
            found = []
            for cfg in chosen_of(space.search_space(call, target), space.heuristic(call, target), 16):
                if remaining(budget) < 0:
                    break
                found.append(timed(f"{platform} {knobs(cfg)}", phase, shape, functools.partial(function, cfg=cfg), values))
            rows += found
            if found:
                best = min(found, key=lambda row: row["microseconds"])
                print(f"  best of {len(found)}: {best['name']}; heuristic: {knobs(space.heuristic(call, target))}", flush=True)
    return rows


def knobs(cfg: Any) -> str:
    return " ".join(f"{key[:9]}={value}" for key, value in dataclasses.asdict(cfg).items())


def chosen_of(space, heuristic, most: int):
    """The heuristic's config and a fixed random sample of the others."""
    others = [cfg for cfg in space if cfg != heuristic]
    return [heuristic, *random.Random(0).sample(others, min(most, len(others)))]


def time_torch(compiled: bool) -> list[dict[str, Any]]:
    """torch's own RMSNorm on the same shapes, by events around a queue that the host fills ahead of time."""
    import torch
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # the backward pass is timed again and again over the same forward pass
    norm = torch.nn.functional.rms_norm
    function = torch.compile(norm) if compiled else norm
    name, rows = "torch.compile" if compiled else "torch", []
    for shape in SHAPES:
        count = max(4, -(-400_000_000 // (shape[0] * shape[1] * 6)))

        def make(*dims):
            return torch.randn(*dims, device="cuda", dtype=torch.bfloat16)

        sets = [(make(*shape).requires_grad_(), make(shape[1]).requires_grad_(), make(*shape)) for _ in range(count)]
        outs = [function(x, (shape[1],), s, 1e-6) for x, s, _ in sets]
        calls = {
            "forward": lambda i, sets=sets, shape=shape: function(sets[i][0].detach(), (shape[1],), sets[i][1].detach(), 1e-6),
            "backward": lambda i, sets=sets, outs=outs: torch.autograd.grad(
                outs[i], sets[i][:2], sets[i][2], retain_graph=True
            ),
        }
        for phase, call in calls.items():
            samples = []
            for repeat in range(8):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(20_000_000)
                begin.record()
                for i in range(count):
                    call(i)
                end.record()
                torch.cuda.synchronize()
                if repeat:
                    samples.append(begin.elapsed_time(end) / 1e3 / count)
            moved = (2 if phase == "forward" else 3) * shape[0] * shape[1] * 2
            median = statistics.median(samples)
            rows.append({
                "name": name, "phase": phase, "shape": list(shape), "clock": "events", "microseconds": median * 1e6,
                "spread": (max(samples) - min(samples)) / median, "terabytes_per_second": moved / median / 1e12,
                "fraction": moved / BANDWIDTH / median,
            })  # fmt: skip
            print(f"  {phase:8s} {shape[0]:6d} x {shape[1]:<5d} {name:34s} {median * 1e6:8.1f} us", flush=True)
    return rows


# Memory


def touch_memory(platform: str) -> None:
    """A few shapes with ragged ends, for compute-sanitizer."""
    for shape in ((5, 33), (3, 128), (7, 4099), (9, 4096), (2, 20000)):
        values = arrays(shape, "bfloat16", 3, offset=True)
        jax.block_until_ready(jax.jit(functools.partial(loss_parts, platform=platform))(*values))


def sanitize(platform: str, limit: float) -> dict[str, Any]:
    """Run `touch_memory` under compute-sanitizer, every array its own allocation."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    tool = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    command = [*tool, sys.executable, __file__, "--touch", platform]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except FileNotFoundError:
        return {"platform": platform, "check": "memcheck", "passed": None, "detail": "compute-sanitizer is not installed"}
    except subprocess.TimeoutExpired:
        return {"platform": platform, "check": "memcheck", "passed": None, "detail": f"not done after {limit:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "Invalid" in line]
    detail = "; ".join(lines[:4]) or (done.stdout + done.stderr)[-300:]
    return {"platform": platform, "check": "memcheck", "passed": done.returncode == 0, "detail": detail}


# The run


def versions() -> dict[str, Any]:
    def version(name):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    names = ("ejkernel-core", "ejkernel-triton", "ejkernel-cuda", "jax", "jaxlib", "triton", "jax-triton", "torch", "numpy")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    smi = subprocess.run(query, capture_output=True, text=True).stdout if shutil.which(query[0]) else "unknown"
    return {
        "device": str(current_target()), "driver": smi.strip(), "python": sys.version.split()[0],
        **{name: version(name) for name in names},
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of check_gpu.json")
    parser.add_argument("--platforms", default="", help="comma separated; default: every GPU plugin that is installed")
    parser.add_argument("--budget", type=float, default=270, help="seconds after which nothing new is started")
    parser.add_argument("--skip", default="", help="of numbers,times,sweep,torch,memory")
    parser.add_argument("--touch", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.touch:
        touch_memory(options.touch)
        return 0
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    installed = ejkernel.kernel_registry.list_platforms("rms_norm")
    platforms = [p for p in options.platforms.split(",") if p] or [p for p in ("cuda", "triton") if p in installed]
    skip = set(options.skip.split(","))
    result: dict[str, Any] = {"versions": versions(), "platforms": platforms, "numbers": [], "times": [], "sweep": []}
    print(json.dumps(result["versions"]), flush=True)

    def save(stage: str) -> None:
        result["seconds"] = time.monotonic() - started
        print(f"[{stage}: done at {result['seconds']:.0f} s]", flush=True)
        folder = pathlib.Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "check_gpu.json").write_text(json.dumps(result, indent=1))

    if "numbers" not in skip:
        for platform in platforms:
            result["numbers"] += check_numbers(platform)
            save(f"numbers {platform}")
    if "times" not in skip:
        result["times"] += time_platforms([*platforms, "xla"])
        save("times")
    if "memory" not in skip:
        for platform in platforms:
            if remaining(options.budget) > 60:
                result["numbers"].append(sanitize(platform, min(75, remaining(options.budget))))
        save("memory")
    if "torch" not in skip:
        for compiled in (False, True):
            if remaining(options.budget) > 40:
                result["times"] += time_torch(compiled)
        save("torch")
    if "sweep" not in skip:
        for platform in platforms:
            result["sweep"] += sweep(platform, options.budget)
        save("sweep")
    return summary(result)


def summary(result: dict[str, Any]) -> int:
    failed = [row for row in result["numbers"] if row["passed"] is False]
    for platform in result["platforms"]:
        rows = [row for row in result["numbers"] if row["platform"] == platform]
        counts = {verdict: sum(row["passed"] is verdict for row in rows) for verdict in (True, False, None)}
        print(f"{platform}: {counts[True]} checks passed, {counts[False]} failed, {counts[None]} refused or not run")
        for row in rows:
            if row["passed"] is not True or row["check"] == "memcheck":
                print(f"  {row['check']}: {row['detail']}")
    for row in result["times"]:
        print(
            f"  {row['phase']:8s} {row['shape'][0]:6d} x {row['shape'][1]:<5d} {row['name']:14s} {row['microseconds']:8.1f} us "
            f"{row['terabytes_per_second']:5.2f} TB/s {row['fraction']:.2f}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
