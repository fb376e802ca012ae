"""Constants of TurboQuant: codebooks of rotated coordinates, and the random matrices."""

from __future__ import annotations

from ejkernel.quantization.turboquant.codebook import LloydMaxCodebook, solve_lloyd_max
from ejkernel.quantization.turboquant.matrices import generate_projection_matrix, generate_rotation_matrix

__all__ = ["LloydMaxCodebook", "generate_projection_matrix", "generate_rotation_matrix", "solve_lloyd_max"]
