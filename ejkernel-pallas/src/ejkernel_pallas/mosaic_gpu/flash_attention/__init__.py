"""`flash_attention` on Hopper GPUs."""
