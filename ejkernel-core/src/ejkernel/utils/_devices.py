"""What JAX knows about a device, asked only when called."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class DeviceInformation:
    """One device and how many like it are local.

    Attributes:
        backend: "cpu", "gpu" or "tpu".
        kind: JAX's device kind, e.g. "NVIDIA H200".
        count: local devices of that backend.
        compute_capability: e.g. "9.0" on an NVIDIA GPU, else None.
        core_count: multiprocessors or cores where the runtime says so, else None.
        memory_bytes: what the runtime's allocator may use, else None.
    """

    backend: str
    kind: str
    count: int
    compute_capability: str | None = None
    core_count: int | None = None
    memory_bytes: int | None = None


def device_information(device: Any = None) -> DeviceInformation:
    """Describe `device`, or JAX's default one."""
    if device is None:
        device = jax.local_devices()[0]
    # Absent attributes mean that this backend does not report them; CPU reports no memory statistics.
    memory = device.memory_stats() or {}
    return DeviceInformation(
        backend=device.platform,
        kind=device.device_kind,
        count=sum(other.platform == device.platform for other in jax.local_devices(backend=device.platform)),
        compute_capability=getattr(device, "compute_capability", None),
        core_count=getattr(device, "core_count", None),
        memory_bytes=memory.get("bytes_limit"),
    )
