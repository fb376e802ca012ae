"""Device functions that the kernels of both phases share. `P` is a `Params`."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def query_of(length, P: tl.constexpr):
    """This program's member of the batch, query, key head and first query head within its group: `P.block_g` heads of a query.

    Queries of one key head follow each other, so that the keys that they share stay in L2.
    """
    TILES: tl.constexpr = (P.groups + P.block_g - 1) // P.block_g
    i_tile = tl.program_id(0) % TILES
    i_query = tl.program_id(0) // TILES % length
    i_head = tl.program_id(0) // TILES // length % P.key_heads
    i_batch = tl.program_id(0) // TILES // length // P.key_heads
    return i_batch, i_query, i_head, i_tile * P.block_g


@triton.jit
def load_tile(p, o_row, m_row, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows `[len(o_row), BLOCK]`, zeros beyond SIZE and where m_row does not hold."""
    o_column = tl.arange(0, BLOCK)
    p_tile = p + o_row[:, None] * STRIDE + o_column[None, :]
    if SIZE == BLOCK:
        return tl.load(p_tile, mask=m_row[:, None], other=0.0)
    return tl.load(p_tile, mask=m_row[:, None] & (o_column < SIZE)[None, :], other=0.0)


@triton.jit
def store_tile(p, b_tile, o_row, m_row, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    o_column = tl.arange(0, BLOCK)
    p_tile = p + o_row[:, None] * STRIDE + o_column[None, :]
    tl.store(p_tile, b_tile.to(p.dtype.element_ty), mask=m_row[:, None] & (o_column < SIZE)[None, :])


@triton.jit
def steps_of(p_blocks, P: tl.constexpr):
    """The first and the last + 1 of the steps, of `P.block_k` keys each, that a query's list of blocks takes.

    Slots that name nothing lie mostly at an end of the list, where they cost no step.
    """
    o_slot = tl.arange(0, P.block_s)
    b_block = tl.load(p_blocks + o_slot, mask=o_slot < P.slots, other=-1)
    first = tl.min(tl.where(b_block >= 0, o_slot, P.slots), axis=0)
    last = tl.max(tl.where(b_block >= 0, o_slot, -1), axis=0)
    return first * P.block_size // P.block_k, tl.cdiv((last + 1) * P.block_size, P.block_k)


@triton.jit
def tokens_of(p_blocks, step, i_query, i_start, P: tl.constexpr):
    """Tokens of a step's keys `[block_k]`, and which of them the query sees.

    A step is a part of one block, or the keys of several; hidden keys are never read, as they may hold NaN.
    """
    o_key = tl.arange(0, P.block_k)
    if P.block_size % P.block_k == 0:
        i_block = tl.load(p_blocks + step * P.block_k // P.block_size)
        i_token = i_start + i_block * P.block_size + step * P.block_k % P.block_size + o_key
        m_token = (i_token <= i_query) & (i_block >= 0)
    else:
        o_place = step * P.block_k + o_key
        i_block = tl.load(p_blocks + o_place // P.block_size, mask=o_place < P.slots * P.block_size, other=-1)
        i_token = i_start + i_block * P.block_size + o_place % P.block_size
        m_token = (i_token <= i_query) & (i_block >= 0)
    return i_token, m_token
