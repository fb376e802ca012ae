"""Attention under the names of `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Any

from ejkernel import typing as t
from ejkernel.compositions import sharded as _sharded
from ejkernel.errors import invalid
from ejkernel.masks import MaskInfo
from ejkernel.modules._class_api import class_form
from ejkernel.operations.flash_attention.bind import as_flag
from ejkernel.operations.flash_attention.forms import add_packed, given_arrays, packed
from ejkernel.operations.flash_attention.interface import OPERATION as _FLASH_ATTENTION
from ejkernel.operations.flash_attention.unbatched import unbatched
from ejkernel.utils.checks import check_array

_POSITIONAL = ("query", "key", "value", "bias", "cum_seqlens_q", "cum_seqlens_k")


def scaled_dot_product_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    bias: t.Bias | None = None,
    cum_seqlens_q: t.CumulativeLengths | None = None,
    cum_seqlens_k: t.CumulativeLengths | None = None,
    *,
    mask: t.BoolMask | None = None,
    mask_info: MaskInfo | None = None,
    scale: t.Number | None = None,
    softmax_scale: t.Number | None = None,
    is_causal: t.Flag = False,
    causal: t.Flag = False,
    query_seq_lengths: t.Lengths | None = None,
    key_value_seq_lengths: t.Lengths | None = None,
    local_window_size: t.Window | None = None,
    sliding_window: t.Window | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.Attended:
    """Attention under the argument names of `jax.nn.dot_product_attention`: `softmax(mask(scale * q . k + bias)) . v`.

    Args:
        query: `[B, T, H, D]` or `[T, H, D]`.
        key: `[B, S, K, D]` or `[S, K, D]`.
        value: `[B, S, K, V]` or `[S, K, V]`.
        bias: floating `[B|1, H|1, T|1, S|1]`.
        cum_seqlens_q: int `[R + 1]`; see `flash_attention`.
        cum_seqlens_k: int `[R + 1]`.
        mask: bool, shaped like bias; True = visible.
        mask_info: a `MaskInfo`; holds together with everything else.
        scale: factor on the products; None means `1 / sqrt(D)`. `softmax_scale` is another name for it.
        softmax_scale: see scale.
        is_causal: query i sees keys up to i. `causal` is another name for it.
        causal: see is_causal.
        query_seq_lengths: int `[B]`; queries from there on give 0.
        key_value_seq_lengths: int `[B]`; keys from there on are not seen.
        local_window_size: `(left, right)`, inclusive; an int w means (w, w). `sliding_window` is another name for it.
        sliding_window: see local_window_size.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.
        mesh, in_specs, out_specs: see `flash_attention`.

    Returns:
        `[B, T, H, V]` or `[T, H, V]`, in the query's dtype.

    Raises:
        ValueError: shapes, values or settings that do not fit or contradict each other.
        TypeError: a wrong type or dtype.
        NoKernelError: no admitted platform supports the call.

    Source: Vaswani et al., Attention is all you need, 2017, section 3.2.1.
    """
    arrays = given_arrays(query, key, value, bias, None, mask_info, None)
    options = {
        "softmax_scale": _one_of("scale", scale, "softmax_scale", softmax_scale),
        "causal": as_flag("is_causal", is_causal) | as_flag("causal", causal),
        "sliding_window": _one_of("local_window_size", local_window_size, "sliding_window", sliding_window),
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
        platform=platform,
        cfg=cfg,
    )


def _one_of(name: str, first: Any, other_name: str, second: Any) -> Any:
    if first is not None and second is not None and first != second:
        raise invalid(other_name, second, f"None, or {name} = {first}: they are one setting")
    return second if first is None else first


ScaledDotProductAttention = class_form("ScaledDotProductAttention", scaled_dot_product_attention)
