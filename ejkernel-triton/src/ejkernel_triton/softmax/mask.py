"""`where` of `softmax`, read as it is stored: each of its axes may have size 1."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import triton
import triton.language as tl

ABSENT, PER_ROW, PER_ELEMENT = 0, 1, 2
"""No mask, one that is `[..., 1]`, one that is `[..., d]`."""


class Mask(NamedTuple):
    """`where` with leading axes (stored, repeated `middle` times, stored: `inner` rows); `kind` describes its columns."""

    where: Any
    middle: int
    inner: int
    kind: int


def mask_of(x: Any, where: Any) -> Mask:
    """Normalise `where` to that form. Masks whose stored and repeated axes alternate more often are partly materialised."""
    if where is None:
        return Mask(x, 1, 1, ABSENT)
    kind = PER_ELEMENT if where.shape[-1] == x.shape[-1] else PER_ROW
    sizes = x.shape[:-1]
    repeated = [where.shape[axis] == 1 and size > 1 for axis, size in enumerate(sizes)]
    counted = [axis for axis, size in enumerate(sizes) if size > 1]
    inner_axes: list[int] = []
    while counted and not repeated[counted[-1]]:
        inner_axes.append(counted.pop())
    middle_axes: list[int] = []
    while counted and repeated[counted[-1]]:
        middle_axes.append(counted.pop())
    written = [axis for axis in counted if repeated[axis]]
    if written:
        shape = [sizes[axis] if axis in written else size for axis, size in enumerate(where.shape)]
        where = jnp.broadcast_to(where, shape)
    return Mask(where, math.prod(sizes[axis] for axis in middle_axes), math.prod(sizes[axis] for axis in inner_axes), kind)


@triton.jit
def masked(m_tile, p_where, i_row, m_row, o_width, middle, inner, WIDTH: tl.constexpr, WHERE: tl.constexpr):
    """The in-bounds entries of a tile [ROWS, BLOCK] that `where` selects."""
    m_where = m_tile
    if WHERE != 0:
        o_row = (i_row // (middle * inner)).to(tl.int64) * inner + i_row % inner  # [ROWS]
        if WHERE == 1:
            m_where = m_tile & (tl.load(p_where + o_row, mask=m_row, other=0) != 0)[:, None]
        else:
            m_where = m_tile & (tl.load(p_where + o_row[:, None] * WIDTH + o_width[None, :], mask=m_tile, other=0) != 0)
    return m_where
