"""What the kernels are compiled for, as one constant."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.selective_scan.interface import SelectiveScanCall
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton.selective_scan.config import Config


@dataclasses.dataclass(frozen=True)
class Params:
    """Static facts of a call and its config.

    Attributes:
        channels, width: I and N.
        block_n: a power of two from width on.
        whole: whether segments and chunks have no tails.
        rates_per_member, skip_per_member: whether every member of the batch has its own.
        skip: whether there is D.
        cut: whether sequences may end inside of rows; see `edges`.
        packed: whether states are of packed sequences.
    """

    channels: int
    width: int
    block_i: int
    block_n: int
    chunk_size: int
    segment_size: int
    whole: bool
    rates_per_member: bool
    skip_per_member: bool
    skip: bool
    cut: bool
    packed: bool

    @property
    def kept(self) -> int:
        """Elements of a block of states in `tiles.kept_state_of`."""
        return self.block_i * -(-self.block_n // 4) * 4


def params_of(call: SelectiveScanCall, config: Config) -> Params:
    length = call.x.shape[1]
    segment = config.segment_size or -(-length // config.chunk_size) * config.chunk_size
    return Params(
        channels=call.x.shape[2],
        width=call.A.shape[2],
        block_i=config.block_i,
        block_n=next_power_of_2(call.A.shape[2]),
        chunk_size=config.chunk_size,
        segment_size=segment,
        whole=length % segment == 0,
        rates_per_member=call.A.shape[0] > 1,
        skip_per_member=call.D is not None and call.D.shape[0] > 1,
        skip=call.D is not None,
        cut=call.resets is not None or call.cu_seqlens is not None,
        packed=call.cu_seqlens is not None,
    )
