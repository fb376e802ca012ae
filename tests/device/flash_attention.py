"""`flash_attention` of one platform on a real GPU: every config's numbers, then device times over the configs and beside peers.

    python tests/device/flash_attention.py --out results [--platform cuda] [--parts numbers,times,peers] [--cases gqa,full]

Numbers are compared with the float64 reference. Times are device times (CUPTI); the backward phase, where the platform has one, is
timed as the pullback alone. Peers are cuDNN, FlexAttention and Mosaic GPU. Writes `flash_attention.json`, with the platform's name
in it unless that is Triton, and exits with 1 if any number is wrong. `--dry` lowers every program for a GPU that need not be there.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_times import device_times

from ejkernel.operations.flash_attention import reference
from ejkernel.operations.flash_attention.interface import OPERATION, FlashAttentionOutputs
from ejkernel.operations.flash_attention.pairs import count_pairs
from ejkernel.plugin import Target, current_target

PLATFORMS = {
    "triton": "ejkernel_triton.flash_attention",
    "mosaic_gpu": "ejkernel_pallas.mosaic_gpu.flash_attention",
    "cuda": "ejkernel_cuda.flash_attention",
}
"""Modules of kernels by name."""
BEGIN = time.monotonic()


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call. `keys` is as many as queries where it is 0; `segments` packs that many sequences of equal length. With
    `block_size`, keys are means of so many tokens each, which a query sees once they all are behind it."""

    batch: int
    length: int
    heads: int
    key_heads: int
    size: int
    value_size: int = 0
    keys: int = 0
    dtype: str = "bfloat16"
    segments: int = 0
    block_size: int = 0
    bias: tuple[int, ...] | None = None
    sinks: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def build(self, seed: int = 0, dtype: str = "") -> tuple[Any, Any, Any]:
        """The call, its inputs and a cotangent."""
        dtype = dtype or self.dtype
        b, t, h, k, d, v = self.batch, self.length, self.heads, self.key_heads, self.size, self.value_size or self.size
        s = t // self.block_size if self.block_size else self.keys or t
        keys = jax.random.split(jax.random.key(seed), 6)

        def normal(i: int, *shape: int) -> Any:
            return jax.random.normal(keys[i], shape, jnp.bfloat16 if self.dtype == "bfloat16" else self.dtype).astype(dtype)

        arrays: dict[str, Any] = {"query": normal(0, b, t, h, d), "key": normal(1, b, s, k, d), "value": normal(2, b, s, k, v)}
        if self.segments:
            ids = (jnp.arange(t, dtype=jnp.int32) * self.segments // t)[None]
            arrays.update(query_segments=ids, key_segments=ids)
        if self.block_size:
            ends = (jnp.arange(s, dtype=jnp.int32)[None] + 1) * self.block_size - 1
            arrays.update(query_positions=jnp.arange(t, dtype=jnp.int32)[None], key_positions=ends)
        if self.bias is not None:
            arrays["bias"] = normal(3, *self.bias)
        if self.sinks:
            arrays["softmax_aux"] = normal(4, h)
        bound = OPERATION.canonicalise(**arrays, **dict(self.options))
        call = dataclasses.replace(bound.call, save_residuals=True)
        return call, bound.inputs, FlashAttentionOutputs(normal(5, b, t, h, v))


def options(**values: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(values.items())


NUMBERS = {
    "gqa-causal-128": Problem(1, 1000, 4, 2, 128, options=options(causal=True)),
    "full-float32": Problem(1, 300, 2, 1, 80, dtype="float32"),
    "causal-float32-128": Problem(1, 400, 4, 2, 128, dtype="float32", options=options(causal=True)),
    "tf32x3-float32": Problem(1, 200, 2, 1, 64, dtype="float32", options=options(precision="high", causal=True)),
    "segments-64": Problem(
        2, 777, 4, 4, 64, segments=5, sinks=True, options=options(causal=True, dropout_prob=0.1, dropout_seed=3)
    ),
    "window-cap-256": Problem(1, 700, 2, 1, 256, options=options(causal=True, sliding_window=(200, 0), logits_soft_cap=20.0)),
    "bias-mla": Problem(1, 515, 2, 2, 192, 128, bias=(1, 2, 515, 515), options=options(chunk_size=300)),
    "bias-causal-128": Problem(2, 1000, 4, 2, 128, bias=(1, 4, 1000, 1000), options=options(causal=True)),
    "bias-keys-64": Problem(2, 1000, 4, 4, 64, bias=(2, 1, 1, 1000)),
    "bias-float32": Problem(1, 300, 2, 2, 128, dtype="float32", bias=(1, 2, 300, 300), options=options(causal=True)),
    "full-tails": Problem(2, 413, 4, 2, 128),
    "full-float16-256": Problem(1, 290, 2, 2, 256, dtype="float16"),
    "window-float16-64": Problem(2, 1000, 4, 1, 64, dtype="float16", options=options(sliding_window=(130, 70))),
    "window-narrow-64": Problem(1, 900, 8, 2, 64, options=options(causal=True, sliding_window=(127, 0))),
    "token-128": Problem(2, 1, 16, 2, 128, keys=5000),
    "chunk-causal-128": Problem(1, 200, 4, 2, 128, keys=6000, options=options(causal=True, causal_alignment="bottom_right")),
    "few-blocks-64": Problem(1, 700, 3, 3, 64, keys=4100, dtype="float16"),
    "few-blocks-256": Problem(1, 300, 2, 1, 256, keys=3000, options=options(causal=True, causal_alignment="bottom_right")),
    "round-and-rest-128": Problem(1, 4500, 4, 4, 128),
    "compressed-128": Problem(1, 2000, 16, 2, 128, block_size=32, options=options(causal=True)),
    "compressed-float32-64": Problem(1, 1500, 6, 2, 64, block_size=16, dtype="float32", options=options(causal=True)),
    "few-keys-256": Problem(1, 3000, 4, 2, 256, keys=70),
    "wide-512": Problem(1, 200, 2, 1, 512, options=options(causal=True)),
}

TIMES = {
    "gqa": Problem(2, 8192, 32, 8, 128, options=options(causal=True)),
    "mha": Problem(2, 8192, 16, 16, 128, options=options(causal=True)),
    "full": Problem(2, 8192, 16, 16, 128),
    "cap": Problem(2, 8192, 16, 8, 256, options=options(causal=True, sliding_window=(4095, 0), logits_soft_cap=50.0)),
    "window": Problem(2, 8192, 64, 8, 64, options=options(causal=True, sliding_window=(127, 0))),
    "segments": Problem(1, 32768, 16, 4, 128, segments=8, options=options(causal=True)),
    "full64": Problem(2, 8192, 32, 32, 64),
    "mla": Problem(2, 8192, 16, 16, 192, 128, options=options(causal=True)),
    "float32": Problem(2, 8192, 32, 8, 128, dtype="float32", options=options(causal=True)),
    "bias": Problem(2, 8192, 16, 16, 128, bias=(1, 16, 8192, 8192), options=options(causal=True)),
    "compressed": Problem(1, 8192, 64, 4, 128, block_size=64, options=options(causal=True)),
    "compressed-long": Problem(1, 32768, 64, 4, 128, block_size=64, options=options(causal=True)),
    "few-keys": Problem(1, 8192, 64, 4, 128, keys=128),
    "key-bias": Problem(2, 8192, 16, 16, 128, bias=(2, 1, 1, 8192), options=options(causal=True)),
}


class Platform:
    """The kernels of one platform.

    Attributes:
        dry: programs are lowered for an H200 and not run.
    """

    def __init__(self, name: str, *, dry: bool = False) -> None:
        self.name, self.dry = name, dry
        self.kernel = importlib.import_module(f"{PLATFORMS[name]}.kernel")
        self.config = importlib.import_module(f"{PLATFORMS[name]}.config")
        self.capability = importlib.import_module(f"{PLATFORMS[name]}.capability")
        self.target = Target("gpu", "NVIDIA H200", "9.0") if dry else current_target()

    @property
    def has_backward(self) -> bool:
        return hasattr(self.kernel, "backward")

    def build(self, problem: Problem) -> tuple[Any, Any, Any]:
        """The call, its inputs and a cotangent; of a dry run their shapes only."""
        if not self.dry:
            return problem.build()
        calls: list[Any] = []

        def arrays() -> Any:
            call, *rest = problem.build()
            calls.append(call)
            return rest

        inputs, cotangents = jax.eval_shape(arrays)
        return calls[0], inputs, cotangents

    def lower(self, problem: Problem, save: Any, name: str, heuristic_only: bool) -> bool:
        """Every program of a call, for a GPU that is not there."""
        call, inputs, cotangents = self.build(problem)
        if (reason := self.refusal(call)) is not None:
            save("numbers", {"case": name, "phase": "forward", "config": "", "passed": True, "detail": f"refused: {reason}"})
            return True
        outputs = jax.eval_shape(
            lambda: jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), OPERATION.output_specs(call))
        )
        phases = {
            "forward": [(c, lambda i, o, g, c=c: self.kernel.forward(call, i, c)) for c in self.forwards(call, heuristic_only)],
            "backward": [
                (c, lambda i, o, g, c=c: self.kernel.backward(call, i, o, g, c)) for c in self.backwards(call, heuristic_only)
            ],
        }
        passed = True
        for phase, programs in phases.items():
            found = self.compiled([(function, (inputs, outputs, cotangents)) for _, function in programs])
            for (choice, _), program in zip(programs, found, strict=True):
                passed &= judge(save, name, phase, choice, {}, 0.0, program)
        return passed

    def refusal(self, call: Any) -> str | None:
        return self.capability.supports_forward(call, self.target)

    def forwards(self, call: Any, heuristic_only: bool = False) -> list[Any]:
        best = self.config.FORWARD.heuristic(call, self.target)
        return [best] if heuristic_only else list(self.config.FORWARD.search_space(call, self.target))

    def backwards(self, call: Any, heuristic_only: bool = False) -> list[Any]:
        if not self.has_backward:
            return []
        best = self.config.BACKWARD.heuristic(call, self.target)
        return [best] if heuristic_only else list(self.config.BACKWARD.search_space(call, self.target))

    def compiled(self, programs: list[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
        """Compile side by side; an exception stands for a program that did not, or was only lowered."""

        def one(program: tuple[Any, tuple[Any, ...]]) -> Any:
            function, arguments = program
            try:
                if self.dry:
                    jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
                    return LoweredError("lowered only")
                return jax.jit(function).lower(*arguments).compile()
            except Exception as error:  # noqa: BLE001 - what does not compile is a result
                return error

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(one, programs))


class LoweredError(Exception):
    """Stands for a program that was lowered and not run."""


def relative(got: Any, wanted: Any) -> float:
    """||got - wanted|| / ||wanted|| on the host, infinities left out."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    got, wanted = (np.where(np.isinf(x), 0, x) for x in (got, wanted))
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def flops_of(problem: Problem, call: Any) -> float:
    """Of the forward phase, visible pairs only."""
    pairs = count_pairs(call) / (problem.segments or 1)
    return 2 * problem.batch * problem.heads * pairs * (problem.size + (problem.value_size or problem.size))


def wide(values: Any) -> Any:
    """Floats as float64, on the host."""

    def one(value: Any) -> Any:
        return np.asarray(value, np.float64) if jnp.issubdtype(value.dtype, jnp.floating) else np.asarray(value)

    return type(values)(*(None if value is None else one(value) for value in values))


def check_numbers(platform: Platform, save: Any) -> bool:
    """Every config of the search space against the float64 reference."""
    passed = True
    kernel = platform.kernel
    for name, problem in NUMBERS.items():
        call, inputs, cotangents = problem.build()
        reason = platform.refusal(call)
        if reason is not None:
            save("numbers", {"case": name, "phase": "forward", "config": "", "passed": True, "detail": f"refused: {reason}"})
            continue
        wanted = reference.forward(call, wide(inputs))
        limit = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 5e-6}[problem.dtype]
        forwards = platform.forwards(call)
        programs = platform.compiled([(lambda i, c=c: kernel.forward(call, i, c), (inputs,)) for c in forwards])  # noqa: B023
        outputs = None
        for choice, program in zip(forwards, programs, strict=True):
            errors = {}
            if not isinstance(program, Exception):
                got = program(inputs)
                outputs = outputs or got
                errors = {field: relative(getattr(got, field), getattr(wanted, field)) for field in ("out", "lse")}
            passed &= judge(save, name, "forward", choice, errors, limit, program)
        backwards = platform.backwards(call)
        if not backwards:
            continue
        outputs = outputs or jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), wanted)
        gradients = reference.backward(call, wide(inputs), wanted, wide(cotangents))
        programs = platform.compiled(
            [(lambda i, o, c, x=x: kernel.backward(call, i, o, c, x), (inputs, outputs, cotangents)) for x in backwards]  # noqa: B023
        )
        for choice, program in zip(backwards, programs, strict=True):
            errors = {}
            if not isinstance(program, Exception):
                got = program(inputs, outputs, cotangents)
                errors = {n: relative(g, w) for n, g, w in zip(inputs._fields, got, gradients, strict=True) if w is not None}
            passed &= judge(save, name, "backward", choice, errors, limit, program)
    return passed


def judge(save: Any, name: str, phase: str, choice: Any, errors: dict[str, float], limit: float, program: Any) -> bool:
    """Whether there are errors and all of them are small; NaN is not."""
    good = isinstance(program, LoweredError) or (bool(errors) and all(error < limit for error in errors.values()))
    detail = " ".join(f"{k} {v:.1e}" for k, v in errors.items()) or str(program).splitlines()[0][:150]
    save("numbers", {"case": name, "phase": phase, "config": str(choice), "passed": good, "detail": detail})
    return good


def time_configs(name: str, problem: Problem, save: Any, platform: Platform, heuristic_only: bool) -> None:
    call, inputs, cotangents = problem.build()
    kernel, flops = platform.kernel, flops_of(problem, call)
    reason = platform.refusal(call)
    if reason is not None:
        save("times", {"case": name, "config": "", "failed": f"refused: {reason}"})
        return
    forwards = platform.forwards(call, heuristic_only)
    programs = platform.compiled([(lambda i, c=c: kernel.forward(call, i, c), (inputs,)) for c in forwards])
    outputs = None
    for choice, program in zip(forwards, programs, strict=True):
        if isinstance(program, Exception):
            save("times", {"case": name, "config": str(choice), "failed": str(program).splitlines()[0][:150]})
            continue
        outputs = outputs or program(inputs)
        seconds, _ = device_times(program, (inputs,))
        save(
            "times",
            {"case": name, "phase": "forward", "config": str(choice), "us": seconds * 1e6, "tflops": flops / seconds / 1e12},
        )
    if outputs is None:
        return
    backwards = platform.backwards(call, heuristic_only)
    programs = platform.compiled(
        [(lambda i, o, c, x=x: kernel.backward(call, i, o, c, x), (inputs, outputs, cotangents)) for x in backwards]
    )
    for choice, program in zip(backwards, programs, strict=True):
        if isinstance(program, Exception):
            save("times", {"case": name, "config": str(choice), "failed": str(program).splitlines()[0][:150]})
            continue
        seconds, kernels = device_times(program, (inputs, outputs, cotangents), 3)
        parts = {k.removesuffix("_kernel"): round(v * 1e6) for k, v in kernels.items() if v > 5e-6}
        tflops = 2.5 * flops / seconds / 1e12
        save(
            "times",
            {"case": name, "phase": "backward", "config": str(choice), "us": seconds * 1e6, "tflops": tflops, "parts": parts},
        )


def time_mosaic(name: str, problem: Problem, save: Any) -> None:
    """Mosaic GPU's forward with the config of its heuristic, for platforms that have the same structure."""
    call, inputs, _ = problem.build()
    try:
        mosaic = Platform("mosaic_gpu")
        if mosaic.refusal(call) is not None:
            return
        choice = mosaic.forwards(call, True)[0]
        seconds, _ = device_times(jax.jit(lambda i: mosaic.kernel.forward(call, i, choice)), (inputs,))
        tflops = flops_of(problem, call) / seconds / 1e12
        save("peers", {"case": name, "name": "mosaic_gpu", "phase": "forward", "us": seconds * 1e6, "tflops": tflops})
    except Exception as error:  # noqa: BLE001 - what a peer cannot do is a result
        save("peers", {"case": name, "name": "mosaic_gpu", "failed": str(error).splitlines()[0][:150]})


def time_cudnn(name: str, problem: Problem, save: Any) -> None:
    given = dict(problem.options)
    if problem.segments or problem.block_size or "logits_soft_cap" in given:
        return
    call, inputs, cotangents = problem.build()
    flops = flops_of(problem, call)
    window = given.get("sliding_window")

    def attention(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, bias, is_causal=given.get("causal", False), local_window_size=window, implementation="cudnn"
        )

    arguments = inputs[:3] if problem.bias is None else inputs[:4]
    try:
        seconds, _ = device_times(jax.jit(attention), arguments)
        save(
            "peers", {"case": name, "name": "cudnn", "phase": "forward", "us": seconds * 1e6, "tflops": flops / seconds / 1e12}
        )
        pull = jax.jit(lambda *a: jax.vjp(attention, *a)[1])(*arguments)
        seconds, _ = device_times(jax.jit(lambda pull, g: pull(g)), (pull, cotangents.out))
        save(
            "peers",
            {"case": name, "name": "cudnn", "phase": "backward", "us": seconds * 1e6, "tflops": 2.5 * flops / seconds / 1e12},
        )
    except Exception as error:  # noqa: BLE001 - what a peer cannot do is a result
        save("peers", {"case": name, "name": "cudnn", "failed": str(error).splitlines()[0][:150]})


def time_flex(name: str, problem: Problem, save: Any) -> None:
    if problem.bias is not None or problem.keys or problem.block_size:
        return
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # after a few cases it would not compile any more
    given = dict(problem.options)
    call, _, _ = problem.build()
    flops = flops_of(problem, call)
    b, t, h, k, d, v = problem.batch, problem.length, problem.heads, problem.key_heads, problem.size, problem.value_size
    q, key, value = (
        torch.randn(b, heads, t, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads, size in ((h, d), (k, d), (k, v or d))
    )
    window, cap, per = given.get("sliding_window"), given.get("logits_soft_cap"), t // max(problem.segments, 1)

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        visible = i >= j
        visible = visible & (i - j <= window[0]) if window else visible
        return visible & (i // per == j // per) if problem.segments else visible

    def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return cap * torch.tanh(score / cap)

    try:
        block_mask = create_block_mask(seen, None, None, t, t, device="cuda") if given.get("causal") else None
        attention = torch.compile(flex_attention, dynamic=False)

        def run() -> Any:
            return attention(q, key, value, block_mask=block_mask, score_mod=capped if cap else None, enable_gqa=h != k)

        def timed(function: Any) -> float:
            for _ in range(2):
                function()
            events = []
            for _ in range(5):
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                pair[0].record()
                function()
                pair[1].record()
                events.append(pair)
            torch.cuda.synchronize()
            return statistics.median(a.elapsed_time(b) for a, b in events) / 1e3

        with torch.no_grad():
            seconds = timed(run)
        save("peers", {"case": name, "name": "flex", "phase": "forward", "us": seconds * 1e6, "tflops": flops / seconds / 1e12})
        out = run()
        grad = torch.randn_like(out)
        seconds = timed(lambda: torch.autograd.grad(out, (q, key, value), grad, retain_graph=True))
        save(
            "peers",
            {"case": name, "name": "flex", "phase": "backward", "us": seconds * 1e6, "tflops": 2.5 * flops / seconds / 1e12},
        )
    except Exception as error:  # noqa: BLE001 - what a peer cannot do is a result
        save("peers", {"case": name, "name": "flex", "failed": str(error).splitlines()[0][:150]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--platform", choices=PLATFORMS, default="triton")
    parser.add_argument("--dry", action="store_true", help="lower numbers and times for an H200, run nothing")
    parser.add_argument("--parts", default="numbers,times,peers")
    parser.add_argument("--cases", default=",".join(TIMES))
    parser.add_argument("--peers", default="cudnn,mosaic_gpu,flex")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which nothing new is started")
    parser.add_argument("--heuristic", action="store_true", help="time the heuristic's configs only")
    given = parser.parse_args()
    parts, cases = given.parts.split(","), given.cases.split(",")
    Path(given.out).mkdir(parents=True, exist_ok=True)
    platform = Platform(given.platform, dry=given.dry)
    suffix = "" if platform.name == "triton" else f"_{platform.name}"
    result: dict[str, list[Any]] = {"numbers": [], "times": [], "peers": []}

    def save(part: str, row: dict[str, Any]) -> None:
        result[part].append(row)
        if part != "numbers" or not row["passed"] or row["phase"] == "forward":
            print(
                f"{time.monotonic() - BEGIN:6.1f}s",
                " ".join(str(round(v, 1) if isinstance(v, float) else v) for v in row.values()),
                flush=True,
            )
        (Path(given.out) / f"flash_attention{suffix}.json").write_text(json.dumps(result, indent=1))

    passed = True
    if given.dry:
        chosen = {name: TIMES[name] for name in cases} if "times" in parts else {}
        chosen |= NUMBERS if "numbers" in parts else {}
        lowered = [platform.lower(problem, save, name, given.heuristic) for name, problem in chosen.items()]
        return 0 if all(lowered) else 1
    if "numbers" in parts:
        passed = check_numbers(platform, save)
        print(f"numbers: {sum(row['passed'] for row in result['numbers'])} of {len(result['numbers'])} right", flush=True)
    peers = {"cudnn": time_cudnn, "mosaic_gpu": time_mosaic, "flex": time_flex}
    for name in cases:
        for part, run in (
            ("times", lambda n, p, s: time_configs(n, p, s, platform, given.heuristic)),
            *(("peers", peers[peer]) for peer in given.peers.split(",") if peer != platform.name),
        ):
            if part in parts and time.monotonic() - BEGIN < given.budget:
                run(name, TIMES[name], save)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
