"""Time mixing of RWKV-4."""
