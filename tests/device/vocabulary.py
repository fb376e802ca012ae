"""Losses of a vocabulary and two fused norms on a real GPU: times and memory of Triton, of our XLA and of plain JAX.

    python tests/device/vocabulary.py --out results

`fused_add_rms_norm`, `fused_qk_norm_rope`, a reduced cross entropy of hidden states (beside that of logits that a plain product
makes, by us and in plain JAX), log-probabilities of tokens, and the Kullback-Leibler divergence; each forward, or forward and
backward. Device time is by CUPTI, temporaries are XLA's. Errors are relative, in the norm, to the first run of a group. Prints a
line for each measurement and writes `vocabulary.json` under `--out` (or `$OUT`). `--budget` seconds after which nothing new is
started (90), `--threads` that compile (8), `--small` for tiny shapes without times, which a CPU can run (with
`EJKERNEL_TRITON_INTERPRET=1`), `--only` groups whose names have this in them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from kernel_times import device_times

import ejkernel


@dataclasses.dataclass(frozen=True)
class Group:
    """Programs of the same arrays; `differentiated` of which come first, others in `rest`."""

    name: str
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    runs: Mapping[str, Callable[..., Any]]

    @functools.cached_property
    def arrays(self) -> list[Any]:
        keys = jax.random.split(jax.random.key(0), len(self.shapes))

        def one(key: Any, shape: tuple[int, ...], kind: str) -> Any:
            if kind.startswith("below "):
                return jax.random.randint(key, shape, 0, int(kind.removeprefix("below ")))
            width = shape[0] ** -0.5 if kind == "head" else 1.0
            return width * jax.random.normal(key, shape, jnp.bfloat16)

        return [one(key, *each) for key, each in zip(keys, self.shapes.values(), strict=True)]


def both(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """All results and the gradients by the first arrays, with cotangents that are the results themselves."""

    def run(*arrays: Any) -> Any:
        found, pull = jax.vjp(lambda *first: function(*first, *arrays[count:]), *arrays[:count])
        return found, pull(found)

    return run


def phases(name: str, shapes: Any, runs: Mapping[str, Callable[..., Any]], count: int) -> list[Group]:
    return [
        Group(f"{name} forward", shapes, runs),
        Group(f"{name} forward+backward", shapes, {key: both(run, count) for key, run in runs.items()}),
    ]


def on_platforms(function: Callable[..., Any], **options: Any) -> dict[str, Callable[..., Any]]:
    return {name: functools.partial(function, platform=name, **options) for name in ("xla", "triton")}


def rows_groups(small: bool) -> list[Group]:
    found = []
    for rows, width in ((16, 64),) if small else ((16384, 4096), (131072, 128)):
        whole = ((rows, width), "normal")
        shapes = {"x": whole, "residual": whole, "scale": ((width,), "normal")}
        found += phases(f"add_rms_norm {rows}x{width}", shapes, on_platforms(ejkernel.fused_add_rms_norm), 3)
    batch, length, heads, keys, width = (2, 5, 4, 2, 16) if small else (4, 8192, 32, 8, 128)
    angles, scale = ((length, width // 2), "normal"), ((width,), "normal")
    shapes = {
        "q": ((batch, length, heads, width), "normal"),
        "k": ((batch, length, keys, width), "normal"),
        "q_scale": scale,
        "k_scale": scale,
        "cos": angles,
        "sin": angles,
    }

    def fused(q: Any, k: Any, q_scale: Any, k_scale: Any, cos: Any, sin: Any, **options: Any) -> Any:
        return ejkernel.fused_qk_norm_rope(q, k, cos, sin, q_scale, k_scale, **options)

    return found + phases(f"qk_norm_rope {batch}x{length}x{heads}+{keys}x{width}", shapes, on_platforms(fused), 4)


def hidden_loss(x: Any, head: Any, targets: Any, **options: Any) -> Any:
    return ejkernel.fused_cross_entropy(hidden=x, lm_head_weight=head, targets=targets, **options).loss


def logits_loss(x: Any, head: Any, targets: Any, **options: Any) -> Any:
    return ejkernel.fused_cross_entropy(x @ head, targets, **options).loss


def plain_loss(x: Any, head: Any, targets: Any) -> Any:
    logs = jax.nn.log_softmax((x @ head).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logs, targets[:, None], axis=-1))


def chunked(rows: int, block: int, warps: int, stages: int = 1) -> Callable[..., Any]:
    cfg = {"rows": rows, "block": block, "num_warps": warps, "num_stages": stages}
    return functools.partial(hidden_loss, platform="triton", cfg=cfg)


def loss_groups(small: bool) -> list[Group]:
    rows, width, vocabulary = (8, 16, 96) if small else (8192, 4096, 128256)
    size = f"{rows}x{width}x{vocabulary}"
    x, head, targets = ((rows, width), "normal"), ((width, vocabulary), "head"), ((rows,), f"below {vocabulary}")
    shapes = {"x": x, "head": head, "targets": targets}
    sides = {
        "xla": functools.partial(hidden_loss, platform="xla"),
        "triton": functools.partial(hidden_loss, platform="triton"),
        "triton float32 logits": functools.partial(hidden_loss, platform="triton", precision="highest"),
        "cross_entropy(x @ head) triton": functools.partial(logits_loss, platform="triton"),
        "cross_entropy(x @ head) plain": plain_loss,
    }
    configs = ((4, 32, 1), (2, 16, 1)) if small else ((1024, 16384, 32), (4096, 16384, 32), (8192, 16384, 32), (2048, 8192, 16))
    swept = {"triton cfg " + "x".join(map(str, each)): chunked(*each) for each in configs}
    if not small:
        swept["triton cfg 2048x16384x32 staged"] = chunked(2048, 16384, 32, 2)
    few = {name: run for name, run in sides.items() if name in ("xla", "triton") or "x @ head" in name}
    found = [
        Group(f"linear_cross_entropy {size} forward+backward", shapes, {n: both(run, 2) for n, run in (sides | swept).items()}),
        Group(f"linear_cross_entropy {size} forward", shapes, few),
    ]

    def logprobs(x: Any, head: Any, targets: Any, **options: Any) -> Any:
        return ejkernel.token_logprobs(x, head, targets, **options)

    found += phases(f"token_logprobs {size}", shapes, on_platforms(logprobs), 2)
    rows = rows // 2
    logits = ((rows, vocabulary), "normal")

    def of_logits(student: Any, teacher: Any, **options: Any) -> Any:
        return ejkernel.fused_kl_divergence(student, teacher, **options).loss

    def of_hidden(x: Any, head: Any, y: Any, other: Any, **options: Any) -> Any:
        sides = {"student_hidden": x, "student_head": head, "teacher_hidden": y, "teacher_head": other}
        return ejkernel.fused_kl_divergence(**sides, **options).loss

    found += phases(f"kl_divergence {rows}x{vocabulary}", {"student": logits, "teacher": logits}, on_platforms(of_logits), 1)
    states = ((rows, width), "normal")
    shapes = {"x": states, "head": head, "y": states, "other": head}
    return found + phases(f"kl_divergence {rows}x{width}x{vocabulary}", shapes, on_platforms(of_hidden), 2)


@jax.jit
def deviations(found: Any, right: Any) -> list[Any]:
    def one(value: Any, like: Any) -> Any:
        value, like = (jnp.ravel(each).astype(jnp.float32) for each in (value, like))
        return jnp.sqrt(jnp.sum((value - like) ** 2)) / jnp.maximum(jnp.sqrt(jnp.sum(like**2)), 1e-30)

    return jax.tree.leaves(jax.tree.map(one, found, right))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--budget", type=float, default=90)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    groups = [group for group in (*loss_groups(options.small), *rows_groups(options.small)) if options.only in group.name]

    def compiled(group: Group, run: Callable[..., Any]) -> Any:
        if time.monotonic() - begin > options.budget:
            return None
        return jax.jit(run).lower(*group.arrays).compile()

    left_out = 0
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        for group in groups:
            if time.monotonic() - begin > options.budget:
                left_out += len(group.runs)
                continue
            jax.block_until_ready(group.arrays)
            futures = {name: pool.submit(compiled, group, run) for name, run in group.runs.items()}
            concurrent.futures.wait(futures.values())  # nothing is compiled while one is timed
            right = None
            for name, future in futures.items():
                row: dict[str, Any] = {"group": group.name, "run": name}
                try:
                    program = future.result()
                    if program is None or time.monotonic() - begin > options.budget:
                        left_out += 1
                        continue
                    found = program(*group.arrays)
                    right = found if right is None else right
                    row["errors"] = [float(value) for value in deviations(found, right)]
                    del found
                    memory = program.memory_analysis()
                    row["temporary_mib"] = memory.temp_size_in_bytes / 2**20 if memory else None
                    if not options.small:
                        total, kernels = device_times(program, tuple(group.arrays), options.repeats)
                        row["ms"], row["kernels_ms"] = 1e3 * total, {name: 1e3 * each for name, each in kernels.items()}
                except Exception as error:  # noqa: BLE001 - a program that fails is a result
                    row["failed"] = f"{type(error).__name__}: {error}"[:500]
                rows.append(row)
                largest = max(row["errors"], default=0.0) if "errors" in row else float("nan")
                times = f"{row['ms']:8.3f} ms" if "ms" in row else "        ms"
                shown = f"{times} {row.get('temporary_mib') or 0:8.0f} MiB  error {largest:.1e}"
                print(f"{time.monotonic() - begin:4.0f} {group.name}: {name:32} {shown} {row.get('failed', '')}", flush=True)
                slowest = sorted(row.get("kernels_ms", {}).items(), key=lambda item: -item[1])[:4]
                if slowest:
                    print("       ", "; ".join(f"{key[:44]} {value:.3f}" for key, value in slowest), flush=True)
                versions = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
                text = json.dumps({"versions": versions, "rows": rows, "left_out": left_out}, indent=1)
                pathlib.Path(options.out, "vocabulary.json").write_text(text)
            right = None
            group.__dict__.pop("arrays", None)  # the next group needs the memory
    print(f"left out: {left_out}", flush=True)


if __name__ == "__main__":
    main()
