"""Attention over sequences that are split over devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import jax.numpy as jnp
import numpy as np

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions import mesh as _mesh, sharded as _sharded
from ejkernel.compositions.axes import Axes, as_axes, check_mesh_axes
from ejkernel.compositions.frameworks import refuses_masks
from ejkernel.compositions.ring.bind import check_words
from ejkernel.compositions.ring.entry import RingAttentionOver
from ejkernel.errors import invalid, wrong_type
from ejkernel.masks import MaskInfo
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import ShardingOptions, VisibilityOptions
from ejkernel.operations.common.options import as_count
from ejkernel.operations.flash_attention.interface import OPERATION as _FLASH_ATTENTION
from ejkernel.utils.checks import check_array, normalise_axis

__all__ = ["RingAttention", "ring_attention", "zigzag_shard", "zigzag_unshard"]

_POSITIONAL = ("query", "key", "value", "softmax_aux", "bias")


class RingOptions(VisibilityOptions, ShardingOptions, total=False):
    """Of `ring_attention`."""

    causal: t.Flag
    logits_soft_cap: t.Number | None
    softmax_scale: t.Scalar | None
    axis_name: t.AxisNames | None
    fused_backward: t.Flag
    layout: t.SequenceLayout
    strategy: t.SequenceStrategy
    precision: t.PrecisionLike | None


@overload
def ring_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    *,
    softmax_aux: t.Sinks | None = None,
    bias: t.RingBias | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[RingOptions],
) -> t.Attended: ...


@overload
def ring_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    *,
    softmax_aux: t.Sinks | None = None,
    bias: t.RingBias | None = None,
    return_lse: Literal[True],
    **options: Unpack[RingOptions],
) -> tuple[t.Attended, t.LogSumExp]: ...


@overload
def ring_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    *,
    softmax_aux: t.Sinks | None = None,
    bias: t.RingBias | None = None,
    return_lse: t.Flag,
    **options: Unpack[RingOptions],
) -> t.Attended | tuple[t.Attended, t.LogSumExp]: ...


@public(*_POSITIONAL[3:])
@refuses_masks("say masks with mask_info, or use flash_attention")
def ring_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    *,
    softmax_aux: t.Sinks | None = None,
    bias: t.RingBias | None = None,
    mask_info: MaskInfo | None = None,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    causal: t.Flag = False,
    logits_soft_cap: t.Number | None = None,
    softmax_scale: t.Scalar | None = None,
    axis_name: t.AxisNames | None = None,
    fused_backward: t.Flag = False,
    layout: t.SequenceLayout = "contiguous",
    strategy: t.SequenceStrategy = "ring",
    precision: t.PrecisionLike | None = None,
    return_lse: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.Attended | tuple[t.Attended, t.LogSumExp]:
    """Exact softmax attention over a sequence that is split over devices: `softmax(mask(cap(scale * q . k + bias))) . v`.

    Every device keeps its queries; blocks of keys and values go round the devices of `axis_name` while the local attention of
    the chosen platform works on the block at hand. Nothing is gathered. Blocks that causal, window or chunk masks hide from
    every device are not visited; blocks that a device finds hidden by causality, positions or segments cost it nothing.

    With `strategy="all_to_all"` (Ulysses) every device exchanges its tokens for the whole sequence of its share of the heads, the
    local attention runs once, and the output is exchanged back.

    Args:
        query: `[B, T, H, D]`, float32, bfloat16 or float16; float64 on one device or by all_to_all. With `mesh` the whole array,
            inside a `shard_map` of one's own the device's shard; likewise everything below.
        key: `[B, S, K, D]`; query head h reads key head `h // (H // K)`.
        value: `[B, S, K, V]`.
        softmax_aux: sinks `[H]`, `[H, n]` or `[1, n]`; take part in each row's denominator once; have gradients.
        bias: floating `[B|1, H|1, T|1, S|1]` or `[T|1, S|1]`; has a gradient. A shard holds its queries' rows and *all* keys.
        mask_info: a `MaskInfo`, split along with the arrays. A shard's holds the segments and positions of its own tokens, the
            rows of a dense mask with all keys, and lengths of the whole sequence.
        sliding_window: `(left, right)`, inclusive, None = unlimited; an int w means (w, w).
        chunk_size: a query sees only keys of its own chunk of this many positions.
        causal: a query sees keys up to its own position in the whole sequence.
        logits_soft_cap: c > 0 turns logits into `c * tanh(logits / c)`.
        softmax_scale: factor on the products; None means `1 / sqrt(D)`.
        axis_name: mesh axis, or axes, over which the sequence is split; None means local attention.
        fused_backward: a hint that changes nothing here: one pass always makes all gradients of a block.
        layout: order of the sequence: "contiguous", or "zigzag" as `zigzag_shard` makes it, which balances causal work.
        strategy: "ring", or "all_to_all", for which the number of devices must divide H. Key heads are repeated until it divides
            them too; a dense mask and a bias are exchanged by head, or gathered where they have one for all heads.
        precision: of the matrix products, see `flash_attention`.
        return_lse: return the log-sum-exp too.
        platform: of the local attention: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation of the local attention.
        mesh: make the `jax.shard_map` here; batch and heads may be split over its other axes.
        in_specs: one PartitionSpec or None for each of query, key, value, softmax_aux, bias; the last two follow the query without.
        out_specs: PartitionSpec of the output, or a pair of them with `return_lse`.

    Returns:
        `[B, T, H, V]` in the query's dtype; with `return_lse` also float32 `[B, T, H]`, natural logarithm, differentiable.

    Raises:
        NoKernelError: no admitted platform supports the local attention.

    Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite Context, 2023; zigzag order:
        Grattafiori et al., The Llama 3 Herd of Models, 2024, section 3.3.2 (context parallelism); all_to_all: Jacobs et
        al., DeepSpeed Ulysses, 2023.
    """
    arrays, options, run = split(
        locals(), "query key value softmax_aux bias mask_info", own="axis_name fused_backward layout strategy"
    )
    if not isinstance(fused_backward, bool):
        raise wrong_type("fused_backward", repr(fused_backward), "True or False")
    check_words(layout, strategy)
    for name in _POSITIONAL:
        if not hasattr(arrays[name], "dtype") and (arrays[name] is not None or name in _POSITIONAL[:3]):
            raise wrong_type(name, type(arrays[name]).__name__, "an array")
    arrays = {name: array for name, array in arrays.items() if array is not None}
    axes = as_axes(axis_name)
    if mesh is not None:
        axes = _split_axes(axes, arrays, mesh, in_specs, out_specs)
    operation = RingAttentionOver(axes, layout, strategy) if axes else _FLASH_ATTENTION
    split_axes = axes if mesh is not None else ()
    return _sharded.invoke(operation, arrays, options, positional=_POSITIONAL, sequence_axes=split_axes, **run)


def _split_axes(axes: Axes, arrays: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Axes:
    """Those of `axis_name` that have more than one device; none where the specs leave the sequence whole."""
    check_mesh_axes(axes, mesh)
    _mesh.is_sharded(mesh, in_specs, out_specs)
    split = _sharded.Split.of(arrays, _mesh.named_specs(arrays, _POSITIONAL, in_specs), mesh)
    several = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    return several if split.queries or split.keys else ()


@public(dispatches=False)
def zigzag_shard(array: t.WholeSequence, axis_size: t.Count, axis: t.Count = 1) -> t.ReorderedSequence:
    """Reorder a sequence so that splitting it over `axis_size` devices balances causal attention.

    The sequence is cut into `2 axis_size` pieces; device i gets pieces i and `2 axis_size - 1 - i`. A permutation; apply it to
    everything that has the sequence axis: tokens, targets, segments, positions, both axes of a bias or dense mask.

    Args:
        array: the sequence on `axis`, in natural order, of a length divisible by `2 axis_size`.
        axis_size: number of devices that will hold it.
        axis: which axis.

    Returns:
        The array for `ring_attention(..., layout="zigzag")`.

    Raises:
        ValueError: the length does not divide, or there is no such axis.
        TypeError: a wrong type.
    """
    return _permuted(array, axis_size, axis, _zigzag)


@public(dispatches=False)
def zigzag_unshard(array: t.WholeSequence, axis_size: t.Count, axis: t.Count = 1) -> t.ReorderedSequence:
    """The inverse of `zigzag_shard`, e.g. for outputs.

    Args:
        array: in zigzag order on `axis`.
        axis_size: number of devices that hold it.
        axis: which axis.

    Returns:
        The array in natural order.

    Raises:
        ValueError: the length does not divide, or there is no such axis.
        TypeError: a wrong type.
    """
    return _permuted(array, axis_size, axis, lambda size: np.argsort(_zigzag(size)).tolist())


def _zigzag(axis_size: int) -> list[int]:
    return [piece for device in range(axis_size) for piece in (device, 2 * axis_size - 1 - device)]


def _permuted(array: Any, axis_size: Any, axis: Any, order_of: Callable[[int], list[int]]) -> Any:
    check_array("array", array, floating=False)
    axis = normalise_axis(axis, array.ndim)
    order = order_of(as_count("axis_size", axis_size, 1))
    length, pieces = array.shape[axis], len(order)
    if length % pieces:
        raise invalid("array", f"length {length} on axis {axis}", f"a multiple of 2 axis_size = {2 * axis_size}; pad it")
    cut = array.reshape(*array.shape[:axis], pieces, length // pieces, *array.shape[axis + 1 :])
    return jnp.take(cut, jnp.asarray(order), axis=axis).reshape(array.shape)


RingAttention = class_api("RingAttention", ring_attention)
