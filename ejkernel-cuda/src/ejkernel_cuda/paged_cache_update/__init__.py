"""Writing into a paged cache in CUDA C++."""
