"""Helpers for tests, benchmarks and clients."""

from __future__ import annotations

from ejkernel.utils._devices import DeviceInformation, device_information
from ejkernel.utils._inputs import VarlenMetadata, generate_block_indices, numeric_gen, varlen_input_helper
from ejkernel.utils.sizes import cdiv, next_power_of_2

__all__ = [
    "DeviceInformation",
    "VarlenMetadata",
    "cdiv",
    "device_information",
    "generate_block_indices",
    "next_power_of_2",
    "numeric_gen",
    "varlen_input_helper",
]
