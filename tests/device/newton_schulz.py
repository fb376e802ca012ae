"""`newton_schulz` on a real GPU: times of plain JAX, our XLA and Triton over its configs, and errors against float64.

    python tests/device/newton_schulz.py --out results

Plain JAX is what `optax.contrib.muon` runs, in bfloat16. Device time is by CUPTI, in all and of each kernel. Prints a line for each
measurement and writes `newton_schulz.json` under `--out` (or `$OUT`). `--budget` seconds after which nothing new is started (60),
`--threads` that compile (8), `--small` for tiny shapes without times, which a CPU can run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_times import device_times

import ejkernel
from ejkernel.operations.newton_schulz.interface import COEFFICIENTS, OPERATION, STEPS
from ejkernel.targets import resolve_target

SHAPES: tuple[tuple[int, ...], ...] = ((24, 2048, 5504), (24, 2048, 2048), (1, 2048, 2048), (1, 4096, 11008))
SMALL: tuple[tuple[int, ...], ...] = ((2, 32, 48), (1, 40, 40))
Run = Callable[[Any], Any]


def iterate(x: Any) -> Any:
    """The steps in the dtype of x, which is not tall."""
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def plain(x: Any) -> Any:
    narrow = x.astype(jnp.bfloat16)
    return iterate(narrow / (jnp.linalg.norm(narrow, axis=(-2, -1), keepdims=True) + 1e-7)).astype(x.dtype)


def exact(x: Any) -> np.ndarray:
    """Of one matrix, in float64."""
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(x, np.float64))
        with jax.default_matmul_precision("highest"):
            return np.asarray(jax.jit(lambda x: iterate(x / (jnp.linalg.norm(x) + 1e-7)))(wide))


def ours(platform: str, config: Any = None, dtype: str = "bfloat16") -> Run:
    cfg = None if config is None else dataclasses.asdict(config)
    return lambda x: ejkernel.newton_schulz(x, platform=platform, cfg=cfg, dtype=dtype)


def brief(config: Any) -> str:
    """`gram 128x128x64 w8 s4 tma | update 128x256x64 w8 s3 tma swizzle8`."""

    def one(tile: Any) -> str:
        sizes = f"{tile.block_m}x{tile.block_n}x{tile.block_k} w{tile.num_warps} s{tile.num_stages}"
        return f"{sizes} {'tma' if tile.tma else 'pointers'}"

    return f"gram {one(config.gram)} | update {one(config.update)} swizzle{config.update_l2_swizzle}"


def beside(small: bool) -> Iterator[tuple[tuple[int, ...], str, Run]]:
    """Every shape with each platform's default config, then in float32."""
    for shape in SMALL if small else SHAPES:
        yield shape, "plain", plain
        yield shape, "xla", ours("xla")
        yield shape, "triton", ours("triton")
    for platform in ("xla", "triton"):
        yield (SMALL if small else SHAPES)[2 - small], f"{platform} float32", ours(platform, dtype="float32")


def swept(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str, Run]]:
    """Every config of the search space."""
    from ejkernel_triton.newton_schulz import config

    call = OPERATION.canonicalise(jax.ShapeDtypeStruct(shape, jnp.float32)).call
    for one in config.search_space(call, resolve_target(())):
        yield shape, brief(one), ours("triton", one)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--budget", type=float, default=60)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    arrays = {shape: jax.random.normal(jax.random.key(0), shape, jnp.float32) for shape in (SMALL if options.small else SHAPES)}
    right = {shape: exact(x[0]) for shape, x in arrays.items()}
    print(f"float64 {time.monotonic() - begin:.0f} s", flush=True)

    def compiled(problem: tuple[tuple[int, ...], str, Run]) -> Any:
        if time.monotonic() - begin > options.budget:
            return None
        shape, _, run = problem
        return jax.jit(run).lower(arrays[shape]).compile()

    left_out = 0
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        for problems in (beside(options.small), *(swept(shape) for shape in arrays)):  # nothing is compiled while one is timed
            named = [*problems]
            for (shape, name, _), future in zip(
                named, [*map(settled, [pool.submit(compiled, one) for one in named])], strict=True
            ):
                row: dict[str, Any] = {"shape": list(shape), "run": name}
                try:
                    program = future.result()
                    if program is None or time.monotonic() - begin > options.budget:
                        left_out += 1
                        continue
                    found = np.asarray(program(arrays[shape])[0], np.float64)
                    row["error"] = float(np.linalg.norm(found - right[shape]) / np.linalg.norm(right[shape]))
                    if not options.small:
                        total, kernels = device_times(program, (arrays[shape],), options.repeats)
                        row["ms"], row["kernels_ms"] = 1e3 * total, {name: 1e3 * each for name, each in kernels.items()}
                        general = 2 * shape[0] * shape[1] ** 2 * (2 * shape[2] + shape[1]) * STEPS
                        row["general_tflops"] = general / row["ms"] / 1e9
                except Exception as error:  # noqa: BLE001 - a config that fails is a result
                    row["failed"] = f"{type(error).__name__}: {error}"[:500]
                rows.append(row)
                shown = [
                    f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items() if key != "kernels_ms"
                ]
                print(f"{time.monotonic() - begin:5.0f}", *shown, flush=True)
                versions = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
                text = json.dumps({"versions": versions, "rows": rows, "left_out": left_out}, indent=1)
                pathlib.Path(options.out, "newton_schulz.json").write_text(text)


def settled(future: concurrent.futures.Future[Any]) -> concurrent.futures.Future[Any]:
    concurrent.futures.wait([future])
    return future


if __name__ == "__main__":
    main()
