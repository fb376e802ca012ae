"""Kernels for Hopper GPUs through Pallas Mosaic GPU: bulk tensor copies, warpgroup matrix products, warp specialisation."""
