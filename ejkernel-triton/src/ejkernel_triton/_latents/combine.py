"""The sum of the results of a tile's splits, in a fixed order (Dao et al., Flash-Decoding, 2023)."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel_triton._blocks import dot_block, next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._latents.tiles import LN2
from ejkernel_triton._pages import batch_stride

_AT_ONCE = 4096
"""Numbers of partial results that a program loads at once."""


@triton.jit
def latent_combine_kernel(
    p_partial,
    p_partial_lse,
    p_value_scale,
    rows,
    rows_of_member,
    p_out,
    p_lse,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    AT_ONCE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_SCALE_BATCH: tl.constexpr,
    SAVE_LSE: tl.constexpr,
):
    """One row. The partial results of splits that saw no key are not read."""
    i_row = tl.program_id(0).to(tl.int64)
    o_split = tl.arange(0, BLOCK_S)
    b_lse = tl.load(p_partial_lse + o_split.to(tl.int64) * rows + i_row, mask=o_split < SPLITS, other=float("-inf"))
    b_max = tl.max(b_lse, axis=0)
    b_finite = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.sum(tl.exp2(b_lse - b_finite), axis=0)
    o_value = tl.arange(0, BLOCK_V)
    b_out = tl.zeros([BLOCK_V], tl.float32)
    for i_first in tl.static_range(0, SPLITS, AT_ONCE):
        i_split = i_first + tl.arange(0, AT_ONCE)
        o_row = i_split.to(tl.int64) * rows + i_row  # [AT_ONCE]
        b_part_lse = tl.load(p_partial_lse + o_row, mask=i_split < SPLITS, other=float("-inf"))
        m_part = (b_part_lse != float("-inf"))[:, None] & (o_value < V)[None, :]
        b_part = tl.load(p_partial + o_row[:, None] * V + o_value[None, :], mask=m_part, other=0.0)  # [AT_ONCE, BLOCK_V]
        b_out += tl.sum(b_part * tl.exp2(b_part_lse - b_finite)[:, None], axis=0)
    b_factor = 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum)
    if VALUE_SCALE:
        b_factor *= tl.load(p_value_scale + i_row // rows_of_member * VALUE_SCALE_BATCH)
    tl.store(p_out + i_row * V + o_value, (b_out * b_factor).to(p_out.dtype.element_ty), mask=o_value < V)
    if SAVE_LSE:
        tl.store(p_lse + i_row, tl.where(b_sum == 0.0, float("-inf"), (b_finite + tl.log2(b_sum)) * LN2))


def combined(partial: Any, partial_lse: Any, dtype: Any, *, save_lse: bool, value_scale: Any = None) -> tuple[Any, Any]:
    """From `[splits, b, N, H, V]` and `[splits, b, N, H]`: out `[b, N, H, V]` in the dtype, lse `[b, N, H]` or one element."""
    splits, batch, *heads = partial_lse.shape
    rows = partial_lse.size // splits
    block, size = dot_block(partial.shape[-1]), partial.shape[-1]
    out, lse = call_kernel(
        latent_combine_kernel,
        (partial, partial_lse, partial if value_scale is None else value_scale, rows, rows // batch),
        ((partial.shape[1:], dtype), ((batch, *heads) if save_lse else (1,), jnp.float32)),
        grid=rows,
        num_warps=4,
        V=size,
        BLOCK_V=block,
        SPLITS=splits,
        BLOCK_S=next_power_of_2(splits),
        AT_ONCE=min(next_power_of_2(splits), max(_AT_ONCE // block, 1)),
        VALUE_SCALE=value_scale is not None,
        VALUE_SCALE_BATCH=batch_stride(value_scale),
        SAVE_LSE=save_lse,
    )
    return out, lse
