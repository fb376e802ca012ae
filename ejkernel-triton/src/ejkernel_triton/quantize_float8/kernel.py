"""One pass: a tile is read once, written as float8 once or twice, the second time transposed, and its largest number is kept."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.quantize_float8.interface import QuantizeFloat8Call, QuantizeFloat8Inputs, QuantizeFloat8Outputs
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.quantize_float8.config import Config, tiles


@triton.jit
def quantize_float8_kernel(
    p_x,
    p_scale,
    p_values,
    p_transposed,
    p_largest,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MOST: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """SCALES: 1, or one for each member of the batch."""
    ACROSS: tl.constexpr = (COLUMNS + BLOCK_K - 1) // BLOCK_K
    DOWN: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    i_tile = tl.program_id(0)
    i_batch = (i_tile // (ACROSS * DOWN)).to(tl.int64)
    i_first = i_tile % (ACROSS * DOWN) // ACROSS * BLOCK_M
    o_row = (i_first + tl.arange(0, BLOCK_M)).to(tl.int64)
    o_column = (i_tile % ACROSS * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
    m_row, m_column = o_row < ROWS, o_column < COLUMNS
    m_tile = m_row[:, None] & m_column[None, :]
    o_matrix = i_batch * ROWS * COLUMNS
    b_x = tl.load(p_x + o_matrix + o_row[:, None] * COLUMNS + o_column[None, :], mask=m_tile, other=0.0).to(tl.float32)

    # as integers, magnitudes are in the order of numbers, infinity above them, NaN above that
    b_magnitude = b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(b_magnitude, axis=1), axis=0)
    tl.store(p_largest + i_tile, largest.to(tl.float32, bitcast=True))

    scale = tl.load(p_scale + (i_batch if SCALES > 1 else 0))
    b_scaled = tl.clamp(b_x * tl.div_rn(1.0, scale), -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    b_values = b_scaled.to(p_values.dtype.element_ty)  # [BLOCK_M, BLOCK_K]
    tl.store(p_values + o_matrix + o_row[:, None] * COLUMNS + o_column[None, :], b_values, mask=m_tile)
    if TRANSPOSED:
        p_tile = p_transposed + o_matrix + o_column[:, None] * ROWS + o_row[None, :]
        tl.store(p_tile, tl.trans(b_values), mask=m_column[:, None] & m_row[None, :])


def forward(call: QuantizeFloat8Call, inputs: QuantizeFloat8Inputs, config: Config) -> QuantizeFloat8Outputs:
    batch, rows, columns = call.x.shape
    back = (batch, columns, rows) if call.transposed else (1,)
    if not call.x.size:
        empty = jnp.zeros(call.x.shape, call.dtype), jnp.zeros(batch, jnp.float32)
        return QuantizeFloat8Outputs(*empty, jnp.zeros(back, call.dtype) if call.transposed else None)
    programs = tiles(call, config)
    values, transposed, largest = call_kernel(
        quantize_float8_kernel,
        (inputs.x, inputs.scale),
        ((call.x.shape, call.dtype), (back, call.dtype), ((programs,), jnp.float32)),
        grid=programs,
        num_warps=config.num_warps,
        ROWS=rows,
        COLUMNS=columns,
        SCALES=inputs.scale.shape[0],
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        MOST=call.most,
        TRANSPOSED=call.transposed,
    )
    found = jnp.max(largest.reshape(batch, -1), axis=1)
    return QuantizeFloat8Outputs(values, found, transposed if call.transposed else None)
