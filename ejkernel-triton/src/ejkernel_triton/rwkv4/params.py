"""What the kernels are compiled for, as one constant."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.rwkv4.interface import Rwkv4Call
from ejkernel_triton.rwkv4.config import Config


@dataclasses.dataclass(frozen=True)
class Params:
    """Static facts of a call and its config.

    Attributes:
        channels: C.
        whole: whether segments and chunks have no tails.
        own_w, own_u: whether every member of the batch has its own.
    """

    channels: int
    block_i: int
    chunk_size: int
    segment_size: int
    whole: bool
    own_w: bool
    own_u: bool


def params_of(call: Rwkv4Call, config: Config) -> Params:
    length = call.k.shape[1]
    segment = config.segment_size or -(-length // config.chunk_size) * config.chunk_size
    return Params(
        channels=call.k.shape[2],
        block_i=config.block_i,
        chunk_size=config.chunk_size,
        segment_size=segment,
        whole=length % segment == 0,
        own_w=call.w.shape[0] > 1,
        own_u=call.u.shape[0] > 1,
    )
