"""cuDNN kernels, which XLA builds into its programs."""
