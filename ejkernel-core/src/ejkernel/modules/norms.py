"""Normalisation."""

from __future__ import annotations

from ejkernel import typing as t
from ejkernel.modules._class_api import class_form
from ejkernel.operations.add_rms_norm.interface import OPERATION as _ADD_RMS_NORM
from ejkernel.operations.layer_norm.interface import OPERATION as _LAYER_NORM
from ejkernel.operations.rms_norm.interface import OPERATION as _RMS_NORM


def rms_norm(
    x: t.Rows,
    scale: t.RowScale | None = None,
    offset: t.RowScale | None = None,
    *,
    epsilon: t.Number = 1e-6,
    axis: t.Count = -1,
    scale_offset: t.Number = 0.0,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.RowsOutput:
    """Root-mean-square normalisation: `x / sqrt(mean(x^2) + epsilon) * (scale + scale_offset) + offset`.

    Args:
        x: `[..., d, ...]`, float32, bfloat16 or float16; any length.
        scale: `[d]`; None means ones.
        offset: `[d]`; None means zeros.
        epsilon: added to the mean square.
        axis: the axis of size d.
        scale_offset: added to `scale`; 1 for checkpoints that store `scale - 1` (Gemma).
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.

    Returns:
        Like x. Computed in float32 inside.

    Raises:
        ValueError: a shape, axis or value does not fit.
        TypeError: not an array of a floating type.
        NoKernelError: no admitted platform supports the call.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    return _RMS_NORM.invoke(
        {"x": x, "scale": scale, "offset": offset},
        {"epsilon": epsilon, "axis": axis, "scale_offset": scale_offset},
        platform=platform,
        cfg=cfg,
    )


def layer_norm(
    x: t.Rows,
    scale: t.RowScale | None = None,
    offset: t.RowScale | None = None,
    *,
    epsilon: t.Number = 1e-6,
    axis: t.Count = -1,
    scale_offset: t.Number = 0.0,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.RowsOutput:
    """Layer normalisation: `(x - mean(x)) / sqrt(var(x) + epsilon) * (scale + scale_offset) + offset`.

    Args:
        x: `[..., d, ...]`, float32, bfloat16 or float16; any length.
        scale: `[d]`; None means ones.
        offset: `[d]`; None means zeros.
        epsilon: added to the variance, which is the mean of squared deviations (biased).
        axis: the axis of size d.
        scale_offset: added to `scale`; 1 for checkpoints that store `scale - 1`.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.

    Returns:
        Like x. Computed in float32 inside.

    Raises:
        ValueError: a shape, axis or value does not fit.
        TypeError: not an array of a floating type.
        NoKernelError: no admitted platform supports the call.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
    """
    return _LAYER_NORM.invoke(
        {"x": x, "scale": scale, "offset": offset},
        {"epsilon": epsilon, "axis": axis, "scale_offset": scale_offset},
        platform=platform,
        cfg=cfg,
    )


def fused_add_rms_norm(
    x: t.Rows,
    residual: t.Rows,
    scale: t.RowScale | None = None,
    *,
    epsilon: t.Number = 1e-6,
    axis: t.Count = -1,
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
        scale: `[d]`; None means ones.
        epsilon: added to the mean square.
        axis: the axis of size d.
        scale_offset: added to `scale`; 1 for checkpoints that store `scale - 1` (Gemma).
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.

    Returns:
        output, like x, and sum, like residual: the stream for the next block. Computed in float32 inside; both have cotangents.

    Raises:
        ValueError: a shape, axis or value does not fit.
        TypeError: not an array of a floating type.
        NoKernelError: no admitted platform supports the call.

    Source: name and result as in vLLM and Liger, which also norm the rounded sum; nothing is updated in place.
    """
    return _ADD_RMS_NORM.invoke(
        {"x": x, "residual": residual, "scale": scale},
        {"epsilon": epsilon, "axis": axis, "scale_offset": scale_offset},
        platform=platform,
        cfg=cfg,
    )


RmsNorm = class_form("RmsNorm", rms_norm)
LayerNorm = class_form("LayerNorm", layer_norm)
FusedAddRmsNorm = class_form("FusedAddRmsNorm", fused_add_rms_norm)
