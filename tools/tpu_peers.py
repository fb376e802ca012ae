"""Other libraries' TPU kernels on the benchmark cases, compiled as ours are: JAX's own flash attention, splash attention and
megablox, and XLA without any kernel. Nothing here runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.case import Case
from ejkernel.testing.shapes import shapes_of
from ejkernel_pallas import _ahead_of_time as aot

Entry = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A peer's name, its forward function of floating arrays, and those."""


_FORWARD_ONLY = ("jax flash_attention",)
"""Whose backward takes minutes to compile."""


def compiled(operation: str, cases: Iterable[Case], dtypes: Iterable[str], kind: str, *, listings: Path) -> Iterator[aot.Row]:
    """Both phases of every peer; backward is what gradients take, with as much of forward as they need."""
    device = aot.device_of(kind)
    for case, dtype in itertools.product(cases, dtypes):
        for name, run, arrays in _PEERS.get(operation, lambda *_: ())(case, dtype):
            row = aot.Row(operation, case.name, dtype, "forward", kind, peer=name)
            yield aot.compiled_row(row, device, run, *arrays, listings=listings)
            if name in _FORWARD_ONLY:
                continue
            row = dataclasses.replace(row, phase="backward")
            yield aot.compiled_row(row, device, functools.partial(_gradients, run), *arrays, listings=listings)


def _gradients(run: Callable[..., Any], *arrays: Any) -> Any:
    out, pull = jax.vjp(run, *arrays)
    return pull(jnp.ones_like(out))


def _attention(case: Case, dtype: str) -> Iterator[Entry]:
    arrays = shapes_of(case, dtype)
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    options = dict(case.options)
    scale, group = query.shape[3] ** -0.5, query.shape[2] // key.shape[2]
    window, cap = options.get("sliding_window"), options.get("logits_soft_cap")
    causal = options.get("causal", False)
    if window is None and cap is None:
        from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

        def flash(query: Any, key: Any, value: Any) -> Any:
            query, key, value = (jnp.swapaxes(array, 1, 2) for array in (query, key, value))
            key, value = (jnp.repeat(array, group, axis=1) for array in (key, value))
            return jnp.swapaxes(flash_attention(query, key, value, causal=causal, sm_scale=scale), 1, 2)

        yield "jax flash_attention", flash, (query, key, value)
    yield "jax splash_attention", _splash(query, key, causal, window, cap, scale), (query, key, value)


def _splash(query: Any, key: Any, causal: bool, window: Any, cap: float | None, scale: float) -> Callable[..., Any]:
    """Its lists of blocks are made here, outside of any program."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape, heads, group = (query.shape[1], key.shape[1]), query.shape[2], query.shape[2] // key.shape[2]
    mask: Any = splash.CausalMask(shape) if causal else splash.FullMask(shape)
    mask = mask if window is None else splash.LocalMask(shape, window, 0)
    kernel = (splash.make_splash_mha if group == 1 else splash.make_splash_mqa)(
        splash.MultiHeadMask([mask] * (heads if group == 1 else group)),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=cap,
        block_sizes=_splash_blocks(),
    )

    def run(query: Any, key: Any, value: Any) -> Any:
        query, key, value = (jnp.swapaxes(array, 1, 2) for array in (query * scale, key, value))  # [B, H, T, D]
        if group == 1:
            out = jax.vmap(kernel)(query, key, value)
        else:
            grouped = query.reshape(query.shape[0], -1, group, *query.shape[2:])
            out = jax.vmap(jax.vmap(kernel))(grouped, key, value).reshape(query.shape)
        return jnp.swapaxes(out, 1, 2)

    return run


def _splash_blocks() -> Any:
    """Blocks of 512, gradients of keys and queries in one kernel each, as its users set them."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    return splash.BlockSizes(**{f"block_{name}": 512 for name in names})


def _product(case: Case, dtype: str) -> Iterator[Entry]:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    arrays = shapes_of(case, dtype)
    lhs, rhs, sizes = (arrays[name] for name in ("lhs", "rhs", "group_sizes"))
    tiling = (512, min(1024, lhs.shape[1]), min(1024, rhs.shape[2]))

    def megablox(lhs: Any, rhs: Any) -> Any:
        groups = jnp.full(sizes.shape, lhs.shape[0] // sizes.shape[0], jnp.int32)
        return gmm(lhs, rhs, groups, jnp.dtype(dtype), tiling)

    yield "jax megablox", megablox, (lhs, rhs)
    yield "jax.lax.ragged_dot", lambda lhs, rhs: jax.lax.ragged_dot(lhs, rhs, jnp.full(sizes.shape, 1, jnp.int32)), (lhs, rhs)


def _norm(case: Case, dtype: str) -> Iterator[Entry]:
    arrays = shapes_of(case, dtype)

    def plain(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        normalised = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return (normalised * scale.astype(jnp.float32)).astype(x.dtype)

    yield "XLA", plain, (arrays["x"], arrays["scale"])


_PEERS: dict[str, Callable[[Case, str], Iterable[Entry]]] = {
    "flash_attention": _attention,
    "grouped_matmul": _product,
    "rms_norm": _norm,
}
