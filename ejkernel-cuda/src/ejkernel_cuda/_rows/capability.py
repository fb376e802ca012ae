"""Which calls of the normalisations these kernels support."""

from __future__ import annotations

from collections.abc import Iterable

from ejkernel.call import ArraySpec
from ejkernel.operations.common.rows.interface import NormCall
from ejkernel.plugin import Target
from ejkernel_cuda._capability import refusal

WIDEST = 1 << 30
"""Columns are counted in 32 bits; rows and elements in 64."""

MOST_BLOCKS = 2**31 - 1


def blocks_per_partial(width: int) -> int:
    """Upper bound in backward: of a cluster, of the column tiles of a multi-pass row, or of the reduction of partial sums."""
    return max(16, 2 * -(-width // 32))


def too_wide(x: ArraySpec) -> str | None:
    """Why columns of rows `[..., d]` cannot be counted; None if they can."""
    return f"width {x.shape[-1]} is above {WIDEST}" if x.shape[-1] > WIDEST else None


def members_refusal(x: ArraySpec, parameters: Iterable[ArraySpec | None]) -> str | None:
    """Why the grid cannot hold the blocks of batch members with their own parameters; None if it can."""
    members = max((spec.shape[0] for spec in parameters if spec is not None), default=1)
    if members * blocks_per_partial(x.shape[-1]) <= MOST_BLOCKS:
        return None
    return f"{members} batch members with parameters of their own, {x.shape[-1]} wide, need more than {MOST_BLOCKS} blocks"


def supports_norm(call: NormCall, target: Target) -> str | None:
    specs = {"x": call.x, "scale": call.scale, "offset": call.offset}
    return members_refusal(call.x, (call.scale, call.offset)) or too_wide(call.x) or refusal(target, specs)
