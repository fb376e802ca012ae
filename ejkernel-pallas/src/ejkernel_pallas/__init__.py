"""ejkernel on Pallas: TPU kernels through Mosaic."""
