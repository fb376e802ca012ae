"""Layer normalisation in CUDA C++."""
