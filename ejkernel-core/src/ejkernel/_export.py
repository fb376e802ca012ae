"""What `jax.export` must be told about programs that contain kernels."""

from __future__ import annotations

import jax.export

EXPORT_DISABLED_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(name) for name in ("triton_kernel_call", "tpu_custom_call", "mosaic_gpu_v2")
)
"""Pass as `disabled_checks=` to `jax.export.export`: kernels are custom calls whose stability JAX does not vouch for."""
