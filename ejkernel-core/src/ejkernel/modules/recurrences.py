"""Linear attention: recurrences of matrix states with decays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel.call.policy import PlatformChoice
from ejkernel.compositions.mesh import over_mesh
from ejkernel.errors import argument_names, invalid, wrong_type
from ejkernel.modules._class_api import class_form
from ejkernel.operations.linear_recurrence.interface import OPERATION as _LINEAR_RECURRENCE


@argument_names(scale="softmax_scale")
def recurrent_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    gk: jax.Array | None = None,
    gv: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: PlatformChoice = None,
    cfg: Any = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Any:
    """Linear attention with decays: `o_t = scale S_t^T q_t` with a state `S` per head that forgets and learns.

    `S_t = exp(g_t + g_gamma) diag(exp gk_t) S_(t-1) diag(exp gv_t) + k_t v_t^T`.

    Decays are logarithms: 0 keeps the state, -inf is not allowed, and positive values, growth, are computed as they are for
    as long as the state stays finite. Absent decays are 0. With H heads of query, key and value may have K heads, K a divisor
    of H, each shared by H / K consecutive heads of query; every decay has H or K heads.

    Args:
        query: `[B,T,H,D]`, float32, bfloat16 or float16; any length.
        key: `[B,T,K,D]`.
        value: `[B,T,K,V]`.
        g: log decay per token and head `[B,T,H]`.
        g_gamma: log decay per head `[H]`, or `[B,H]` or `[1,H]`.
        gk: log decay per token and key channel `[B,T,K,D]`.
        gv: log decay per token and value channel `[B,T,K,V]`.
        initial_state: the state before the first token `[B,H,D,V]`, or `[n,H,D,V]` with cu_seqlens; None = zeros.
        cu_seqlens: cumulative lengths of packed sequences, integers `[n + 1]`, from 0 to at most T, with B = 1; may be traced.
            Each sequence has a state of its own. Tokens after the last one take no part, whatever they hold.
        softmax_scale: factor of the output; None = `1 / sqrt(D)`.
        reverse: run every sequence from its last token to its first.
        return_state: also return the last state.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.
        mesh: a `jax.sharding.Mesh`: run inside `shard_map` over it. Batch and heads may be split, alike in all arrays.
        in_specs: with mesh, one PartitionSpec or None for each positional array.
        out_specs: with mesh, a PartitionSpec, or a tuple of two with return_state.

    Returns:
        `[B,T,H,V]` in the dtype of value; with return_state a tuple with the last state, float32, shaped like initial_state.

    Raises:
        ValueError: a shape does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends beyond T.
        TypeError: a dtype does not fit.
        NoKernelError: no admitted platform supports the call.

    Source: Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, 2023.
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "g": g,
        "g_gamma": g_gamma,
        "gk": gk,
        "gv": gv,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"scale": softmax_scale, "reverse": reverse, "return_state": return_state, "platform": platform, "cfg": cfg}
    return over_mesh(
        _recurrence,
        arrays,
        options,
        positional=tuple(arrays),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        dims=_dims(cu_seqlens, g_gamma),
    )


def _dims(cu_seqlens: Any, g_gamma: Any) -> dict[str, str]:
    """The axes of the arrays, for `over_mesh`."""
    state = "b h d v" if cu_seqlens is None else "n h d v"
    dims = {"query": "b t h d", "key": "b t h d", "value": "b t h v", "g": "b t h", "gk": "b t h d", "gv": "b t h v"}
    dims["g_gamma"] = "h" if len(getattr(g_gamma, "shape", ())) == 1 else "b h"
    return {**dims, "initial_state": state, "cu_seqlens": "s"}


def _recurrence(*, platform: PlatformChoice, cfg: Any, scale: Any, reverse: bool, return_state: bool, **arrays: Any) -> Any:
    options = {"scale": scale, "reverse": reverse, "return_state": return_state}
    return _LINEAR_RECURRENCE.invoke(arrays, options, platform=platform, cfg=cfg)


@argument_names(scale="softmax_scale", gk="g")
def gla_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: PlatformChoice = None,
    cfg: Any = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Any:
    """Gated linear attention: `S_t = diag(exp g_t) S_(t-1) + k_t v_t^T`, `o_t = scale S_t^T q_t`.

    Args:
        query: `[B,T,H,D]`, float32, bfloat16 or float16; any length.
        key: `[B,T,K,D]`; K divides H.
        value: `[B,T,K,V]`.
        g: log gate per key channel `[B,T,K,D]`, or per head `[B,T,H]`: its number of axes says which;
            -inf is not allowed.
        g_gamma: log decay per head `[H]` or `[B,H]`, in addition.
        initial_state: `[B,H,D,V]`, or `[n,H,D,V]` with cu_seqlens; None = zeros.
        cu_seqlens: cumulative lengths of packed sequences, integers `[n + 1]`, B = 1; as for `recurrent_attention`.
        softmax_scale: factor of the output; None = `1 / sqrt(D)`.
        reverse: run every sequence from its last token to its first.
        return_state: also return the last state.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.
        mesh: a `jax.sharding.Mesh`: run inside `shard_map` over it. Batch and heads may be split, alike in all arrays.
        in_specs: with mesh, one PartitionSpec or None for each positional array.
        out_specs: with mesh, a PartitionSpec, or a tuple of two with return_state.

    Returns:
        `[B,T,H,V]`; with return_state a tuple with the last state, float32.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
        NoKernelError: no admitted platform supports the call.

    Source: Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, 2023.
    """
    per_channel = getattr(g, "ndim", 0) == 4
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "gk" if per_channel else "g": g,
        "g_gamma": g_gamma,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"scale": softmax_scale, "reverse": reverse, "return_state": return_state, "platform": platform, "cfg": cfg}
    return over_mesh(
        _recurrence,
        arrays,
        options,
        positional=tuple(arrays),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        dims=_dims(cu_seqlens, g_gamma),
    )


@argument_names(scale="softmax_scale")
def lightning_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    *,
    layer_idx: int,
    num_layers: int,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: PlatformChoice = None,
    cfg: Any = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Any:
    """Linear attention with a decay per head that the layer sets: `g_gamma_h = -(8 / H) (1 - layer_idx / num_layers) h`.

    Heads count from 0, so head 0 never forgets, and so do layers. `S_t = exp(g_gamma_h) S_(t-1) + k_t v_t^T`,
    `o_t = scale S_t^T q_t`.

    Args:
        query: `[B,T,H,D]`, float32, bfloat16 or float16; any length.
        key: `[B,T,K,D]`; K divides H.
        value: `[B,T,K,V]`.
        initial_state: `[B,H,D,V]`, or `[n,H,D,V]` with cu_seqlens; None = zeros.
        cu_seqlens: cumulative lengths of packed sequences, integers `[n + 1]`, B = 1; as for `recurrent_attention`.
        layer_idx: index of the layer, from 0 to num_layers - 1.
        num_layers: how many layers the model has.
        softmax_scale: factor of the output; None = `1 / sqrt(D)`.
        reverse: run every sequence from its last token to its first.
        return_state: also return the last state.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.
        mesh: a `jax.sharding.Mesh`: run inside `shard_map` over it. Batch and heads may be split, alike in all arrays.
        in_specs: with mesh, one PartitionSpec or None for each positional array; the decays follow the heads of query.
        out_specs: with mesh, a PartitionSpec, or a tuple of two with return_state.

    Returns:
        `[B,T,H,V]`; with return_state a tuple with the last state, float32.

    Raises:
        ValueError: a shape, layer_idx or num_layers does not fit.
        TypeError: a dtype does not fit.
        NoKernelError: no admitted platform supports the call.

    Source: Qin et al., Lightning Attention-2: A Free Lunch for Handling Unlimited Sequence Lengths in Large Language Models, 2024.
    """
    for name, number in (("layer_idx", layer_idx), ("num_layers", num_layers)):
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise wrong_type(name, repr(number), "an int")
    if num_layers < 1:
        raise invalid("num_layers", num_layers, "a value >= 1")
    if not 0 <= layer_idx < num_layers:
        raise invalid("layer_idx", layer_idx, f"a value from 0 to num_layers - 1 = {num_layers - 1}")
    heads = _heads(query)
    gamma = -(8 / max(heads, 1)) * (1 - layer_idx / num_layers) * np.arange(heads)
    options = {"scale": softmax_scale, "reverse": reverse, "return_state": return_state, "platform": platform, "cfg": cfg}
    return _with_constant_decay(gamma, (query, key, value, initial_state, cu_seqlens), options, mesh, in_specs, out_specs)


@argument_names(scale="softmax_scale")
def retention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: PlatformChoice = None,
    cfg: Any = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Any:
    """Retention: `S_t = (1 - 2^(-5-h)) S_(t-1) + k_t v_t^T`, `o_t = scale S_t^T q_t` for head h, counted from 0.

    Rotations of query and key, and the norm of the output, are the caller's.

    Args:
        query: `[B,T,H,D]`, float32, bfloat16 or float16; any length.
        key: `[B,T,K,D]`; K divides H.
        value: `[B,T,K,V]`.
        initial_state: `[B,H,D,V]`, or `[n,H,D,V]` with cu_seqlens; None = zeros.
        cu_seqlens: cumulative lengths of packed sequences, integers `[n + 1]`, B = 1; as for `recurrent_attention`.
        softmax_scale: factor of the output; None = `1 / sqrt(D)`.
        reverse: run every sequence from its last token to its first.
        return_state: also return the last state.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.
        mesh: a `jax.sharding.Mesh`: run inside `shard_map` over it. Batch and heads may be split, alike in all arrays.
        in_specs: with mesh, one PartitionSpec or None for each positional array; the decays follow the heads of query.
        out_specs: with mesh, a PartitionSpec, or a tuple of two with return_state.

    Returns:
        `[B,T,H,V]`; with return_state a tuple with the last state, float32.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
        NoKernelError: no admitted platform supports the call.

    Source: Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, 2023.
    """
    gamma = np.log1p(-(2.0 ** (-5.0 - np.arange(_heads(query)))))
    options = {"scale": softmax_scale, "reverse": reverse, "return_state": return_state, "platform": platform, "cfg": cfg}
    return _with_constant_decay(gamma, (query, key, value, initial_state, cu_seqlens), options, mesh, in_specs, out_specs)


def _heads(query: Any) -> int:
    """H; what is no `[B,T,H,D]` is refused later, by name."""
    return query.shape[2] if getattr(query, "ndim", 0) == 4 else 1


def _with_constant_decay(
    gamma: Any, given: Sequence[Any], options: Mapping[str, Any], mesh: Any, in_specs: Any, out_specs: Any
) -> Any:
    names = ("query", "key", "value", "initial_state", "cu_seqlens")
    arrays = {**dict(zip(names, given, strict=True)), "g_gamma": jax.numpy.asarray(gamma, jax.numpy.float32)}
    if isinstance(in_specs, (tuple, list)) and not isinstance(in_specs, PartitionSpec) and 0 < len(in_specs) <= len(names):
        heads = (*(in_specs[0] or ()), None, None, None)[2]
        in_specs = (*in_specs, *[None] * (len(names) - len(in_specs)), PartitionSpec(heads))
    return over_mesh(
        _recurrence,
        arrays,
        options,
        positional=tuple(arrays),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        dims=_dims(given[4], gamma),
    )


@argument_names(query="r", key="k", value="v", gk="w", bonus="u", scale="softmax_scale")
def rwkv6(
    r: jax.Array,
    k: jax.Array,
    v: jax.Array,
    w: jax.Array,
    u: jax.Array,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: PlatformChoice = None,
    cfg: Any = None,
) -> Any:
    """RWKV-6: `o_t = scale (S_(t-1) + diag(u) k_t v_t^T)^T r_t`, then `S_t = diag(exp w_t) S_(t-1) + k_t v_t^T`.

    Args:
        r: receptance `[B,T,H,D]`, float32, bfloat16 or float16; any length.
        k: key `[B,T,H,D]`.
        v: value `[B,T,H,V]`.
        w: log decay per key channel `[B,T,H,D]`, already negative (`-exp` of the model's parameter); -inf is not
            allowed.
        u: bonus of the token itself `[H,D]`.
        initial_state: `[B,H,D,V]`, or `[n,H,D,V]` with cu_seqlens; None = zeros.
        cu_seqlens: cumulative lengths of packed sequences, integers `[n + 1]`, B = 1; as for `recurrent_attention`.
        softmax_scale: factor of the output; None = `1 / sqrt(D)`. RWKV's own models use 1.
        reverse: run every sequence from its last token to its first.
        return_state: also return the last state.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.

    Returns:
        `[B,T,H,V]`; with return_state a tuple with the last state, float32.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
        NoKernelError: no admitted platform supports the call.

    Source: Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, 2024.
    """
    return _LINEAR_RECURRENCE.invoke(
        {
            "query": r,
            "key": k,
            "value": v,
            "gk": w,
            "bonus": u,
            "initial_state": initial_state,
            "cu_seqlens": cu_seqlens,
        },
        {"scale": softmax_scale, "reverse": reverse, "return_state": return_state},
        platform=platform,
        cfg=cfg,
    )


def recurrent(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array | None = None,
    gk: jax.Array | None = None,
    gv: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    g_gamma: jax.Array | None = None,
    softmax_scale: float | None = None,
    reverse: bool = False,
    cu_seqlens: jax.Array | None = None,
    platform: PlatformChoice = None,
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`recurrent_attention` under its older name and order of arguments; always returns `(out, state)`."""
    return recurrent_attention(
        query,
        key,
        value,
        g,
        g_gamma,
        gk,
        gv,
        initial_state,
        cu_seqlens,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=True,
        platform=platform,
        cfg=cfg,
    )


def gla(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    softmax_scale: float | None = None,
    initial_state: jax.Array | None = None,
    reverse: bool = False,
    cu_seqlens: jax.Array | None = None,
    *,
    platform: PlatformChoice = None,
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`gla_attention` under its older name and order of arguments; always returns `(out, state)`."""
    return gla_attention(
        query,
        key,
        value,
        g,
        g_gamma,
        initial_state,
        cu_seqlens,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=True,
        platform=platform,
        cfg=cfg,
    )


def lightning_attn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer_idx: int,
    num_layers: int,
    softmax_scale: float | None = None,
    initial_state: jax.Array | None = None,
    reverse: bool = False,
    cu_seqlens: jax.Array | None = None,
    *,
    platform: PlatformChoice = None,
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`lightning_attention` under its older name and order of arguments; always returns `(out, state)`."""
    return lightning_attention(
        query,
        key,
        value,
        initial_state,
        cu_seqlens,
        layer_idx=layer_idx,
        num_layers=num_layers,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=True,
        platform=platform,
        cfg=cfg,
    )


RecurrentAttention = class_form("RecurrentAttention", recurrent_attention)
GatedLinearAttention = class_form("GatedLinearAttention", gla_attention)
GLAttention = class_form("GLAttention", gla_attention)
LightningAttention = class_form("LightningAttention", lightning_attention)
Retention = class_form("Retention", retention)
RWKV6 = class_form("RWKV6", rwkv6)
