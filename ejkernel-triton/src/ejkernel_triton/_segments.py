"""How scans whose channels do not mix are cut: into segments that run beside each other, and chunks that are unrolled."""

from __future__ import annotations

MOST_SEGMENTS = 32
"""Every program forms its first state from all segments before it."""
LEAST_SEGMENT = 64


def segment_size(rows: int, length: int, chunk: int, programs: int) -> int:
    """Tokens of a segment with which there are so many programs; segments after the first cost a second pass.

    Args:
        rows: programs per segment.
        length: tokens.
        chunk: of which a segment is a multiple.
        programs: wanted.

    Returns:
        0 for a whole sequence.
    """
    segments = 1
    while segments < MOST_SEGMENTS and max(rows, 1) * segments < programs and length >= 2 * segments * LEAST_SEGMENT:
        segments *= 2
    return 0 if segments == 1 else -(-length // (segments * chunk)) * chunk


def check_cut(segment: int, chunk: int, block: int) -> None:
    """Check the knobs `segment_size`, `chunk_size` and `block_i` of a config."""
    for name, size in (("chunk_size", chunk), ("block_i", block)):
        if size < 1 or size & (size - 1):
            raise ValueError(f"{name}: got {size}, expected a power of two")
    if segment < 0 or segment % chunk:
        raise ValueError(f"segment_size: got {segment}, expected 0 or a multiple of chunk_size, {chunk}")
