"""What a ring visits: blocks that a mask hides from every device are left out, and whole ones carry no mask."""

from __future__ import annotations

import numpy as np
import pytest

from ejkernel.compositions.ring.plan import Block, Stage, Structure, plan
from ejkernel.operations import get_operation

CAUSAL = Structure(causal=True)


def stages(size: int, layout: str = "contiguous", length: int = 16, **options):
    query, key = np.ones((1, length, 1, 4), np.float32), np.ones((1, options.pop("keys", length), 1, 4), np.float32)
    return plan(get_operation("flash_attention").canonicalise(query, key, key, **options).call, size, layout)


def test_without_a_mask_all_shifts_are_one_stage():
    assert stages(8) == (Stage(0, 8, Block(Structure(), 16), Block(Structure(), 16)),)


def test_causal_work_is_the_diagonal_and_whole_blocks_behind_it():
    assert stages(8, causal=True) == (
        Stage(0, 1, Block(CAUSAL, 16), None),
        Stage(1, 7, Block(Structure(), 16), None),
    )


def test_zigzag_gives_every_device_half_a_block_at_every_shift():
    diagonal, rest = stages(8, "zigzag", causal=True)
    assert diagonal == Stage(0, 1, Block(CAUSAL, 16), None)
    assert rest == Stage(1, 7, Block(Structure(), 8), Block(Structure(), 16, first_query=8))


@pytest.mark.parametrize(("left", "shifts"), [(0, 1), (1, 2), (16, 2), (17, 3), (40, 4)])
def test_a_causal_window_visits_only_the_blocks_that_it_reaches(left, shifts):
    found = stages(8, causal=True, sliding_window=(left, 0))
    assert sum(stage.shifts for stage in found) == shifts
    assert all(stage.ahead is None for stage in found)


def test_a_window_to_both_sides_skips_the_far_half_of_the_ring():
    found = stages(8, sliding_window=(3, 5))
    behind = Structure(window=(3, 5), query_offset=16)
    ahead = Structure(window=(3, 5), query_offset=-16)
    assert found == (
        Stage(0, 1, Block(Structure(window=(3, 5)), 16), None),
        Stage(1, 1, Block(behind, 16), None),
        Stage(7, 1, None, Block(ahead, 16)),
    )


@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"sliding_window": (5, 2)}, {"sliding_window": (None, 7)}, {"chunk_size": 4}, {"chunk_size": 7}],
    ids=str,
)
def test_the_blocks_together_are_the_mask(size, layout, options):
    """Every visible pair of the whole sequence is visited once, with the mask that it has there."""
    from ejkernel.masks import MaskInfo

    length = 8
    total = size * length
    wanted = MaskInfo(
        causal=options.get("causal", False), window=options.get("sliding_window"), chunk_size=options.get("chunk_size")
    ).materialize(total, total)[0, 0]
    pieces = np.arange(total).reshape(2 * size, -1)
    held = [
        np.concatenate([pieces[i], pieces[2 * size - 1 - i]]) if layout == "zigzag" else np.arange(total).reshape(size, -1)[i]
        for i in range(size)
    ]
    visits = np.zeros((total, total), int)
    for stage in stages(size, layout, length, **options):
        for device, shift in np.ndindex(size, stage.shifts):
            shift += stage.first
            block = stage.behind if device >= shift else stage.ahead
            if block is not None:
                queries, keys = held[device][block.first_query :], held[(device - shift) % size][: block.keys]
                visits[np.ix_(queries, keys)] += _seen(block, queries, keys)
    np.testing.assert_array_equal(visits, np.asarray(wanted).astype(int))


def _seen(block: Block, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    causal, offset, (left, right), chunk, _ = block.structure._replace(window=block.structure.window or (None, None))
    if not block.by_position:
        queries, keys = np.arange(len(queries)) + offset, np.arange(len(keys))
    distance = queries[:, None] - keys[None]
    seen = (distance >= 0) if causal else np.ones_like(distance, bool)
    seen &= True if left is None else distance <= left
    seen &= True if right is None else -distance <= right
    return seen if chunk is None else seen & (queries[:, None] // chunk == keys[None] // chunk)
