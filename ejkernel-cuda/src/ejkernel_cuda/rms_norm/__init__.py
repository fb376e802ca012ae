"""Root-mean-square normalisation in CUDA C++."""
