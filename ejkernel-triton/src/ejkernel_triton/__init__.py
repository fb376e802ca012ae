"""ejkernel on Triton: GPU kernels through jax-triton."""
