"""Linear attention: recurrences of matrix states with decays."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions.frameworks import no_attention_function, refuses_masks
from ejkernel.compositions.mesh import over_mesh
from ejkernel.errors import argument_names
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import RecurrenceOptions, ShardedRecurrenceOptions
from ejkernel.operations.linear_recurrence.forms import dims_of, recurrence
from ejkernel.operations.linear_recurrence.interface import OPERATION as _LINEAR_RECURRENCE
from ejkernel.utils.checks import check_given

__all__ = [
    "RWKV6",
    "GLAttention",
    "GatedLinearAttention",
    "RecurrentAttention",
    "gla",
    "gla_attention",
    "recurrent",
    "recurrent_attention",
    "rwkv6",
]


@overload
def recurrent_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    g: t.PerHead | None = None,
    g_gamma: t.ConstantDecay | None = None,
    gk: t.SequenceHeads | None = None,
    gv: t.SequenceValues | None = None,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: Literal[False] = False,
    **options: Unpack[ShardedRecurrenceOptions],
) -> t.SequenceOutput: ...


@overload
def recurrent_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    g: t.PerHead | None = None,
    g_gamma: t.ConstantDecay | None = None,
    gk: t.SequenceHeads | None = None,
    gv: t.SequenceValues | None = None,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: Literal[True],
    **options: Unpack[ShardedRecurrenceOptions],
) -> tuple[t.SequenceOutput, t.FinalState]: ...


@overload
def recurrent_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    g: t.PerHead | None = None,
    g_gamma: t.ConstantDecay | None = None,
    gk: t.SequenceHeads | None = None,
    gv: t.SequenceValues | None = None,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: t.Flag,
    **options: Unpack[ShardedRecurrenceOptions],
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]: ...


@public("g", "g_gamma", "gk", "gv", "initial_state", "cu_seqlens")
@refuses_masks("pack sequences with cu_seqlens, or use flash_attention")
def recurrent_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    g: t.PerHead | None = None,
    g_gamma: t.ConstantDecay | None = None,
    gk: t.SequenceHeads | None = None,
    gv: t.SequenceValues | None = None,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    softmax_scale: t.Scalar | None = None,
    reverse: t.Flag = False,
    return_state: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]:
    """Linear attention with decays: `o_t = scale S_t^T q_t` with a state `S` per head that forgets and learns.

    `S_t = exp(g_t + g_gamma) diag(exp gk_t) S_(t-1) diag(exp gv_t) + k_t v_t^T`.

    Decays are logarithms: 0 keeps the state, -inf forgets it, and positive values, growth, are computed as they are for
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
        mesh: a `jax.sharding.Mesh`: run inside `shard_map` over it. Batch and heads may be split, alike in all arrays.
        in_specs: with mesh, one PartitionSpec or None for each of query, key, value, g, g_gamma, gk, gv, initial_state,
            cu_seqlens.
        out_specs: with mesh, a PartitionSpec, or a tuple of two with return_state.

    Returns:
        `[B,T,H,V]` in the dtype of value; with return_state a tuple with the last state, float32, shaped like initial_state.

    Raises:
        ValueError: a shape does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends beyond T.

    Source: Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, 2023.
    """
    arrays, options, run = split(locals(), "query key value g g_gamma gk gv initial_state cu_seqlens")
    return over_mesh(recurrence, arrays, options, dims=dims_of(cu_seqlens, g_gamma), **run)


@overload
def gla_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    g: t.PerHeadOrChannel | None = None,
    g_gamma: t.ConstantDecay | None = None,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: Literal[False] = False,
    **options: Unpack[ShardedRecurrenceOptions],
) -> t.SequenceOutput: ...


@overload
def gla_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    g: t.PerHeadOrChannel | None = None,
    g_gamma: t.ConstantDecay | None = None,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: Literal[True],
    **options: Unpack[ShardedRecurrenceOptions],
) -> tuple[t.SequenceOutput, t.FinalState]: ...


@overload
def gla_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    g: t.PerHeadOrChannel | None = None,
    g_gamma: t.ConstantDecay | None = None,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: t.Flag,
    **options: Unpack[ShardedRecurrenceOptions],
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]: ...


@public("g", "g_gamma", "initial_state", "cu_seqlens")
@argument_names(gk="g")
@refuses_masks("pack sequences with cu_seqlens, or use flash_attention")
def gla_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    g: t.PerHeadOrChannel | None = None,
    g_gamma: t.ConstantDecay | None = None,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    softmax_scale: t.Scalar | None = None,
    reverse: t.Flag = False,
    return_state: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]:
    """Gated linear attention: `S_t = diag(exp g_t) S_(t-1) + k_t v_t^T`, `o_t = scale S_t^T q_t`.

    Args:
        query: `[B,T,H,D]`, float32, bfloat16 or float16; any length.
        key: `[B,T,K,D]`; K divides H.
        value: `[B,T,K,V]`.
        g: log gate per key channel `[B,T,K,D]`, or per head `[B,T,H]`: its number of axes says which;
            -inf forgets.
        g_gamma: log decay per head `[H]` or `[B,H]`, in addition.
        initial_state: `[B,H,D,V]`, or `[n,H,D,V]` with cu_seqlens; None = zeros.
        cu_seqlens: cumulative lengths of packed sequences, integers `[n + 1]`, B = 1; as for `recurrent_attention`.
        softmax_scale: factor of the output; None = `1 / sqrt(D)`.
        reverse: run every sequence from its last token to its first.
        return_state: also return the last state.
        mesh: a `jax.sharding.Mesh`: run inside `shard_map` over it. Batch and heads may be split, alike in all arrays.
        in_specs: with mesh, one PartitionSpec or None for each of query, key, value, g, g_gamma, initial_state, cu_seqlens.
        out_specs: with mesh, a PartitionSpec, or a tuple of two with return_state.

    Returns:
        `[B,T,H,V]`; with return_state a tuple with the last state, float32.

    Source: Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, 2023.
    """
    arrays, options, run = split(
        locals(),
        f"query key value {'gk=g' if getattr(g, 'ndim', 0) == 4 else 'g'} g_gamma initial_state cu_seqlens",
    )
    return over_mesh(recurrence, arrays, options, dims=dims_of(cu_seqlens, g_gamma), **run)


@overload
def rwkv6(
    r: t.SequenceHeads,
    k: t.SequenceHeads,
    v: t.SequenceValues,
    w: t.SequenceHeads,
    u: t.Bonus,
    *,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: Literal[False] = False,
    **options: Unpack[RecurrenceOptions],
) -> t.SequenceOutput: ...


@overload
def rwkv6(
    r: t.SequenceHeads,
    k: t.SequenceHeads,
    v: t.SequenceValues,
    w: t.SequenceHeads,
    u: t.Bonus,
    *,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: Literal[True],
    **options: Unpack[RecurrenceOptions],
) -> tuple[t.SequenceOutput, t.FinalState]: ...


@overload
def rwkv6(
    r: t.SequenceHeads,
    k: t.SequenceHeads,
    v: t.SequenceValues,
    w: t.SequenceHeads,
    u: t.Bonus,
    *,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: t.Flag,
    **options: Unpack[RecurrenceOptions],
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]: ...


@public("initial_state", "cu_seqlens")
@argument_names(query="r", key="k", value="v", gk="w", bonus="u")
def rwkv6(
    r: t.SequenceHeads,
    k: t.SequenceHeads,
    v: t.SequenceValues,
    w: t.SequenceHeads,
    u: t.Bonus,
    *,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    softmax_scale: t.Scalar | None = None,
    reverse: t.Flag = False,
    return_state: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]:
    """RWKV-6: `o_t = scale (S_(t-1) + diag(u) k_t v_t^T)^T r_t`, then `S_t = diag(exp w_t) S_(t-1) + k_t v_t^T`.

    Args:
        r: receptance `[B,T,H,D]`, float32, bfloat16 or float16; any length.
        k: key `[B,T,H,D]`.
        v: value `[B,T,H,V]`.
        w: log decay per key channel `[B,T,H,D]`, already negative (`-exp` of the model's parameter); -inf
            forgets.
        u: bonus of the token itself `[H,D]`.
        initial_state: `[B,H,D,V]`, or `[n,H,D,V]` with cu_seqlens; None = zeros.
        cu_seqlens: cumulative lengths of packed sequences, integers `[n + 1]`, B = 1; as for `recurrent_attention`.
        softmax_scale: factor of the output; None = `1 / sqrt(D)`. RWKV's own models use 1.
        reverse: run every sequence from its last token to its first.
        return_state: also return the last state.

    Returns:
        `[B,T,H,V]`; with return_state a tuple with the last state, float32.

    Source: Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, 2024.
    """
    arrays, options, run = split(locals(), "query=r key=k value=v gk=w bonus=u initial_state cu_seqlens")
    check_given(w=w, u=u)
    return _LINEAR_RECURRENCE.invoke(arrays, options, **run)


@public("g", "gk", "gv", "initial_state")
@no_attention_function("it returns the output and the state")
def recurrent(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    g: t.PerHead | None = None,
    gk: t.SequenceHeads | None = None,
    gv: t.SequenceValues | None = None,
    initial_state: t.MatrixState | None = None,
    g_gamma: t.ConstantDecay | None = None,
    softmax_scale: t.Scalar | None = None,
    reverse: t.Flag = False,
    cu_seqlens: t.CumulativeLengths | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.SequenceOutput, t.FinalState]:
    """`recurrent_attention` under its older name and order of arguments; always returns `(out, state)`."""
    return recurrent_attention(**locals(), return_state=True)


@public("g", "g_gamma", "softmax_scale", "initial_state", "reverse", "cu_seqlens")
@no_attention_function("it returns the output and the state")
def gla(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    g: t.PerHeadOrChannel | None = None,
    g_gamma: t.ConstantDecay | None = None,
    softmax_scale: t.Scalar | None = None,
    initial_state: t.MatrixState | None = None,
    reverse: t.Flag = False,
    cu_seqlens: t.CumulativeLengths | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.SequenceOutput, t.FinalState]:
    """`gla_attention` under its older name and order of arguments; always returns `(out, state)`."""
    return gla_attention(**locals(), return_state=True)


RecurrentAttention = class_api("RecurrentAttention", recurrent_attention)
GatedLinearAttention = class_api("GatedLinearAttention", gla_attention)
GLAttention = class_api("GLAttention", gla_attention)
RWKV6 = class_api("RWKV6", rwkv6)
