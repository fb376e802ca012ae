"""States that are corrected towards each value before it is stored: the gated delta rule, its form by channel, and RWKV-7."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions.mesh import over_mesh
from ejkernel.errors import argument_names, invalid
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import RecurrenceOptions, SharedDeltaOptions
from ejkernel.operations.delta_rule.forms import by_removal, by_vectors, check_starts, chunked_by, delta, dims_of, ragged
from ejkernel.operations.delta_rule.interface import OPERATION as _DELTA_RULE
from ejkernel.utils.checks import check_given

__all__ = [
    "RWKV7",
    "GatedDeltaRule",
    "KernelDeltaAttention",
    "RWKV7Mul",
    "RaggedGatedDeltaRule",
    "gated_delta_rule",
    "kernel_delta_attention",
    "ragged_gated_delta_rule",
    "rwkv7",
    "rwkv7_mul",
]


_PER_CHANNEL = "kernel_delta_attention takes one per channel"


class DeltaOptions(SharedDeltaOptions, total=False):
    """Of `gated_delta_rule` and `kernel_delta_attention`."""

    reverse: t.Flag


class Rwkv7Options(RecurrenceOptions, total=False):
    """Of `rwkv7` and `rwkv7_mul`."""

    initial_state: t.MatrixState | None
    cu_seqlens: t.CumulativeLengths | None
    use_chunked: t.Flag


@overload
def gated_delta_rule(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    beta: t.PerHead,
    *,
    decay: t.PerHead | None = None,
    initial_state: t.MatrixState | None = None,
    return_state: Literal[False] = False,
    **options: Unpack[DeltaOptions],
) -> t.SequenceOutput: ...


@overload
def gated_delta_rule(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    beta: t.PerHead,
    *,
    decay: t.PerHead | None = None,
    initial_state: t.MatrixState | None = None,
    return_state: Literal[True],
    **options: Unpack[DeltaOptions],
) -> tuple[t.SequenceOutput, t.FinalState]: ...


@overload
def gated_delta_rule(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    beta: t.PerHead,
    *,
    decay: t.PerHead | None = None,
    initial_state: t.MatrixState | None = None,
    return_state: t.Flag,
    **options: Unpack[DeltaOptions],
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]: ...


@public("decay", "initial_state")
def gated_delta_rule(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    beta: t.PerHead,
    *,
    decay: t.PerHead | None = None,
    initial_state: t.MatrixState | None = None,
    softmax_scale: t.Scalar | None = None,
    use_qk_l2norm: t.Flag = True,
    use_chunked: t.Flag = True,
    return_state: t.Flag = False,
    reverse: t.Flag = False,
    chunk_size: t.Count | None = None,
    seg_ids: t.SegmentIds | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]:
    """The gated delta rule: `S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; out = scale * S^T q`, one decay g per head.

    Args:
        query: `[B,T,K,D]`, float32, bfloat16 or float16; any length, 0 included.
        key: `[B,T,K,D]`. The numbers of heads of query, key and value divide the largest of them, H; a head is shared by
            consecutive ones.
        value: `[B,T,K,V]`, of the dtype of query and key.
        beta: `[B,T,K]`, the share of the difference that is stored, usually 0 to 1 (2 with keys of length 1 reflects).
        decay: `[B,T,K]`, natural logarithm of what is left of the state, <= 0; -inf forgets. None = 0.
        initial_state: `[B,H,D,V]`, or `[n,H,D,V]` with cu_seqlens; None = zeros.
        softmax_scale: factor of the result; None = `1 / sqrt(D)`.
        use_qk_l2norm: divide query and key by `sqrt(sum x^2 + 1e-6)` first.
        use_chunked: many tokens at once, by matrix products, where that is faster; False: token after token. The numbers are the
            same.
        return_state: also return the last state.
        reverse: run every sequence from its last token to its first.
        chunk_size: tokens of one chunk, a hint for speed; the same as `cfg={"chunk_size": chunk_size}`.
        seg_ids: integers `[B,T]` or `[1,T]`. The state becomes 0 before a token whose id is not that of the token before it.
            Tokens with an id below 0 are padding: they take no part, whatever they hold, get 0, and do not separate their
            neighbours; the first token that takes part starts from initial_state.
        cu_seqlens: integers `[n + 1]`, not decreasing, from 0 to at most T; may be traced; B = 1. Sequence i is the tokens
            from cu_seqlens[i] to cu_seqlens[i + 1]; tokens after the last one take no part, whatever they hold, and get 0.
        cfg: config override for the chosen implementation: its dataclass, or a mapping of its fields.
        mesh: a mesh over which to split batch and heads, alike in all arrays, with in_specs and out_specs.
        in_specs: a PartitionSpec or None for each of query, key, value, beta, decay, initial_state, seg_ids, cu_seqlens; the
            last two may be left out.
        out_specs: a PartitionSpec for the result; a pair for result and state.

    Returns:
        `[B,T,H,V]` in the dtype of value; with return_state a pair with the state `[B,H,D,V]` (`[n,H,D,V]`), float32.

    Raises:
        ValueError: a shape does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends beyond T.

    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule, 2025.
    """
    if decay is not None and getattr(decay, "ndim", 3) != 3:
        raise invalid("decay", f"shape {tuple(decay.shape)}", "[B,T,H], one per head", remedy=_PER_CHANNEL)
    return kernel_delta_attention(**locals())


@overload
def kernel_delta_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    beta: t.PerHead,
    *,
    decay: t.PerHeadOrChannel | None = None,
    initial_state: t.MatrixState | None = None,
    return_state: Literal[False] = False,
    **options: Unpack[DeltaOptions],
) -> t.SequenceOutput: ...


@overload
def kernel_delta_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    beta: t.PerHead,
    *,
    decay: t.PerHeadOrChannel | None = None,
    initial_state: t.MatrixState | None = None,
    return_state: Literal[True],
    **options: Unpack[DeltaOptions],
) -> tuple[t.SequenceOutput, t.FinalState]: ...


@overload
def kernel_delta_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    beta: t.PerHead,
    *,
    decay: t.PerHeadOrChannel | None = None,
    initial_state: t.MatrixState | None = None,
    return_state: t.Flag,
    **options: Unpack[DeltaOptions],
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]: ...


@public("decay", "initial_state")
def kernel_delta_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    beta: t.PerHead,
    *,
    decay: t.PerHeadOrChannel | None = None,
    initial_state: t.MatrixState | None = None,
    softmax_scale: t.Scalar | None = None,
    use_qk_l2norm: t.Flag = True,
    use_chunked: t.Flag = True,
    return_state: t.Flag = False,
    reverse: t.Flag = False,
    chunk_size: t.Count | None = None,
    seg_ids: t.SegmentIds | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]:
    """The delta rule with one decay per channel of the key (KDA).

    `S <- diag(exp g) S; S <- S + k (beta (v - S^T k))^T; out = scale * S^T q`

    Args:
        query, key, value, beta, initial_state: as in `gated_delta_rule`.
        decay: `[B,T,K,D]`, or `[B,T,K]` for one per head, or None.
        softmax_scale, use_qk_l2norm, use_chunked, return_state, reverse, chunk_size, seg_ids, cu_seqlens: as in
            `gated_delta_rule`.
        mesh, in_specs, out_specs: as in `gated_delta_rule`.

    Returns:
        As `gated_delta_rule`.

    Raises:
        ValueError: a shape does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends beyond T.

    Source: Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, 2025.
    """
    arrays, options, run = split(
        locals(),
        "query key value beta decay initial_state seg_ids cu_seqlens",
        own="chunk_size",
    )
    check_given(query=query, key=key, value=value, beta=beta)
    run["cfg"] = chunked_by(chunk_size, cfg)
    return over_mesh(delta, arrays, options, dims=dims_of(decay, cu_seqlens), **run)


@public()
def ragged_gated_delta_rule(
    query: t.TokenHeads,
    key: t.TokenHeads,
    value: t.TokenValues,
    beta: t.TokenPerHead,
    decay: t.TokenPerHeadOrChannel | None = None,
    recurrent_state: t.StatePool | None = None,
    query_start_loc: t.QueryStarts | None = None,
    state_indices: t.StateIndices | None = None,
    *,
    softmax_scale: t.Scalar | None = None,
    use_qk_l2norm: t.Flag = True,
    chunk_size: t.Count | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.TokenOutput, t.NewStatePool]:
    """The gated delta rule over the packed tokens of many requests, each of which has its state in a slot of a pool.

    One program serves every mix of prefill and decode: a request of one token takes a single step, without a chunk.

    Args:
        query, key: `[N,K,D]`; value: `[N,K,V]`; heads as in `gated_delta_rule`.
        beta: `[N,K]`.
        decay: `[N,K]`, or `[N,K,D]` for one per channel; None = 0.
        recurrent_state: the pool `[slots,H,D,V]`, of a floating type; states are float32 inside and rounded when stored.
        query_start_loc: integers `[R + 1]`, not decreasing, from 0 to at most N; may be traced. Request i has the tokens from
            query_start_loc[i] to query_start_loc[i + 1]. Tokens after the last one take no part, whatever they hold, and
            get 0.
        state_indices: integers `[R]`, the slot of each request; may be traced. Requests that have tokens must have different
            slots. One whose slot is not in the pool (-1) starts from zeros and its state is not stored.
        softmax_scale, use_qk_l2norm, chunk_size: as in `gated_delta_rule`.

    Returns:
        `[N,H,V]` in the dtype of value, and the pool with the slots of the requests that have tokens replaced; under `jit`
        with the pool donated, in its place.

    Raises:
        ValueError: a shape does not fit, or query_start_loc (if concrete) decreases, does not start at 0 or ends beyond N.
        TypeError: an argument is missing, or a dtype does not fit.

    Source: the rule as in `gated_delta_rule`; the pool of states is that of continuous batching.
    """
    arrays, options, run = split(
        locals(),
        "query key value beta decay recurrent_state query_start_loc state_indices",
        own="chunk_size",
    )
    check_given(query=query, key=key, value=value, beta=beta)
    check_starts(query_start_loc, query)
    run["cfg"] = chunked_by(chunk_size, cfg)
    return _DELTA_RULE.invoke(arrays, options, form=ragged, **run)


@overload
def rwkv7(
    r: t.SequenceHeads,
    w: t.SequenceHeads,
    k: t.SequenceHeads,
    v: t.SequenceValues,
    a: t.SequenceHeads,
    b: t.SequenceHeads,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[Rwkv7Options],
) -> t.SequenceOutput: ...


@overload
def rwkv7(
    r: t.SequenceHeads,
    w: t.SequenceHeads,
    k: t.SequenceHeads,
    v: t.SequenceValues,
    a: t.SequenceHeads,
    b: t.SequenceHeads,
    *,
    return_state: Literal[True],
    **options: Unpack[Rwkv7Options],
) -> tuple[t.SequenceOutput, t.FinalState]: ...


@overload
def rwkv7(
    r: t.SequenceHeads,
    w: t.SequenceHeads,
    k: t.SequenceHeads,
    v: t.SequenceValues,
    a: t.SequenceHeads,
    b: t.SequenceHeads,
    *,
    return_state: t.Flag,
    **options: Unpack[Rwkv7Options],
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]: ...


@public()
@argument_names(query="r", decay="w", key="k", value="v")
def rwkv7(
    r: t.SequenceHeads,
    w: t.SequenceHeads,
    k: t.SequenceHeads,
    v: t.SequenceValues,
    a: t.SequenceHeads,
    b: t.SequenceHeads,
    *,
    softmax_scale: t.Scalar | None = None,
    initial_state: t.MatrixState | None = None,
    reverse: t.Flag = False,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: t.Flag = False,
    use_chunked: t.Flag = True,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]:
    """The recurrence of RWKV-7: `S <- diag(exp w) S + a (b^T S) + k v^T; out = scale * S^T r`, with the old S in `b^T S`.

    Args:
        r: `[B,T,H,D]`, the receptance; float32, bfloat16 or float16; heads as those of query in `gated_delta_rule`.
        w: `[B,T,H,D]`, the logarithm of the decay, <= 0.
        k: `[B,T,H,D]`; v: `[B,T,H,V]`; of the dtype of r.
        a: `[B,T,H,D]`, where it is written what b reads.
        b: `[B,T,H,D]`.
        softmax_scale: factor of the result; None = `1 / sqrt(D)`; models of RWKV-7 want 1.
        initial_state, reverse, cu_seqlens, return_state, use_chunked: as in `gated_delta_rule`.

    Returns:
        As `gated_delta_rule`.

    Raises:
        ValueError: a shape does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends beyond T.

    Source: Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, 2025.
    """
    arrays, options, run = split(locals(), "query=r decay=w key=k value=v a b initial_state cu_seqlens")
    return _DELTA_RULE.invoke(arrays, options, form=by_vectors, **run)


@overload
def rwkv7_mul(
    r: t.SequenceHeads,
    w: t.SequenceHeads,
    k: t.SequenceHeads,
    v: t.SequenceValues,
    kk: t.SequenceHeads,
    a: t.SequenceHeads,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[Rwkv7Options],
) -> t.SequenceOutput: ...


@overload
def rwkv7_mul(
    r: t.SequenceHeads,
    w: t.SequenceHeads,
    k: t.SequenceHeads,
    v: t.SequenceValues,
    kk: t.SequenceHeads,
    a: t.SequenceHeads,
    *,
    return_state: Literal[True],
    **options: Unpack[Rwkv7Options],
) -> tuple[t.SequenceOutput, t.FinalState]: ...


@overload
def rwkv7_mul(
    r: t.SequenceHeads,
    w: t.SequenceHeads,
    k: t.SequenceHeads,
    v: t.SequenceValues,
    kk: t.SequenceHeads,
    a: t.SequenceHeads,
    *,
    return_state: t.Flag,
    **options: Unpack[Rwkv7Options],
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]: ...


@public()
@argument_names(query="r", decay="w", key="k", value="v", b="kk")
def rwkv7_mul(
    r: t.SequenceHeads,
    w: t.SequenceHeads,
    k: t.SequenceHeads,
    v: t.SequenceValues,
    kk: t.SequenceHeads,
    a: t.SequenceHeads,
    *,
    softmax_scale: t.Scalar | None = None,
    initial_state: t.MatrixState | None = None,
    reverse: t.Flag = False,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: t.Flag = False,
    use_chunked: t.Flag = True,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]:
    """`rwkv7` by the removal key kk and its rate a: `S <- diag(exp w) S - (kk * a) (kk^T S) + k v^T; out = scale * S^T r`.

    Args:
        r, w, k, v: as in `rwkv7`.
        kk: `[B,T,H,D]`, what is removed, usually of length 1.
        a: `[B,T,H,D]`, how much of each channel is removed, usually 0 to 1.
        softmax_scale, initial_state, reverse, cu_seqlens, return_state, use_chunked: as in `rwkv7`.

    Returns:
        As `gated_delta_rule`.

    Raises:
        ValueError: a shape does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends beyond T.

    Source: Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, 2025.
    """
    arrays, options, run = split(locals(), "query=r decay=w key=k value=v kk a initial_state cu_seqlens")
    return _DELTA_RULE.invoke(arrays, options, form=by_removal, **run)


GatedDeltaRule = class_api("GatedDeltaRule", gated_delta_rule)
KernelDeltaAttention = class_api("KernelDeltaAttention", kernel_delta_attention)
RaggedGatedDeltaRule = class_api("RaggedGatedDeltaRule", ragged_gated_delta_rule)
RWKV7 = class_api("RWKV7", rwkv7)
RWKV7Mul = class_api("RWKV7Mul", rwkv7_mul)
