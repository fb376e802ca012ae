"""Configs of `linear_cross_entropy`."""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.linear_cross_entropy.interface import LinearCrossEntropyCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.dtypes import common_dtype
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._rows.config import warps_for
from ejkernel_triton.cross_entropy import config as per_row


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    rows: rows of one chunk, all of whose logits are there at once.
    block: logits of one step of a program, which has one row; a power of two.
    num_warps: warps per program.
    num_stages: pipeline stages of the first pass over a row; above 1 its next logits are staged in shared memory.
    """

    rows: int
    block: int
    num_warps: int
    num_stages: int = 1


def narrow(call: LinearCrossEntropyCall) -> bool:
    """Whether logits are rounded to bfloat16, in which their gradient takes their place: products of bfloat16 without a bias, of
    which no more than their full precision is asked for."""
    products = common_dtype(call.x.dtype, call.head.dtype)
    return products == "bfloat16" and call.head_bias is None and call.precision in (None, "default")


def heuristic(call: LinearCrossEntropyCall, target: Target) -> Config:
    """A program takes a multiprocessor, so that the rows that are worked on stay in the cache for the second pass."""
    return _sized(call, 16384, 2**29)


def search_space(call: LinearCrossEntropyCall, target: Target) -> list[Config]:
    first = heuristic(call, target)
    sizes = itertools.product((8192, 16384), (2**28, 2**29, 2**30, 2**31))
    staged = dataclasses.replace(first, num_stages=2)
    return list(dict.fromkeys([first, staged, *(_sized(call, *each) for each in sizes)]))


def _sized(call: LinearCrossEntropyCall, block: int, most: int) -> Config:
    block = min(block, next_power_of_2(call.vocabulary))
    return Config(per_row.rows_of_chunk(call.vocabulary, 2 if narrow(call) else 4, most), block, warps_for(block, 16))


FORWARD = BACKWARD = ConfigSpace(Config, heuristic, search_space)
"""Backward scales what forward has formed, which XLA does; it reads no config."""
