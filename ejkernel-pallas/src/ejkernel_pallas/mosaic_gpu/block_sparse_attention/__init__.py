"""`block_sparse_attention` on Hopper GPUs, by the kernels of `flash_attention`, of the masks that both know."""
