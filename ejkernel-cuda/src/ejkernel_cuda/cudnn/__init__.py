"""NVIDIA's own kernels (cuDNN), which XLA builds into its programs."""
