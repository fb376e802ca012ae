"""Normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.call.arrays import statistics_dtype
from ejkernel.errors import invalid, wrong_type
from ejkernel.modules._class_api import class_api
from ejkernel.operations.add_rms_norm.interface import OPERATION as _ADD_RMS_NORM
from ejkernel.operations.common.options import as_flag
from ejkernel.operations.layer_norm.interface import OPERATION as _LAYER_NORM
from ejkernel.operations.rms_norm.interface import OPERATION as _RMS_NORM
from ejkernel.utils.checks import check_compute, check_shape

__all__ = [
    "FusedAddRmsNorm",
    "GatedRmsNorm",
    "LayerNorm",
    "RmsNorm",
    "fused_add_rms_norm",
    "gated_rms_norm",
    "layer_norm",
    "rms_norm",
]

Activation = Callable[[jax.Array], jax.Array]


@public()
def rms_norm(
    x: t.Rows,
    scale: t.RowScale | None = None,
    offset: t.RowScale | None = None,
    *,
    epsilon: t.Number = 1e-6,
    axis: t.Axis = -1,
    scale_offset: t.Number = 0.0,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.RowsOutput:
    """Root-mean-square normalisation: `x / sqrt(mean(x^2) + epsilon) * (scale + scale_offset) + offset`.

    Args:
        x: `[..., d, ...]`, float32, bfloat16 or float16; any length.
        scale: `[d]`; None means ones. With several axes it has each of them, in the order of x.
        offset: like scale; None means zeros.
        epsilon: added to the mean square.
        axis: the axis of size d, or several, which are normalised together.
        scale_offset: added to `scale`; 1 for checkpoints that store `scale - 1` (Gemma).

    Returns:
        Like x. Computed in float32 inside.

    Raises:
        TypeError: not an array of a floating type.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    arrays, options, run = split(locals(), "x scale offset")
    return _RMS_NORM.invoke(arrays, options, **run)


@public()
def layer_norm(
    x: t.Rows,
    scale: t.RowScale | None = None,
    offset: t.RowScale | None = None,
    *,
    epsilon: t.Number = 1e-6,
    axis: t.Axis = -1,
    scale_offset: t.Number = 0.0,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.RowsOutput:
    """Layer normalisation: `(x - mean(x)) / sqrt(var(x) + epsilon) * (scale + scale_offset) + offset`.

    Args:
        x: `[..., d, ...]`, float32, bfloat16 or float16; any length.
        scale: `[d]`; None means ones. With several axes it has each of them, in the order of x.
        offset: like scale; None means zeros.
        epsilon: added to the variance, which is the mean of squared deviations (biased).
        axis: the axis of size d, or several, which are normalised together.
        scale_offset: added to `scale`; 1 for checkpoints that store `scale - 1`.

    Returns:
        Like x. Computed in float32 inside.

    Raises:
        TypeError: not an array of a floating type.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
    """
    arrays, options, run = split(locals(), "x scale offset")
    return _LAYER_NORM.invoke(arrays, options, **run)


@public()
def fused_add_rms_norm(
    x: t.Rows,
    residual: t.Rows,
    scale: t.RowScale | None = None,
    *,
    epsilon: t.Number = 1e-6,
    axis: t.Axis = -1,
    scale_offset: t.Number = 0.0,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.RowsOutput, t.RowsOutput]:
    """Residual addition and the norm that follows it: `sum = x + residual`, `output = rms_norm(sum)`.

    `output = sum / sqrt(mean(sum^2) + epsilon) * (scale + scale_offset)`. The norm reads the sum as it is returned, rounded to its
    dtype, so both results are those of the addition and `rms_norm` one after the other. Backward reads the sum, not x and residual.

    Args:
        x: `[..., d, ...]`, what a block adds to the residual stream; float32, bfloat16 or float16; any length.
        residual: the stream, of the shape of x. Its dtype may be another: a stream in float32 stays in float32.
        scale: `[d]`; None means ones. With several axes it has each of them, in the order of x.
        epsilon: added to the mean square.
        axis: the axis of size d, or several, which are normalised together.
        scale_offset: added to `scale`; 1 for checkpoints that store `scale - 1` (Gemma).

    Returns:
        output, like x, and sum, like residual: the stream for the next block. Computed in float32 inside; both have cotangents.

    Raises:
        TypeError: not an array of a floating type.

    Source: name and result as in vLLM and Liger, which also norm the rounded sum; nothing is updated in place.
    """
    arrays, options, run = split(locals(), "x residual scale")
    return _ADD_RMS_NORM.invoke(arrays, options, **run)


@public()
def gated_rms_norm(
    x: t.Rows,
    gate: t.Rows,
    scale: t.RowScale | None = None,
    *,
    norm_before_gate: t.Flag,
    group_size: t.Count | None = None,
    epsilon: t.Number = 1e-5,
    act_fn: Activation | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.RowsOutput:
    """RMS norm with a gate: `norm(x act(gate)) * scale`, or with norm_before_gate `norm(x) * scale * act(gate)`.

    `norm(y) = y / sqrt(mean(y^2) + epsilon)`, the mean over each group of consecutive channels. The two orders are different
    models: Mamba-2 and most models with its layer gate first, gated delta nets norm first. So the order has no default.

    Args:
        x: `[..., d]`, float32, bfloat16 or float16.
        gate: like x, before its activation.
        scale: `[d]`; None means ones.
        norm_before_gate: norm x, then gate it; False: gate x, then norm the product.
        group_size: channels that share a mean square, a divisor of d (Mamba-2: `d / n_groups`); None = d.
        epsilon: added to the mean square.
        act_fn: activation of the gate; None = silu.
        cfg: config override for the chosen implementation of `rms_norm`.

    Returns:
        Like x. Computed in float32 inside, with nothing rounded in between.

    Raises:
        TypeError: not an array of a floating type, or an argument of a wrong type.

    Source: Dao and Gu, Transformers are SSMs, 2024, and Yang et al., Gated Delta Networks, 2024; argument names as in their code.
    """
    check_compute("x", x)
    check_compute("gate", gate)
    if x.ndim == 0:
        raise invalid("x", "shape ()", "at least one axis")
    check_shape("gate", gate, x.shape, "[..., d] as x")
    width = x.shape[-1]
    if scale is not None:
        check_compute("scale", scale)
        check_shape("scale", scale, (width,), "[d]")
    group_size = _group_size(group_size, width)
    wide = statistics_dtype(str(x.dtype))
    activated = activation(act_fn)(jnp.asarray(gate, wide))
    y = jnp.asarray(x, wide)
    norm_first = as_flag("norm_before_gate", norm_before_gate)
    y = y if norm_first else y * activated
    groups = y if group_size == width else y.reshape(*y.shape[:-1], width // group_size, group_size)
    y = rms_norm(groups, epsilon=epsilon, platform=platform, cfg=cfg).reshape(x.shape)
    if scale is not None:
        y = y * jnp.asarray(scale, wide).reshape(*[1] * (x.ndim - 1), width)
    return (y * activated if norm_first else y).astype(x.dtype)


def activation(act_fn: Activation | None) -> Activation:
    """The activation of a gate; None = silu."""
    if act_fn is not None and not callable(act_fn):  # pyright: ignore[reportUnnecessaryComparison]
        raise wrong_type("act_fn", repr(act_fn), "a function of an array, or None")
    return act_fn or jax.nn.silu


def _group_size(group_size: Any, width: int) -> int:
    if group_size is None:
        return width
    if isinstance(group_size, bool) or not isinstance(group_size, (int, np.integer)):
        raise wrong_type("group_size", repr(group_size), "an int or None")
    if group_size < 1 or width % group_size:
        raise invalid("group_size", group_size, f"a divisor of the {width} channels of x")
    return int(group_size)


RmsNorm = class_api("RmsNorm", rms_norm)
LayerNorm = class_api("LayerNorm", layer_norm)
FusedAddRmsNorm = class_api("FusedAddRmsNorm", fused_add_rms_norm)
GatedRmsNorm = class_api("GatedRmsNorm", gated_rms_norm)
