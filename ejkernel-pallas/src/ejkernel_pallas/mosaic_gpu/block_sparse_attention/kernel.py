"""`block_sparse_attention` as `flash_attention`."""

from __future__ import annotations

from ejkernel.operations.block_sparse_attention import dense
from ejkernel_pallas.mosaic_gpu.flash_attention import kernel

forward = dense.forward(kernel.forward)
backward = dense.backward(kernel.backward)
