"""`flash_attention` through Mosaic GPU on a Hopper GPU: every config's numbers and device time, then its peers in the same process.

    python ejkernel-pallas/tests/device/mosaic_gpu_flash_attention.py --out results [--cases gqa,full] [--most 8] [--budget 220]

Of every case, forward and gradients, a bias's among them, are compared with XLA in float32 on the same arrays, config by config of
the search space, and timed by CUPTI; the backward phase is timed as the pullback alone. Then cuDNN, tokamax, our Triton kernels
and JAX's own example are timed. Writes `mosaic_gpu_flash_attention.json` after every row and exits with 1 if any number is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel
from ejkernel.operations.flash_attention.interface import OPERATION, FlashAttentionOutputs
from ejkernel.operations.flash_attention.pairs import count_pairs
from ejkernel.plugin import current_target
from ejkernel_pallas.mosaic_gpu.flash_attention import capability, config, kernel
from ejkernel_xla.flash_attention import backward as xla_backward, config as xla_config, forward as xla_forward

BEGIN = time.monotonic()
LIMIT = 1e-2
"""Of ||got - wanted|| / ||wanted||."""
REACH = 512
"""A value beside the last key is NaN in `hidden`; so many keys are hidden there."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call. `segments` packs that many sequences of equal length; `hidden` puts NaN into keys that no query may see; `bias` is
    a shape, and some of its numbers are -inf."""

    batch: int
    length: int
    heads: int
    key_heads: int
    size: int
    value_size: int = 0
    dtype: str = "bfloat16"
    segments: int = 0
    sinks: bool = False
    hidden: bool = False
    bias: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def build(self) -> tuple[Any, Any, Any]:
        """The call, its inputs and a cotangent."""
        b, t, h, k, d, v = self.batch, self.length, self.heads, self.key_heads, self.size, self.value_size or self.size
        seeds = jax.random.split(jax.random.key(0), 8)

        def normal(i: int, *shape: int) -> Any:
            return jax.random.normal(seeds[i], shape, self.dtype)

        arrays: dict[str, Any] = {"query": normal(0, b, t, h, d), "key": normal(1, b, t, k, d), "value": normal(2, b, t, k, v)}
        if self.segments:
            ids = (jnp.arange(t, dtype=jnp.int32) * self.segments // t)[None]
            arrays.update(query_segments=ids, key_segments=ids)
        if self.hidden:
            arrays["key_lengths"] = jnp.full((b,), t - REACH, jnp.int32)
            arrays.update({name: arrays[name].at[:, t - REACH :].set(jnp.nan) for name in ("key", "value")})
        if self.sinks:
            arrays["softmax_aux"] = normal(4, h)
        if self.bias:
            arrays["bias"] = jnp.where(jax.random.bernoulli(seeds[7], 0.02, self.bias), -jnp.inf, normal(6, *self.bias))
        bound = OPERATION.canonicalise(**arrays, **dict(self.options))
        call = dataclasses.replace(bound.call, save_residuals=True)
        return call, bound.inputs, FlashAttentionOutputs(normal(5, b, t, h, v))

    def flops(self, call: Any) -> float:
        """Of the forward phase, visible pairs only."""
        pairs = count_pairs(call) / (self.segments or 1)
        return 2 * self.batch * self.heads * pairs * (self.size + (self.value_size or self.size))


def options(**values: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(values.items())


CAUSAL = options(causal=True)
CASES = {
    "gqa": Problem(2, 8192, 32, 8, 128, options=CAUSAL),
    "full": Problem(2, 8192, 16, 16, 128),
    "ragged": Problem(1, 5001, 8, 2, 128, dtype="float16", sinks=True, options=CAUSAL),
    "hidden": Problem(2, 2048, 8, 2, 128, hidden=True, options=CAUSAL),
    "segments": Problem(1, 32768, 16, 4, 128, segments=8, options=CAUSAL),
    "window": Problem(2, 8192, 64, 8, 64, options=options(causal=True, sliding_window=(127, 0))),
    "cap": Problem(2, 8192, 16, 8, 128, options=options(causal=True, sliding_window=(4095, 0), logits_soft_cap=50.0)),
    "full64": Problem(2, 8192, 32, 32, 64),
    "mla": Problem(2, 8192, 16, 16, 192, 128, options=CAUSAL),
    "cap256": Problem(2, 8192, 16, 8, 256, options=options(causal=True, sliding_window=(4095, 0), logits_soft_cap=50.0)),
    "full96": Problem(2, 8192, 16, 16, 96),
    "bias": Problem(2, 8192, 16, 16, 128, bias=(1, 16, 8192, 8192), options=CAUSAL),
    "bias of keys": Problem(2, 8192, 16, 16, 128, bias=(2, 1, 1, 8192), options=CAUSAL),
    "bias of pairs": Problem(2, 4096, 16, 16, 128, bias=(2, 16, 4096, 4096)),
    # Without the cap a bias of queries moves nothing: its gradient would be what is left of sums that cancel.
    "bias of queries": Problem(2, 4096, 16, 4, 128, bias=(1, 16, 4096, 1), options=options(logits_soft_cap=5.0)),
    "bias shared": Problem(4, 2000, 16, 4, 64, bias=(1, 1, 2000, 2000), options=options(causal=True, logits_soft_cap=30.0)),
}


def compiled(programs: list[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
    """Compile side by side; an exception stands for a program that did not."""

    def one(program: tuple[Any, tuple[Any, ...]]) -> Any:
        function, arguments = program
        try:
            return jax.jit(function).lower(*arguments).compile()
        except Exception as error:  # noqa: BLE001 - what does not compile is a result
            return error

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(one, programs))


@jax.jit
def distance(got: Any, wanted: Any) -> Any:
    """||got - wanted|| / ||wanted||; places where both are infinite are left out, NaN is not."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    both = jnp.isinf(got) & jnp.isinf(wanted)
    got, wanted = (jnp.where(both, 0, array) for array in (got, wanted))
    return jnp.linalg.norm((got - wanted).ravel()) / jnp.linalg.norm(wanted.ravel())


def wanted_of(call: Any, inputs: Any, cotangents: Any) -> tuple[Any, Any]:
    """Output and gradients, of XLA in float32 from the same numbers."""

    def one(value: Any) -> Any:
        return value.astype(jnp.float32) if value is not None and jnp.issubdtype(value.dtype, jnp.floating) else value

    def spec(value: Any) -> Any:
        floating = value is not None and value.dtype in ("bfloat16", "float16")
        return dataclasses.replace(value, dtype="float32") if floating else value

    inputs, cotangents = (type(values)(*map(one, values)) for values in (inputs, cotangents))
    call = dataclasses.replace(call, **{name: spec(getattr(call, name)) for name in inputs._fields})
    chosen = xla_config.CONFIGS.heuristic(call, current_target())
    outputs = jax.jit(lambda i: xla_forward(call, i, chosen))(inputs)
    gradients = jax.jit(lambda i, o, g: xla_backward(call, i, o, g, chosen))(inputs, outputs, cotangents)
    return outputs.out, gradients[:4]


def device_seconds(function: Any, arguments: tuple[Any, ...], repeats: int = 5) -> tuple[float, dict[str, float]]:
    """Median device time of a call in seconds, and of each of its kernels."""
    from jax.experimental.mosaic.gpu import profiler

    _, runs = profiler.Cupti(finalize=False).measure(function, iterations=repeats, aggregate=False)(*arguments)
    runs = runs if runs and isinstance(runs[0], list) else [runs]
    kernels: dict[str, list[float]] = {}
    for run in runs:
        sums: dict[str, float] = {}
        for name, milliseconds in run:
            sums[name] = sums.get(name, 0.0) + milliseconds / 1e3
        for name, seconds in sums.items():
            kernels.setdefault(name, []).append(seconds)
    total = statistics.median(sum(milliseconds for _, milliseconds in run) / 1e3 for run in runs)
    return total, {name: statistics.median(values) for name, values in kernels.items()}


class Run:
    """One case: its configs, then its peers."""

    def __init__(self, name: str, problem: Problem, save: Callable[[dict[str, Any]], None]) -> None:
        self.name, self.problem, self.save = name, problem, save
        self.call, self.inputs, self.cotangents = problem.build()
        self.flops = problem.flops(self.call)

    def row(self, who: str, phase: str, seconds: float, **more: Any) -> None:
        work = self.flops * (2.5 if phase == "backward" else 1)
        self.save({
            "case": self.name, "phase": phase, "us": seconds * 1e6, "tflops": work / seconds / 1e12, "who": who, **more
        })  # fmt: skip

    def failed(self, who: str, phase: str, error: Any) -> None:
        lines = str(error).splitlines() or [repr(error)]
        self.save({"case": self.name, "phase": phase, "who": who, "failed": lines[0][:200]})

    def configs(self, most: int) -> bool:
        """Every config's numbers and times; whether all numbers are right."""
        target = current_target()
        refused = capability.supports_forward(self.call, target) or capability.supports_backward(self.call, target)
        if refused:
            self.failed("ours", "forward", refused)
            return False
        out, gradients = jax.block_until_ready(wanted_of(self.call, self.inputs, self.cotangents))
        forwards = config.forward_space(self.call, target)[:most]
        programs = compiled([(lambda i, c=c: kernel.forward(self.call, i, c), (self.inputs,)) for c in forwards])
        passed, outputs = True, None
        for choice, program in zip(forwards, programs, strict=True):
            if isinstance(program, Exception):
                self.failed(short(choice), "forward", program)
                passed = False
                continue
            got = program(self.inputs)
            error = float(distance(got.out, out))
            again = bool(jnp.array_equal(got.out, program(self.inputs).out, equal_nan=True))
            good = error < LIMIT and again
            outputs = got if good and outputs is None else outputs
            passed &= good
            seconds, _ = device_seconds(program, (self.inputs,))
            self.row(short(choice), "forward", seconds, error=error, repeats=again, right=good)
        return self.backward(most, outputs, gradients) and passed if outputs is not None else False

    def backward(self, most: int, outputs: Any, gradients: Any) -> bool:
        choices = config.backward_space(self.call, current_target())[:most]
        arguments = (self.inputs, outputs, self.cotangents)
        programs = compiled([(lambda i, o, g, c=c: kernel.backward(self.call, i, o, g, c), arguments) for c in choices])
        passed = True
        for choice, program in zip(choices, programs, strict=True):
            if isinstance(program, Exception):
                self.failed(short(choice), "backward", program)
                passed = False
                continue
            got, again = program(*arguments), program(*arguments)
            pairs = [pair for pair in zip(got[:4], gradients, again[:4], strict=True) if pair[0] is not None]
            errors = [float(distance(g, w)) for g, w, _ in pairs]
            repeats = all(bool(jnp.array_equal(a, b, equal_nan=True)) for a, _, b in pairs)
            good = all(error < LIMIT for error in errors) and repeats
            passed &= good
            seconds, kernels = device_seconds(program, arguments, 3)
            parts = {name.replace("ejkernel_flash_attention_", "")[:40]: round(s * 1e6) for name, s in kernels.items()}
            self.row(short(choice), "backward", seconds, error=max(errors), repeats=repeats, right=good, parts=parts)
        return passed

    def peer(self, who: str, attention: Callable[..., Any], *, backward: bool = True) -> None:
        """A function of query, key and value, and the bias if there is one; what it cannot do is a result."""
        arrays = tuple(array for array in self.inputs[:4] if array is not None)
        try:
            seconds, _ = device_seconds(jax.jit(attention), arrays)
            self.row(who, "forward", seconds)
            if backward:
                pull = jax.jit(lambda *a: jax.vjp(attention, *a)[1])(*arrays)
                seconds, _ = device_seconds(jax.jit(lambda pull, g: pull(g)), (pull, self.cotangents.out), 3)
                self.row(who, "backward", seconds)
        except Exception as error:  # noqa: BLE001 - what a peer cannot do is a result
            self.failed(who, "", error)

    def peers(self) -> None:
        given = dict(self.problem.options)
        causal, window, cap = given.get("causal", False), given.get("sliding_window"), given.get("logits_soft_cap")
        plain = not (self.problem.segments or self.problem.sinks or self.problem.hidden)
        if plain and cap is None:
            self.peer("cudnn", lambda q, k, v, bias=None: jax.nn.dot_product_attention(
                q, k, v, bias, is_causal=causal, local_window_size=window, implementation="cudnn"
            ))  # fmt: skip
        plain = plain and not self.problem.bias
        if plain:
            self.peer("tokamax", lambda q, k, v: tokamax_attention(q, k, v, causal, window, cap))
        if plain and window is None and cap is None and self.problem.size == (self.problem.value_size or self.problem.size):
            self.peer("jax's example", lambda q, k, v: jax_example(q, k, v, causal), backward=False)
        self.peer("triton", self.triton)

    def triton(self, query: Any, key: Any, value: Any, bias: Any = None) -> Any:
        inputs = self.inputs._replace(query=query, key=key, value=value)
        names = ("query_segments", "key_segments")
        given = {name: getattr(inputs, name) for name in names if getattr(inputs, name) is not None}
        sinks = None if inputs.softmax_aux is None else inputs.softmax_aux[0]
        return ejkernel.flash_attention(
            query,
            key,
            value,
            bias=bias,
            softmax_aux=sinks,
            mask_info=mask_of(given),
            platform="triton",
            **dict(self.problem.options),
        )


def mask_of(given: dict[str, Any]) -> Any:
    return None if not given else ejkernel.MaskInfo.from_segments(given["query_segments"], given["key_segments"])


def tokamax_attention(query: Any, key: Any, value: Any, causal: bool, window: Any, cap: Any) -> Any:
    import tokamax

    return tokamax.dot_product_attention(
        query, key, value, is_causal=causal, local_window_size=window, logits_soft_cap=cap, implementation="mosaic"
    )


def jax_example(query: Any, key: Any, value: Any, causal: bool) -> Any:
    """It takes float16 and does not scale."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    query, key, value = (array.astype(jnp.float16) for array in (query, key, value))
    chosen = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=causal)
    return attention_mgpu.attention(query, key, value, chosen)


def short(choice: Any) -> str:
    return " ".join(f"{name} {value}" for name, value in dataclasses.asdict(choice).items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--most", type=int, default=99, help="configs of a case and phase")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds after which no case is started")
    parser.add_argument("--skip-peers", action="store_true")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    passed = True

    def save(row: dict[str, Any]) -> None:
        rows.append(row)
        shown = " ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
        print(f"{time.monotonic() - BEGIN:6.1f}s {shown}", flush=True)
        (Path(given.out) / "mosaic_gpu_flash_attention.json").write_text(json.dumps(rows, indent=1))

    for index, name in enumerate(given.cases.split(",")):
        if time.monotonic() - BEGIN > given.budget:
            print(f"not started: {name}", flush=True)
            continue
        run = Run(name, CASES[name], save)
        # The first case tells which configs are best; the others need fewer.
        passed &= run.configs(given.most if index == 0 else min(given.most, 6))
        if not given.skip_peers:
            run.peers()
    print("all numbers are right" if passed else "SOME NUMBERS ARE WRONG", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
