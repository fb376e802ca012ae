"""TPU kernels, compiled by Mosaic."""
