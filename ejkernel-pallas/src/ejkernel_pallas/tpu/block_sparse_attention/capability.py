"""What the kernels of `flash_attention` run of `block_sparse_attention`."""

from __future__ import annotations

from ejkernel.operations.block_sparse_attention import dense
from ejkernel_pallas.tpu.flash_attention import capability

supports = dense.supports(capability.supports)
