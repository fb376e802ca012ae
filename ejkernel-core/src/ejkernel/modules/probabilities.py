"""Softmax."""

from __future__ import annotations

from collections.abc import Sequence

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.modules._class_api import class_api
from ejkernel.operations.softmax.interface import OPERATION as _SOFTMAX

__all__ = ["Softmax", "softmax"]


@public()
def softmax(
    x: t.Rows,
    axis: t.Axis | None = -1,
    where: t.Where | None = None,
    *,
    scale: t.Scalar = 1.0,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.RowsOutput:
    """Softmax: `exp(scale * x_i) / sum_j exp(scale * x_j)`, j over the places where `where` is True.

    A place that is masked, or whose x is -inf, gets 0, and so does every place of a row that has nothing else. What x holds
    at masked places, NaN included, changes neither the result nor the gradient.

    Args:
        x: float32, bfloat16 or float16; any length.
        axis: the axis or axes over which the result sums to 1; None = all of them.
        where: bool, broadcastable to x; None means everywhere.
        scale: factor on x, for example 1 / temperature; may be traced, and then has a gradient.

    Returns:
        Like x. Computed in float32 inside.

    Raises:
        TypeError: x is not of a floating type, or where is not bool.

    Source: argument names as `jax.nn.softmax`; the stable form is in Milakov and Gimelshein, Online normalizer calculation
        for softmax, 2018.
    """
    arrays, options, run = split(locals(), "x where")
    options["axis"] = tuple(axis) if isinstance(axis, Sequence) and not isinstance(axis, str) else axis
    return _SOFTMAX.invoke(arrays, options, **run)


Softmax = class_api("Softmax", softmax)
