"""Mamba's selective scan in Triton."""
