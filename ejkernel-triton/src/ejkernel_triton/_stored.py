"""Device functions that read rows of a cache in any dtype that it is stored in."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl


@triton.jit
def load_rows(p_rows, o_row, m_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Load rows `[R, BLOCK]` at offsets `o_row [R]` as DTYPE; 0 where there is no row, and beyond SIZE."""
    STORED: tl.constexpr = p_rows.dtype.element_ty
    o_size = tl.arange(0, BLOCK)
    m_tile = m_row[:, None]
    if SIZE < BLOCK:
        m_tile = m_tile & (o_size < SIZE)[None, :]
    o_rows = o_row[:, None] + o_size[None, :]
    if STORED.primitive_bitwidth > 8:
        b_rows = tl.load(p_rows + o_rows, mask=m_tile, other=0.0)  # [R, BLOCK]
    else:
        p_byte = p_rows.to(tl.pointer_type(tl.int8), bitcast=True)
        b_byte = tl.load(p_byte + o_rows, mask=m_tile, other=0)  # [R, BLOCK]
        b_rows = b_byte.to(tl.float32) if tl.int8 == STORED else b_byte.to(STORED, bitcast=True)
    return b_rows.to(DTYPE)


@triton.jit
def finite_rows(b_rows, AXIS: tl.constexpr):
    """Rows with 0 for what is not finite, and NaN for each that had such, else 0. AXIS: that of channels."""
    b_lost = tl.sum(b_rows.to(tl.float32) * 0.0, axis=AXIS)
    return tl.where(b_rows * 0.0 == 0.0, b_rows, 0.0), b_lost
