"""`block_sparse_attention` on TPU, by the kernels of `flash_attention`, of the masks that both know."""
