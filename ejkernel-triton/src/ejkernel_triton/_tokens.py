"""Device functions of scans whose channels do not mix: where a program is, and rows of tokens. `P` is the `Params` of the scan.

A program walks through a segment of tokens for a block of channels, chunk by chunk; the tokens of a chunk are unrolled.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: RUF005 - in a kernel a tuple grows by addition alone

import triton
import triton.language as tl


@triton.jit
def place_of(segments, P: tl.constexpr):
    """Member of the batch, segment and block of channels of this program."""
    BLOCKS: tl.constexpr = (P.channels + P.block_i - 1) // P.block_i
    i_block = tl.program_id(0) % BLOCKS
    i_segment = tl.program_id(0) // BLOCKS % segments
    i_batch = tl.program_id(0) // BLOCKS // segments
    return i_batch, i_segment, i_block


@triton.jit
def row_of(p, u, o_column, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, OTHER: tl.constexpr):
    """Token u of a chunk `[BLOCK]` in float32; OTHER from `rows` on and beyond SIZE."""
    if P.whole and SIZE % BLOCK == 0:
        b_row = tl.load(p + u * SIZE + o_column)
    else:
        b_row = tl.load(p + u * SIZE + o_column, mask=(u < rows) & (o_column < SIZE), other=OTHER)
    return b_row.to(tl.float32)


@triton.jit
def rows_of(p, o_column, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, OTHER: tl.constexpr = 0.0):
    """All tokens of a chunk, one by one: loads that no store lies between are issued together."""
    CHUNK: tl.constexpr = P.chunk_size
    b_rows = ()
    for u in tl.static_range(CHUNK):
        b_rows = b_rows + (row_of(p, u, o_column, rows, SIZE, BLOCK, P, OTHER),)
    return b_rows


@triton.jit
def store_row(p, b_row, u, o_column, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr):
    b_row = b_row.to(p.dtype.element_ty)
    if P.whole and SIZE % BLOCK == 0:
        tl.store(p + u * SIZE + o_column, b_row)
    else:
        tl.store(p + u * SIZE + o_column, b_row, mask=(u < rows) & (o_column < SIZE))


@triton.jit
def joined(b_rows, SIZE: tl.constexpr, P: tl.constexpr):
    """All tokens of a chunk, `[SIZE]` each, as one tile `[SIZE, chunk_size]`."""
    CHUNK: tl.constexpr = P.chunk_size
    HALVES: tl.constexpr = P.chunk_size.bit_length() - 1
    for i_half in tl.static_range(HALVES):
        b_pairs = ()
        for u in tl.static_range(CHUNK >> (i_half + 1)):
            b_pairs = b_pairs + (tl.join(b_rows[u], b_rows[u + (CHUNK >> (i_half + 1))]),)
        b_rows = b_pairs
    return tl.reshape(b_rows[0], [SIZE, CHUNK])


@triton.jit
def store_rows(p, b_tile, o_column, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr):
    """Tokens of a chunk that are `joined`, `[BLOCK, chunk_size]`."""
    o_row = tl.arange(0, P.chunk_size)
    p_tile = p + o_row[None, :] * SIZE + o_column[:, None]
    b_tile = b_tile.to(p.dtype.element_ty)
    if P.whole and SIZE % BLOCK == 0:
        tl.store(p_tile, b_tile)
    else:
        tl.store(p_tile, b_tile, mask=(o_row < rows)[None, :] & (o_column < SIZE)[:, None])
