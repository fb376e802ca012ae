"""The visible keys in cuDNN's terms: a range of keys, or a diagonal band of it."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.flash_attention.interface import FlashAttentionCall


@dataclasses.dataclass(frozen=True)
class Band:
    """Keys first ... stop - 1. Counted from `first`, query i sees all of them, or with `causal` keys up to i, of which the last
    `window` (None: all). Every query sees at least one key, and none outside the range."""

    first: int
    stop: int
    causal: bool = False
    window: int | None = None

    @property
    def keys(self) -> int:
        return self.stop - self.first


def band_of(call: FlashAttentionCall) -> Band | str:
    """The band of a call that is masked by causal mask and window only, or why there is none."""
    queries, keys, offset = call.query.shape[1], call.key.shape[1], call.query_offset
    left, right = call.window or (None, None)
    right = 0 if call.causal else right
    first = 0 if left is None else max(0, offset - left)
    stop = keys if right is None else min(keys, queries + offset + right)
    # From here on both are counted from `first`: query i sits at `offset + i`.
    offset, keys = offset - first, stop - first
    if keys <= 0 or (right is not None and offset + right < 0):
        return "the first queries see no key, which cuDNN has no result for"
    if left is not None and queries + offset - left > keys:
        return "the last queries see no key, which cuDNN has no result for"
    limited = left is not None and queries - 1 + offset > left
    if right is None or offset + right >= keys - 1:
        return Band(first, stop) if not limited else "the window is open to the right, cuDNN's ends at the diagonal"
    if offset + right:
        return (
            f"query 0 sees {offset + right + 1} keys and the last sees more, in cuDNN's causal mask query i sees i + 1 "
            "(causal_alignment='top_left')"
        )
    if not limited:
        return Band(first, stop, causal=True)
    assert left is not None
    if queries > keys:
        return f"a window over {queries} queries and {keys} keys; cuDNN's needs as many keys as queries"
    return Band(first, stop, causal=True, window=left + right + 1)
