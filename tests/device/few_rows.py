"""`fused_linear` on a real GPU: times of plain JAX, our XLA and Triton over its configs, and errors against float64.

    python tests/device/few_rows.py --out results

A call reads weights that no cache holds: a program has as many calls, each of its own arrays, as together exceed L2. Device time is
by CUPTI, in all, per call; the rate is that of the weights alone. Prints a line for each measurement and writes `few_rows.json`
under `--out` (or `$OUT`). `--budget` seconds after which nothing new is started (80), `--threads` that compile (10), `--small` for
tiny shapes without times, which a CPU can run (Triton's with EJKERNEL_TRITON_INTERPRET=1).
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
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from kernel_times import device_times

import ejkernel
from ejkernel.operations.fused_linear.interface import OPERATION
from ejkernel.targets import resolve_target

BEYOND_CACHES = 160 * 2**20
CHECKED = 256
"""Columns of a result at either end that are compared."""


class Size(NamedTuple):
    """A weight `[columns, inner]`, behind a norm or before a residual addition, or both."""

    name: str
    inner: int
    columns: int
    norm: bool
    gated: bool
    residual: bool

    @property
    def copies(self) -> int:
        return min(24, max(1, -(-BEYOND_CACHES // self.bytes)))

    @property
    def bytes(self) -> int:
        return 2 * self.inner * self.columns


SIZES = (
    Size("qkv", 2048, 4096, True, False, False),
    Size("o", 2048, 2048, False, False, True),
    Size("up", 2048, 11008, True, True, False),
    Size("down", 5504, 2048, False, False, True),
    Size("head", 2048, 128256, True, False, False),
)
WIDER = (
    Size("8b qkv", 4096, 6144, True, False, False),
    Size("8b o", 4096, 4096, False, False, True),
    Size("8b up", 4096, 28672, True, True, False),
    Size("8b down", 14336, 4096, False, False, True),
)
SMALL = (Size("up", 64, 96, True, True, False), Size("down", 48, 64, False, False, True))

Run = Callable[..., Any]
Problem = tuple[Size, int, str, Run]


@functools.cache
def arrays(size: Size, rows: int) -> tuple[tuple[Any, ...], ...]:
    """x, weight, norm_scale and residual of every call."""

    def make(copy: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(copy), 4)
        x = jax.random.normal(keys[0], (rows, size.inner), jnp.bfloat16)
        scale = 1 + 0.1 * jax.random.normal(keys[2], (size.inner,)) if size.norm else None
        out = size.columns // 2 if size.gated else size.columns
        residual = jax.random.normal(keys[3], (rows, out), jnp.bfloat16) if size.residual else None
        return x, weight(size, copy), scale, residual

    return tuple(make(copy) for copy in range(size.copies))


@functools.cache
def weight(size: Size, copy: int) -> Any:
    make = jax.jit(lambda key: jax.random.normal(key, (size.columns, size.inner), jnp.bfloat16) / size.inner**0.5)
    return make(jax.random.key(1000 + copy)).astype(jnp.bfloat16)


def plain(size: Size) -> Run:
    """As decoding is written without this operation, in the dtype of the weights."""

    def one(x: Any, weight: Any, scale: Any, residual: Any) -> Any:
        if size.norm:
            wide = x.astype(jnp.float32)
            rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
            x = (wide * rstd * scale[None]).astype(x.dtype)
        out = jnp.einsum("...i,oi->...o", x, weight)
        if size.gated:
            gate, up = jnp.split(out, 2, axis=-1)
            out = jax.nn.silu(gate) * up
        return out if residual is None else out + residual

    return one


def ours(size: Size, platform: str, config: Any = None) -> Run:
    cfg = None if config is None else dataclasses.asdict(config)
    options: dict[str, Any] = {"activation": "silu" if size.gated else None, "platform": platform, "cfg": cfg}
    return lambda x, weight, scale, residual: ejkernel.fused_linear(x, weight, scale, residual=residual, **options)


def exact(size: Size, rows: int) -> np.ndarray:
    """Some columns of the first call's result, in float64."""
    x, weight, scale, residual = arrays(size, rows)[0]
    x = np.asarray(x, np.float64)
    if scale is not None:
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * np.asarray(scale, np.float64)
    columns = size.columns // 2 if size.gated else size.columns
    ends = checked(columns)
    out = x @ np.asarray(weight[ends], np.float64).T
    if size.gated:
        out = out / (1 + np.exp(-out)) * (x @ np.asarray(weight[columns + ends], np.float64).T)
    return out if residual is None else out + np.asarray(residual[:, ends], np.float64)


def checked(columns: int) -> np.ndarray:
    return np.unique(np.r_[0 : min(CHECKED, columns), max(0, columns - CHECKED) : columns])


def brief(config: Any) -> str:
    """`fma 4x2048 w4` or `mma 16x512 w4 s4`."""
    stages = f" s{config.num_stages}" if config.mma else ""
    return f"{'mma' if config.mma else 'fma'} {config.block_n}x{config.block_k} w{config.num_warps}{stages}"


def beside(sizes: tuple[Size, ...], numbers: tuple[int, ...]) -> Iterator[Problem]:
    """Every size with each platform's default config."""
    for rows, size in itertools.product(numbers, sizes):
        yield size, rows, "plain", plain(size)
        yield size, rows, "xla", ours(size, "xla")
        yield size, rows, "triton", ours(size, "triton")


def swept(sizes: tuple[Size, ...], rows: int) -> Iterator[Problem]:
    """Every config of the search space."""
    from ejkernel_triton.fused_linear import config

    for size in sizes:
        shapes = [None if each is None else jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays(size, rows)[0]]
        activation = "silu" if size.gated else None
        call = OPERATION.canonicalise(*map(zeros, shapes[:3]), residual=zeros(shapes[3]), activation=activation).call
        for one in config.search_space(call, resolve_target(())):
            yield size, rows, brief(one), ours(size, "triton", one)


def zeros(shape: Any) -> Any:
    return None if shape is None else np.broadcast_to(np.zeros((), shape.dtype), shape.shape)


def rounds(small: bool) -> Iterator[list[Problem]]:
    """What matters most comes first: one round compiles at a time, and nothing compiles while one is timed."""
    if small:
        yield [*beside(SMALL, (1, 5)), *swept(SMALL, 1)]
        return
    yield [*beside(SIZES, (1, 16))]
    yield [*beside(SIZES[:4], (2, 4, 8))]
    yield [*beside(SIZES, (64,)), *beside(SIZES[:4], (32,))]
    yield [*beside(WIDER, (1, 16))]
    yield [*swept(SIZES[:4], 64)]
    yield [*swept(SIZES[:4], 4)]
    yield [*swept(SIZES, 1)]
    yield [*swept(SIZES[:4], 16)]
    yield [*swept(WIDER, 1)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--budget", type=float, default=80)
    parser.add_argument("--threads", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    right = functools.cache(exact)

    def compiled(problem: Problem) -> Any:
        size, number, _, run = problem
        if time.monotonic() - begin > options.budget:
            return None
        return jax.jit(lambda calls: [run(*call) for call in calls]).lower(arrays(size, number)).compile()

    left_out = 0
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        for problems in rounds(options.small):
            if time.monotonic() - begin > options.budget:
                left_out += len(problems)
                continue
            for size, number, _, _ in problems:
                arrays(size, number)  # by one thread
            futures = [pool.submit(compiled, one) for one in problems]
            concurrent.futures.wait(futures)
            for (size, number, name, _), future in zip(problems, futures, strict=True):
                row: dict[str, Any] = {"size": size.name, "rows": number, "run": name}
                try:
                    program = future.result()
                    if program is None or time.monotonic() - begin > options.budget:
                        left_out += 1
                        continue
                    given = arrays(size, number)
                    first = program(given)[0]
                    found, wanted = np.asarray(first[:, checked(first.shape[1])], np.float64), right(size, number)
                    row["error"] = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
                    if not options.small:
                        total, kernels = device_times(program, (given,), options.repeats)
                        row["us"] = 1e6 * total / size.copies
                        row["kernels_us"] = {name: 1e6 * each / size.copies for name, each in kernels.items()}
                        row["gb_per_s"] = size.bytes / row["us"] / 1e3
                except Exception as error:  # noqa: BLE001 - a config that fails is a result
                    row["failed"] = f"{type(error).__name__}: {error}"[:500]
                rows.append(row)
                shown = [
                    f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items() if key != "kernels_us"
                ]
                print(f"{time.monotonic() - begin:5.0f}", *shown, flush=True)
            sizes = {size.name: [size.columns, size.inner] for size in (*SIZES, *WIDER)}
            versions = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
            text = json.dumps({"versions": versions, "weights": sizes, "rows": rows, "left_out": left_out}, indent=1)
            pathlib.Path(options.out, "few_rows.json").write_text(text)
    print(f"{left_out} left out after {options.budget} s", flush=True)


if __name__ == "__main__":
    main()
