"""Softmax attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Unpack, overload

import jax.numpy as jnp

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions import sharded as _sharded
from ejkernel.compositions.frameworks import honours_masks, no_attention_function
from ejkernel.masks import MaskInfo
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import DispatchOptions, ShardingOptions, VisibilityOptions
from ejkernel.operations.common.dtypes import dtype_name
from ejkernel.operations.common.options import as_flag
from ejkernel.operations.flash_attention.dropout import as_dropout_rate
from ejkernel.operations.flash_attention.forms import add_packed, given_arrays, made_bias, packed
from ejkernel.operations.flash_attention.interface import OPERATION as _FLASH_ATTENTION
from ejkernel.operations.flash_attention.score_functions.public import traced_before
from ejkernel.operations.flash_attention.weights import with_weights

__all__ = ["Attention", "FlashAttention", "FlashAttnVarlen", "attention", "flash_attention", "flash_attn_varlen"]

_POSITIONAL = ("query", "key", "value", "bias", "cum_seqlens_q", "cum_seqlens_k", "softmax_aux", "block_tables")


class _AttentionOptions(VisibilityOptions, total=False):
    causal_alignment: t.CausalAlignment | None
    logits_soft_cap: t.Number | None
    dropout_prob: t.Number
    dropout_seed: t.Seed | None
    normalize_output: t.Flag
    precision: t.PrecisionLike | None
    logits_dtype: t.DTypeLike | None


class FlashAttentionOptions(_AttentionOptions, ShardingOptions, total=False):
    """Of `flash_attention`."""

    softmax_scale: t.Scalar | None
    causal: t.Flag
    broadcast_dropout: t.Flag
    score_mod: t.ScoreMod | None
    mask_mod: t.MaskMod | None
    mod_inputs: t.ModInputs | None
    alibi_slopes: t.AlibiSlopes | None
    forget_gate: t.ForgetGate | None


class VarlenOptions(_AttentionOptions, DispatchOptions, total=False):
    """Of `flash_attn_varlen`."""

    bias: t.PackedBias | None
    softmax_aux: t.PackedSinks | None


@overload
def flash_attention(
    query: t.Queries,
    key: t.Keys | t.KeyPages,
    value: t.Values | t.ValuePages,
    *,
    bias: t.Bias | None = None,
    cum_seqlens_q: t.CumulativeLengths | None = None,
    cum_seqlens_k: t.CumulativeLengths | None = None,
    softmax_aux: t.Sinks | None = None,
    block_tables: t.BlockTables | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[FlashAttentionOptions],
) -> t.Attended: ...


@overload
def flash_attention(
    query: t.Queries,
    key: t.Keys | t.KeyPages,
    value: t.Values | t.ValuePages,
    *,
    bias: t.Bias | None = None,
    cum_seqlens_q: t.CumulativeLengths | None = None,
    cum_seqlens_k: t.CumulativeLengths | None = None,
    softmax_aux: t.Sinks | None = None,
    block_tables: t.BlockTables | None = None,
    return_lse: Literal[True],
    **options: Unpack[FlashAttentionOptions],
) -> tuple[t.Attended, t.LogSumExp]: ...


@overload
def flash_attention(
    query: t.Queries,
    key: t.Keys | t.KeyPages,
    value: t.Values | t.ValuePages,
    *,
    bias: t.Bias | None = None,
    cum_seqlens_q: t.CumulativeLengths | None = None,
    cum_seqlens_k: t.CumulativeLengths | None = None,
    softmax_aux: t.Sinks | None = None,
    block_tables: t.BlockTables | None = None,
    return_lse: t.Flag,
    **options: Unpack[FlashAttentionOptions],
) -> t.Attended | tuple[t.Attended, t.LogSumExp]: ...


@public(*_POSITIONAL[3:])
@honours_masks
def flash_attention(
    query: t.Queries,
    key: t.Keys | t.KeyPages,
    value: t.Values | t.ValuePages,
    *,
    bias: t.Bias | None = None,
    cum_seqlens_q: t.CumulativeLengths | None = None,
    cum_seqlens_k: t.CumulativeLengths | None = None,
    softmax_aux: t.Sinks | None = None,
    block_tables: t.BlockTables | None = None,
    mask_info: MaskInfo | None = None,
    softmax_scale: t.Scalar | None = None,
    dropout_prob: t.Number = 0.0,
    causal: t.Flag = False,
    causal_alignment: t.CausalAlignment | None = None,
    dropout_seed: t.Seed | None = None,
    broadcast_dropout: t.Flag = False,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    logits_soft_cap: t.Number | None = None,
    normalize_output: t.Flag = True,
    precision: t.PrecisionLike | None = None,
    logits_dtype: t.DTypeLike | None = jnp.float32,
    return_lse: t.Flag = False,
    score_mod: t.ScoreMod | None = None,
    mask_mod: t.MaskMod | None = None,
    mod_inputs: t.ModInputs | None = None,
    alibi_slopes: t.AlibiSlopes | None = None,
    forget_gate: t.ForgetGate | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.Attended | tuple[t.Attended, t.LogSumExp]:
    """Exact softmax attention in O(T) memory: `softmax(mask(score_mod(cap(softmax_scale * query . key + bias)))) . value`.

    Everything said about visibility (mask_info, causal, sliding_window, chunk_size, cum_seqlens) holds at once. A query that
    sees no key gives 0, lse -inf and no gradient; what no query sees may hold NaN.

    Args:
        query: `[B, T, H, D]`, float32, bfloat16, float16 or float64; any lengths and head sizes.
        key: `[B, S, K, D]`; query head h reads key head `h // (H // K)`. With block_tables `[pages, page_size, K, D]`.
        value: `[B, S, K, V]`, or `[pages, page_size, K, V]`.
        bias: floating `[B|1, H|1, T|1, S|1]` or `[T|1, S|1]`, added to the scaled products; has a gradient.
        cum_seqlens_q: int `[R + 1]`, cumulative lengths of R sequences packed into one batch row; arrays are then
            `[1, N, H, D]` or `[N, H, D]`, positions restart with every sequence, and tokens past the last one give 0.
        cum_seqlens_k: the same for keys; None means the queries' own.
        softmax_aux: sinks `[H]`, `[H, n]` or `[1, n]`, logits that take part in the softmax's denominator only; have gradients.
        block_tables: int `[B, W]`, the pages of each row's keys, which cum_seqlens_k or lengths in mask_info count. Queries are the
            last tokens of their rows, so that causal means "bottom_right", and windows end at the query. Served by
            `paged_attention`, which has neither bias, dropout nor chunks, and keeps logits in float32.
        mask_info: a `MaskInfo`.
        softmax_scale: factor on the products; None means `1 / sqrt(D)`.
        dropout_prob: probability in [0, 1) of dropping a weight; the others are divided by `1 - dropout_prob`.
        causal: a query sees keys up to its own position.
        causal_alignment: "top_left", which None means too: query i is at position i; "bottom_right": at `i + S - T`. With
            cum_seqlens, of each sequence. Needs `causal`.
        dropout_seed: int, integer scalar or PRNG key; the same seed drops the same entries on every platform and sharding.
        broadcast_dropout: drop the same entries of all rows and heads.
        sliding_window: `(left, right)` keys around the query's position, inclusive, None = unlimited; an int w means (w, w).
        chunk_size: a query sees only keys of its own chunk of this many positions.
        logits_soft_cap: c > 0 turns logits into `c * tanh(logits / c)`.
        normalize_output: False leaves out the denominator and returns `sum_j exp(logit_j - largest) value_j`, where the row's
            largest logit, sinks included, is a constant under differentiation.
        precision: of the matrix products: None for the full precision of the dtype, a `jax.lax.Precision`, or its name.
        logits_dtype: dtype the logits are rounded to; float32 (float64 for float64 inputs) means no rounding.
        return_lse: return the log-sum-exp too.
        score_mod: `(score, batch, head, query index, key index) -> score`, of scalars: what becomes of each score, after scale,
            bias and cap, before masks; -inf hides the pair. A query and a key are told by their places in the arrays. It may close
            over arrays, which have gradients, and is differentiated as JAX does. Equal functions are compiled once.
        mask_mod: `(batch, head, query index, key index) -> bool`, True = visible, besides everything else that says so.
        mod_inputs: pytree of arrays that score_mod and mask_mod get as their last argument, in place of closing over them.
        alibi_slopes: floating `[H]` or `[B|1, H]`: `slope * |query position - key position|` is taken off each score; has a
            gradient.
        forget_gate: floating `[B|1, H, S]`, logarithms of forget gates, one per key: to a score are added those of the keys after
            its own up to the query. Needs causal, with the queries as the last tokens; has a gradient.
        mesh: run inside `jax.shard_map` on this mesh; batch and heads may be split. mask_info is split along.
        in_specs: one PartitionSpec or None for each of query, key, value, bias, cum_seqlens_q, cum_seqlens_k, softmax_aux,
            block_tables; bias and softmax_aux follow the query without.
        out_specs: PartitionSpec of the output, or a pair of them with `return_lse`.

    Returns:
        `[B, T, H, V]` in the query's dtype; with `return_lse` also float32 `[B, T, H]`, natural logarithm, differentiable.

    Source: Dao et al., FlashAttention, 2022; Rabe and Staats, Self-attention does not need O(n^2) memory, 2021; score functions
    after Dong et al., Flex Attention, 2024; ALiBi: Press et al., Train short, test long, 2022; forget gates: Lin et al.,
    Forgetting Transformer, 2025.
    """
    arrays, options, run = split(
        locals(),
        "query key value bias softmax_aux mask_info dropout_seed mod_inputs alibi_slopes forget_gate",
        own="cum_seqlens_q cum_seqlens_k block_tables",
    )
    if block_tables is not None:
        from ejkernel.compositions.paged_flash import attend_over_pages  # brings two more operations

        arrays |= {"cum_seqlens_q": cum_seqlens_q, "cum_seqlens_k": cum_seqlens_k, "block_tables": block_tables}
        return attend_over_pages(arrays, options, positional=_POSITIONAL, **run)
    functions = {"mod_inputs": mod_inputs, "alibi_slopes": alibi_slopes, "forget_gate": forget_gate}
    arrays = given_arrays(query, key, value, bias, softmax_aux, mask_info, dropout_seed, **functions)
    arrays, options = traced_before(arrays, options, split=mesh is not None)
    form = None
    if cum_seqlens_q is not None or cum_seqlens_k is not None:
        form = packed
        add_packed(arrays, options, cum_seqlens_q, cum_seqlens_k, layout="bthd" if len(query.shape) == 4 else "thd")
    return _sharded.invoke(_FLASH_ATTENTION, arrays, options, positional=_POSITIONAL, form=form, **run)


@overload
def flash_attn_varlen(
    q: t.PackedHeads,
    k: t.PackedHeads,
    v: t.PackedValues,
    cu_seqlens_q: t.CumulativeLengths,
    cu_seqlens_k: t.CumulativeLengths | None = None,
    max_seqlens_q: t.Count | None = None,
    max_seqlens_k: t.Count | None = None,
    *,
    causal: t.Flag = False,
    sm_scale: t.Scalar | None = None,
    layout: t.PackedLayout = "thd",
    return_lse: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> t.PackedAttended: ...


@overload
def flash_attn_varlen(
    q: t.PackedHeads,
    k: t.PackedHeads,
    v: t.PackedValues,
    cu_seqlens_q: t.CumulativeLengths,
    cu_seqlens_k: t.CumulativeLengths | None = None,
    max_seqlens_q: t.Count | None = None,
    max_seqlens_k: t.Count | None = None,
    *,
    causal: t.Flag = False,
    sm_scale: t.Scalar | None = None,
    layout: t.PackedLayout = "thd",
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[t.PackedAttended, t.PackedLogSumExp]: ...


@overload
def flash_attn_varlen(
    q: t.PackedHeads,
    k: t.PackedHeads,
    v: t.PackedValues,
    cu_seqlens_q: t.CumulativeLengths,
    cu_seqlens_k: t.CumulativeLengths | None = None,
    max_seqlens_q: t.Count | None = None,
    max_seqlens_k: t.Count | None = None,
    *,
    causal: t.Flag = False,
    sm_scale: t.Scalar | None = None,
    layout: t.PackedLayout = "thd",
    return_lse: t.Flag,
    **options: Unpack[VarlenOptions],
) -> t.PackedAttended | tuple[t.PackedAttended, t.PackedLogSumExp]: ...


@public("causal", "sm_scale", "layout")
def flash_attn_varlen(
    q: t.PackedHeads,
    k: t.PackedHeads,
    v: t.PackedValues,
    cu_seqlens_q: t.CumulativeLengths,
    cu_seqlens_k: t.CumulativeLengths | None = None,
    max_seqlens_q: t.Count | None = None,
    max_seqlens_k: t.Count | None = None,
    *,
    causal: t.Flag = False,
    sm_scale: t.Scalar | None = None,
    layout: t.PackedLayout = "thd",
    bias: t.PackedBias | None = None,
    softmax_aux: t.PackedSinks | None = None,
    mask_info: MaskInfo | None = None,
    causal_alignment: t.CausalAlignment | None = None,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    logits_soft_cap: t.Number | None = None,
    dropout_prob: t.Number = 0.0,
    dropout_seed: t.Seed | None = None,
    normalize_output: t.Flag = True,
    precision: t.PrecisionLike | None = None,
    logits_dtype: t.DTypeLike | None = jnp.float32,
    return_lse: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.PackedAttended | tuple[t.PackedAttended, t.PackedLogSumExp]:
    """`flash_attention` of packed sequences: token i of sequence r attends to the keys of sequence r only.

    Args:
        q: `[N, H, D]`, tokens of all sequences one after the other.
        k: `[M, K, D]`.
        v: `[M, K, V]`.
        cu_seqlens_q: int `[R + 1]`, `0, length_0, length_0 + length_1, ...`; may be traced. Tokens past the last entry are
            padding and give 0.
        cu_seqlens_k: the same for keys; None means the queries' own.
        max_seqlens_q: an upper bound of the query lengths, in tokens; checked where the lengths are known.
        max_seqlens_k: the same for keys.
        causal: positions restart with every sequence.
        sm_scale: factor on the products; None means `1 / sqrt(D)`.
        layout: "thd" as above, "htd" for `[H, N, D]`, "bthd" for `[1, N, H, D]`, "bhtd" for `[1, H, N, D]`; of all arrays and
            the result.
        bias: floating `[1, H|1, N|1, M|1]` or `[N|1, M|1]`.
        softmax_aux: see `flash_attention`, as are mask_info (no segments, positions or lengths), sliding_window, chunk_size,
            logits_soft_cap, dropout_prob, dropout_seed, normalize_output, precision, logits_dtype, return_lse.
        causal_alignment: "top_left" (None): the first query of a sequence is at its first key; "bottom_right": the last at
            its last.

    Returns:
        Like q with the values' head size; with `return_lse` also float32 without the last axis.

    Raises:
        ValueError: as `flash_attention`; cumulative lengths that are known and do not start at 0, decrease, or exceed the
            tokens or the given maximum.

    Source: Dao, FlashAttention-2, 2023 (variable-length interface).
    """
    _, options, run = split(
        locals(),
        "q k v bias softmax_aux mask_info dropout_seed",
        "softmax_scale=sm_scale",
        own="cu_seqlens_q cu_seqlens_k max_seqlens_q max_seqlens_k layout",
    )
    arrays = given_arrays(q, k, v, bias, softmax_aux, mask_info, dropout_seed)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlens_q", "max_seqlens_k")
    add_packed(arrays, options, cu_seqlens_q, cu_seqlens_k, max_seqlens_q, max_seqlens_k, layout=layout, names=names)
    return _FLASH_ATTENTION.invoke(arrays, options, form=packed, **run)


@public("bias", "dropout_rng", "softmax_aux")
@no_attention_function("it returns the output and the weights")
def attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    *,
    bias: t.Bias | None = None,
    dropout_rng: t.Seed | None = None,
    softmax_aux: t.Sinks | None = None,
    mask_info: MaskInfo | None = None,
    deterministic: t.Flag = True,
    dropout_prob: t.Number = 0.0,
    dtype: t.DTypeLike | None = None,
    softmax_dtype: t.DTypeLike | None = None,
    softmax_scale: t.Scalar | None = None,
    init_bias: Callable[[], t.Bias] | None = None,
    causal: t.Flag = False,
    causal_alignment: t.CausalAlignment | None = None,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    logits_soft_cap: t.Number | None = None,
    precision: t.PrecisionLike | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.Attended, t.Weights]:
    """Attention that also returns its weights: `weights = softmax(...)`, `out = weights . value`.

    The weights are those that multiply the values: after dropout, and summing to less than 1 where sinks take part. They
    need O(T S) memory; where they are not used under `jit`, they are not computed.

    Args:
        query: `[B, T, H, D]`.
        key: `[B, S, K, D]`.
        value: `[B, S, K, V]`.
        bias: floating `[B|1, H|1, T|1, S|1]`.
        dropout_rng: int, integer scalar or PRNG key; see `flash_attention`.
        softmax_aux: sinks `[H]`, `[H, n]` or `[1, n]`.
        mask_info: a `MaskInfo`.
        deterministic: True switches dropout off.
        dropout_prob: probability in [0, 1) of dropping a weight.
        dtype: of both results; None keeps the query's.
        softmax_dtype: dtype the logits are rounded to before the softmax, which runs in float32 at least; None means no rounding.
        softmax_scale: factor on the products; None means `1 / sqrt(D)`.
        init_bias: makes the bias when `bias` is None.
        causal, causal_alignment, sliding_window, chunk_size, logits_soft_cap, precision: see `flash_attention`.

    Returns:
        Output `[B, T, H, V]` and weights `[B, H, T, S]`, both differentiable.

    Source: Vaswani et al., Attention is all you need, 2017, section 3.2.1.
    """
    _, options, run = split(
        locals(), "query key value bias softmax_aux mask_info dropout_rng", own="deterministic dtype softmax_dtype init_bias"
    )
    if init_bias is not None:
        bias = made_bias(bias, init_bias)
    dropout_prob = as_dropout_rate(dropout_prob)
    options |= {
        "dropout_prob": 0.0 if as_flag("deterministic", deterministic) else dropout_prob,
        "logits_dtype": jnp.float32 if softmax_dtype is None else softmax_dtype,
        "output_dtype": None if dtype is None else dtype_name("dtype", dtype),
    }
    arrays = given_arrays(query, key, value, bias, softmax_aux, mask_info, dropout_rng)
    return _FLASH_ATTENTION.invoke(arrays, options, form=with_weights, **run)


FlashAttention = class_api("FlashAttention", flash_attention)
FlashAttnVarlen = class_api("FlashAttnVarlen", flash_attn_varlen)
Attention = class_api("Attention", attention)
