"""Attention under the names of `jax.nn.dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public
from ejkernel.compositions import sharded as _sharded
from ejkernel.compositions.frameworks import honours_masks
from ejkernel.errors import invalid
from ejkernel.masks import MaskInfo
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import ShardingOptions
from ejkernel.operations.common.options import as_flag
from ejkernel.operations.flash_attention.forms import add_packed, given_arrays, made_bias, packed
from ejkernel.operations.flash_attention.interface import OPERATION as _FLASH_ATTENTION
from ejkernel.operations.flash_attention.unbatched import unbatched
from ejkernel.utils.checks import check_array

__all__ = ["ScaledDotProductAttention", "scaled_dot_product_attention"]

_IMPLEMENTATIONS = {"xla": "xla", "cudnn": "cuda.cudnn"}
"""JAX's words, and ours."""

_POSITIONAL = ("query", "key", "value", "bias", "cum_seqlens_q", "cum_seqlens_k")


class DotProductOptions(ShardingOptions, total=False):
    """Of `scaled_dot_product_attention`."""

    mask: t.DotProductMask | None
    mask_info: MaskInfo | None
    scale: t.Scalar | None
    softmax_scale: t.Scalar | None
    is_causal: t.Flag
    causal: t.Flag
    query_seq_lengths: t.Lengths | None
    key_value_seq_lengths: t.Lengths | None
    local_window_size: t.Window | None
    sliding_window: t.Window | None
    dropout_prob: t.Number
    dropout_seed: t.Seed | None
    broadcast_dropout: t.Flag
    precision: t.PrecisionLike | None
    init_bias: Callable[[], t.DotProductBias] | None
    implementation: t.DotProductImplementation | None


@overload
def scaled_dot_product_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    *,
    bias: t.DotProductBias | None = None,
    cum_seqlens_q: t.CumulativeLengths | None = None,
    cum_seqlens_k: t.CumulativeLengths | None = None,
    return_residual: Literal[False] = False,
    **options: Unpack[DotProductOptions],
) -> t.Attended: ...


@overload
def scaled_dot_product_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    *,
    bias: t.DotProductBias | None = None,
    cum_seqlens_q: t.CumulativeLengths | None = None,
    cum_seqlens_k: t.CumulativeLengths | None = None,
    return_residual: Literal[True],
    **options: Unpack[DotProductOptions],
) -> tuple[t.Attended, t.LogSumExp]: ...


@overload
def scaled_dot_product_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    *,
    bias: t.DotProductBias | None = None,
    cum_seqlens_q: t.CumulativeLengths | None = None,
    cum_seqlens_k: t.CumulativeLengths | None = None,
    return_residual: t.Flag,
    **options: Unpack[DotProductOptions],
) -> t.Attended | tuple[t.Attended, t.LogSumExp]: ...


@public(*_POSITIONAL[3:])
@honours_masks
def scaled_dot_product_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    *,
    bias: t.DotProductBias | None = None,
    cum_seqlens_q: t.CumulativeLengths | None = None,
    cum_seqlens_k: t.CumulativeLengths | None = None,
    mask: t.DotProductMask | None = None,
    mask_info: MaskInfo | None = None,
    scale: t.Scalar | None = None,
    softmax_scale: t.Scalar | None = None,
    is_causal: t.Flag = False,
    causal: t.Flag = False,
    query_seq_lengths: t.Lengths | None = None,
    key_value_seq_lengths: t.Lengths | None = None,
    local_window_size: t.Window | None = None,
    sliding_window: t.Window | None = None,
    dropout_prob: t.Number = 0.0,
    dropout_seed: t.Seed | None = None,
    broadcast_dropout: t.Flag = False,
    precision: t.PrecisionLike | None = None,
    init_bias: Callable[[], t.DotProductBias] | None = None,
    implementation: t.DotProductImplementation | None = None,
    return_residual: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.Attended | tuple[t.Attended, t.LogSumExp]:
    """Attention under the argument names of `jax.nn.dot_product_attention`: `softmax(mask(scale * q . k + bias)) . v`.

    Args:
        query: `[B, T, H, D]` or `[T, H, D]`.
        key: `[B, S, K, D]` or `[S, K, D]`.
        value: `[B, S, K, V]` or `[S, K, V]`.
        bias: floating `[B|1, H|1, T|1, S|1]`, `[H|1, T|1, S|1]` or `[T|1, S|1]`.
        cum_seqlens_q: int `[R + 1]`; see `flash_attention`.
        cum_seqlens_k: int `[R + 1]`.
        mask: bool, or 0 and 1, shaped like bias; True = visible.
        mask_info: a `MaskInfo`; holds together with everything else.
        scale: factor on the products; None means `1 / sqrt(D)`. `softmax_scale` is another name for it.
        softmax_scale: see scale.
        is_causal: query i sees keys up to i. `causal` is another name for it.
        causal: see is_causal.
        query_seq_lengths: int `[B]`; queries from there on give 0.
        key_value_seq_lengths: int `[B]`; keys from there on are not seen.
        local_window_size: `(left, right)`, inclusive; an int w means (w, w). `sliding_window` is another name for it.
        sliding_window: see local_window_size.
        dropout_prob, dropout_seed, broadcast_dropout, precision: see `flash_attention`.
        init_bias: makes the bias when `bias` is None.
        implementation: JAX's name of a platform: "xla", or "cudnn" for "cuda.cudnn"; None leaves it to `platform`.
        return_residual: return the log-sum-exp too.
        mesh, in_specs, out_specs: see `flash_attention`.

    Returns:
        `[B, T, H, V]` or `[T, H, V]`, in the query's dtype; with `return_residual` also float32 `[B, T, H]` or `[T, H]`.

    Source: Vaswani et al., Attention is all you need, 2017, section 3.2.1.
    """
    if init_bias is not None:
        bias = made_bias(bias, init_bias)
    bias, mask = (_of_heads(name, array, mesh) for name, array in (("bias", bias), ("mask", mask)))
    arrays = given_arrays(query, key, value, bias, None, mask_info, dropout_seed)
    options = {
        "softmax_scale": _one_of("scale", scale, "softmax_scale", softmax_scale),
        "causal": as_flag("is_causal", is_causal) | as_flag("causal", causal),
        "sliding_window": _one_of("local_window_size", local_window_size, "sliding_window", sliding_window),
        "dropout_prob": dropout_prob,
        "broadcast_dropout": broadcast_dropout,
        "precision": precision,
        "return_lse": as_flag("return_residual", return_residual),
    }
    lengths = {"query_lengths": query_seq_lengths, "key_lengths": key_value_seq_lengths}
    lengths = {name: given for name, given in lengths.items() if given is not None}
    check_array("query", query, floating=False)
    form = unbatched if len(query.shape) == 3 else None
    if cum_seqlens_q is not None or cum_seqlens_k is not None:
        if lengths or mask is not None:
            raise invalid(
                "cum_seqlens_q", "packed sequences beside a mask or lengths", "one of them", remedy="use mask_info for a mask"
            )
        form = packed
        add_packed(arrays, options, cum_seqlens_q, cum_seqlens_k, layout="bthd" if len(query.shape) == 4 else "thd")
    arrays.update(lengths)
    if mask is not None:
        arrays["mask"] = mask
    return _sharded.invoke(
        _FLASH_ATTENTION,
        arrays,
        options,
        positional=_POSITIONAL,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        form=form,
        platform=_platform(implementation, platform),
        cfg=cfg,
    )


def _of_heads(name: str, array: Any, mesh: Any) -> Any:
    """`[H, T, S]` as `[1, H, T, S]`; specs say what they split by the axes that are there."""
    if getattr(array, "ndim", 0) != 3:
        return array
    if mesh is not None:
        raise invalid(name, f"shape {tuple(array.shape)}", "four axes with mesh=", remedy=f"pass {name}[None]")
    return array[None]


def _platform(implementation: Any, platform: Any) -> Any:
    """Who runs the call, by JAX's word for it or by ours."""
    if implementation is None:
        return platform
    if implementation not in _IMPLEMENTATIONS:
        raise invalid("implementation", repr(implementation), f"one of {', '.join(_IMPLEMENTATIONS)}, or None")
    if platform not in (None, "auto"):
        raise invalid("platform", repr(platform), "None beside implementation", remedy="they are one setting")
    return _IMPLEMENTATIONS[implementation]


def _one_of(name: str, first: Any, other_name: str, second: Any) -> Any:
    if first is not None and second is not None and first != second:
        raise invalid(other_name, second, f"None, or {name} = {first}: they are one setting")
    return second if first is None else first


ScaledDotProductAttention = class_api("ScaledDotProductAttention", scaled_dot_product_attention)
