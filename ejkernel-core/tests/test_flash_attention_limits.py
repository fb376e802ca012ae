"""Numbers beyond int32, and an alignment beside positions, in the canonical call of `flash_attention`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.masks import MaskInfo
from ejkernel.operations.flash_attention import pairs
from ejkernel.operations.flash_attention.interface import OPERATION

ARRAYS = {name: jnp.zeros((1, 6, 2, 4)) for name in ("query", "key", "value")}
HUGE = 2**40


@pytest.mark.parametrize(
    ("options", "field"),
    (
        ({"sliding_window": (HUGE, HUGE)}, "window"),
        ({"sliding_window": (HUGE, 0), "causal": True}, "window"),
        ({"chunk_size": HUGE}, "chunk_size"),
        ({"prefix": HUGE, "causal": True}, "prefix"),
    ),
    ids=str,
)
def test_limits_beyond_int32_can_be_compared_with_positions(options, field):
    positions = jnp.arange(6)[None]
    bound = OPERATION.canonicalise(**ARRAYS, query_positions=positions, key_positions=positions, **options)
    value = getattr(bound.call, field)
    assert all(number is None or number < 2**31 for number in (value if isinstance(value, tuple) else (value,)))
    causal = "causal" in options and field != "prefix"
    seen = pairs.visible(bound.call, bound.inputs, jnp)
    assert np.array_equal(seen[0, 0], np.tril(np.ones((6, 6), bool)) if causal else np.ones((6, 6), bool))


def test_alignment_is_not_dropped_beside_positions_and_an_offset():
    info = MaskInfo(query_positions=np.arange(6)[None], causal=True, causal_offset=2)
    with pytest.raises(ValueError, match="causal_alignment: got 'bottom_right', expected None when mask_info holds positions"):
        OPERATION.canonicalise(**ARRAYS, mask_info=info, causal=True, causal_alignment="bottom_right")
