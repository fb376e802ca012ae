"""`block_sparse_attention` by cuDNN's attention, of the masks that both know."""

from __future__ import annotations

from ejkernel.operations.block_sparse_attention import dense
from ejkernel_cuda.cudnn.flash_attention import capability, kernel

supports_forward = dense.supports(capability.supports_forward)
supports_backward = dense.supports(capability.supports_backward)
forward = dense.forward(kernel.forward)
backward = dense.backward(kernel.backward)
