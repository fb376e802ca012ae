"""Block-sparse softmax attention on XLA: the tiles of `flash_attention`, visited by lists that are made on the device."""

from ejkernel_xla.block_sparse_attention.kernel import backward, forward, plain_backward, plain_forward

__all__ = ["backward", "forward", "plain_backward", "plain_forward"]
