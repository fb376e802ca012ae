"""`where` of `softmax`, read without broadcasting it in memory."""

from __future__ import annotations

from typing import NamedTuple

from ejkernel.call import ArraySpec

MOST_AXES = 8


class Axes(NamedTuple):
    """Axes before the columns, outermost first: sizes of x, and strides in rows of where, 0 where it is broadcast."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def axes_of(x: ArraySpec, where: ArraySpec) -> Axes:
    """Axes of `where` `[..., 1 or d]`, each as in x `[..., d]` or 1; adjacent axes are merged where strides allow."""
    found: list[tuple[int, int]] = []
    rows = 1
    for size, stored in zip(reversed(x.shape[:-1]), reversed(where.shape[:-1]), strict=True):
        if size == 1:
            continue
        stride = 0 if stored == 1 else rows
        rows *= stored
        if found and stride == (found[-1][0] * found[-1][1]):
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, stride))
    found = found or [(1, 0)]
    return Axes(tuple(size for size, _ in reversed(found)), tuple(stride for _, stride in reversed(found)))
