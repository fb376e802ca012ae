"""ejkernel in CUDA C++, called through XLA's foreign function interface."""
