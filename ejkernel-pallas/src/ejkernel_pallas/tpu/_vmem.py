"""VMEM capacity of TPU cores, and VMEM usage of blocks. Does not import JAX.

VMEM holds arrays in register tiles: the last axis is padded to 128 lanes and the second-last to 8 sublanes of 32 bits, which
hold 2 or 4 narrower elements. Blocks of operands and results are double-buffered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ejkernel.plugin import Target

LANES = 128
_BYTES = {"float32": 4, "int32": 4, "uint32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 4}
_MIB = 1 << 20
_SMEM_OF_COMPILER = 1 << 17


@dataclasses.dataclass(frozen=True)
class Memory:
    """Of one core.

    Attributes:
        vmem: largest `vmem_limit_bytes`; the compiler needs the rest.
        default: default limit in bytes.
        smem: bytes of scalar memory, which holds prefetched scalars.
    """

    vmem: int
    default: int
    smem: int = _MIB

    @property
    def smem_numbers(self) -> int:
        """32-bit scalars that fit in SMEM beside the compiler's own."""
        return (self.smem - _SMEM_OF_COMPILER) // 4


SMALLEST = Memory(16 * _MIB, 16 * _MIB)
"""Available on every kind of TPU."""

KINDS: Mapping[str, Memory] = {
    "TPU v4": SMALLEST,
    "TPU v5 lite": Memory(120 * _MIB, 16 * _MIB),
    "TPU v5": Memory(60 * _MIB, 16 * _MIB),
    "TPU v6 lite": Memory(120 * _MIB, 32 * _MIB),
    "TPU7x": Memory(60 * _MIB, 32 * _MIB),
}
"""By JAX's name of the device kind."""

ALIASES: Mapping[str, str] = {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite", "TPU 7x": "TPU7x"}


def memory_of(target: Target) -> Memory:
    """The memory of a kind; the smallest for unknown kinds."""
    return KINDS.get(ALIASES.get(target.device_kind, target.device_kind), SMALLEST)


def sublanes(dtype: str) -> int:
    """Rows of one register tile."""
    return 32 // _BYTES[dtype]


def block_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of one block, padded to whole register tiles."""
    *outer, rows, columns = (1, 1, *shape)
    padded = (-(-rows // sublanes(dtype)) * sublanes(dtype)) * (-(-columns // LANES) * LANES)
    return math.prod(outer) * padded * _BYTES[dtype]


def buffered_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a double-buffered block."""
    return 2 * block_bytes(shape, dtype)
