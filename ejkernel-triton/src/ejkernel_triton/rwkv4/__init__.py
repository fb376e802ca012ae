"""Time mixing of RWKV-4 in Triton."""
