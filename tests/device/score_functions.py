"""Score and mask functions on a real GPU: errors against float64, times beside attention without them and beside FlexAttention.

    python tests/device/score_functions.py --out results

B1 H16 D128 in bfloat16, forward and with gradients of query, key and value; `gates` also with that of the gates. Device time by
CUPTI for JAX; FlexAttention by CUDA events around ten calls, with its block mask. Prints a line for each measurement and writes
`score_functions.json` under `--out` (or `$OUT`). `--length` tokens (8192), `--budget` seconds after which nothing new is started
(200), `--small` for short sequences without times, which a CPU can run.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel

HEADS, SIZE = 16, 128
SLOPES = 2.0 ** -np.arange(1, HEADS + 1, dtype=np.float32)
Attend = Callable[[Any, Any, Any, Any], Any]


def ours(platform: str | None = "triton", **options: Any) -> Attend:
    return lambda q, k, v, gates: ejkernel.flash_attention(q, k, v, platform=platform, **options)


def forgetting(q: Any, k: Any, v: Any, gates: Any) -> Any:
    return ejkernel.flash_attention(q, k, v, forget_gate=gates, causal=True, platform="triton")


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def in_window(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query >= key) & (query - key < 1024)


def of_documents(length: int) -> Callable[..., Any]:
    documents = jnp.asarray(np.arange(length) // (length // 8), jnp.int32)
    return lambda batch, head, query, key: (query >= key) & (documents[query] == documents[key])


def programs(length: int) -> dict[str, tuple[Attend, str]]:
    """Ours, and which of FlexAttention's stands beside it."""
    return {
        "causal": (ours(causal=True), "causal"),
        "causal, the default": (ours(None, causal=True), "causal"),
        "causal by mask_mod": (ours(mask_mod=causal), "causal"),
        "window": (ours(causal=True, sliding_window=(1023, 0)), "window"),
        "window by mask_mod": (ours(mask_mod=in_window), "window"),
        "documents by mask_mod": (ours(mask_mod=of_documents(length)), "documents"),
        "soft cap": (ours(causal=True, logits_soft_cap=30.0), "soft cap"),
        "soft cap by score_mod": (ours(causal=True, score_mod=lambda s, b, h, i, j: 30 * jnp.tanh(s / 30)), "soft cap"),
        "alibi": (ours(causal=True, alibi_slopes=jnp.asarray(SLOPES)), "alibi"),
        "gates": (forgetting, ""),
    }


def exact(name: str, length: int, arrays: Any) -> Any:
    """The outputs in float64, of the first head alone."""
    q, k, v = (np.asarray(array, np.float64)[0, :, 0] for array in arrays[:3])
    gates = np.asarray(arrays[3], np.float64)[0, 0]
    index = np.arange(length)
    distance = index[:, None] - index[None]
    scores = q @ k.T / SIZE**0.5
    seen = distance >= 0
    if "window" in name:
        seen &= distance < 1024
    if "documents" in name:
        seen &= (index[:, None] // (length // 8)) == (index[None] // (length // 8))
    if "cap" in name:
        scores = 30 * np.tanh(scores / 30)
    if name == "alibi":
        scores = scores - SLOPES[0] * abs(distance)
    if name == "gates":
        total = np.cumsum(gates)
        scores = scores + total[:, None] - total[None]
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def flex_times(which: str, length: int) -> tuple[float, float]:
    """Seconds of FlexAttention, forward and with gradients."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = torch.tensor(SLOPES, device="cuda")
    documents = torch.arange(length, device="cuda") // (length // 8)
    masks = {
        "window": lambda b, h, i, j: (i >= j) & (i - j < 1024),
        "documents": lambda b, h, i, j: (i >= j) & (documents[i] == documents[j]),
    }
    scores = {
        "soft cap": lambda s, b, h, i, j: 30 * torch.tanh(s / 30),
        "alibi": lambda s, b, h, i, j: s - slopes[h] * (i - j),
    }
    mask = create_block_mask(masks.get(which, lambda b, h, i, j: i >= j), None, None, length, length, device="cuda")
    flex = torch.compile(flex_attention)
    q, k, v = (torch.randn(1, HEADS, length, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    weights = torch.randn_like(q)

    def forward() -> Any:
        with torch.no_grad():
            return flex(q, k, v, score_mod=scores.get(which), block_mask=mask)

    def both() -> Any:
        out = flex(q, k, v, score_mod=scores.get(which), block_mask=mask)
        return torch.autograd.grad(out, (q, k, v), weights)

    def seconds(run: Callable[[], Any]) -> float:
        for _ in range(3):
            run()
        found = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(10):
                run()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 1e4)
        return float(np.median(found))

    return seconds(forward), seconds(both)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--budget", type=float, default=200)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    start, length = time.time(), 64 if arguments.small else arguments.length
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((1, length, HEADS, SIZE)), jnp.bfloat16) for _ in range(3)]
    arrays.append(jnp.asarray(-np.log1p(np.exp(rng.standard_normal((1, HEADS, length)) - 4)), jnp.float32))
    device = jax.devices()[0]
    document: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "length": length, "rows": []}
    wrong, beside = 0, {}
    for name, (attend, flex) in programs(length).items():
        if time.time() - start > arguments.budget:
            document.setdefault("not reached", []).append(name)
            continue
        row: dict[str, Any] = {"name": name}
        places = (0, 1, 2, 3) if name == "gates" else (0, 1, 2)
        gradient = jax.jit(jax.grad(lambda *x, attend=attend: jnp.sum(attend(*x).astype(jnp.float32) ** 2), argnums=places))
        forward = jax.jit(attend)
        try:
            got = np.asarray(forward(*arrays), np.float64)[0, :, 0]
            right = exact(name, length, arrays)
            row["error"] = float(np.linalg.norm(got - right) / np.linalg.norm(right))
            wrong += row["error"] > 5e-3
            found = jax.tree.map(lambda x: bool(jnp.isfinite(x.astype(jnp.float32)).all()), gradient(*arrays))
            row["finite gradients"] = all(found)
            if not arguments.small:
                from kernel_times import device_times

                row["forward"], _ = device_times(forward, tuple(arrays))
                row["both"], row["kernels"] = device_times(gradient, tuple(arrays))
                if flex and flex not in beside:
                    beside[flex] = flex_times(flex, length)
                if flex:
                    row["FlexAttention"] = dict(zip(("forward", "both"), beside[flex], strict=True))
        except Exception as error:  # noqa: BLE001 - the others are still worth their time
            row["failed"] = f"{type(error).__name__}: {error}"[:2000]
            wrong += 1
        document["rows"].append(row)
        print(json.dumps(row), flush=True)
    pathlib.Path(arguments.out).mkdir(parents=True, exist_ok=True)
    (pathlib.Path(arguments.out) / "score_functions.json").write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
