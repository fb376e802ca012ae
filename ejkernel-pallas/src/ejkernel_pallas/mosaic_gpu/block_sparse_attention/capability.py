"""What the kernels of `flash_attention` run of `block_sparse_attention`."""

from __future__ import annotations

from ejkernel.operations.block_sparse_attention import dense
from ejkernel_pallas.mosaic_gpu.flash_attention import capability

supports_forward = dense.supports(capability.supports_forward)
supports_backward = dense.supports(capability.supports_backward)
