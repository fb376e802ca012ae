"""What `jax.export` must be told about programs that contain kernels."""

from __future__ import annotations

import jax.export

from ejkernel._plugins.registry import kernel_registry

EXPORT_DISABLED_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(name)
    for record in kernel_registry.records
    if record.ok and record.plugin is not None
    for name in record.plugin.custom_calls
)
"""Pass as `disabled_checks=` to `jax.export.export`: kernels are custom calls whose stability JAX does not vouch for."""
