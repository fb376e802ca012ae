"""Where will this run? A `Target` describes the device that a program is being built for."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Generator, Iterable
from typing import Any

_building: contextvars.ContextVar[Target | None] = contextvars.ContextVar("ejkernel_building", default=None)
_BACKEND_OF_PLATFORM = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a program is built for.

    Attributes:
        backend: `"cpu"`, `"gpu"` or `"tpu"` (JAX's words).
        device_kind: the device's own name, e.g. `"NVIDIA H200"`; empty when unknown.
        compute_capability: of a CUDA device as `"9.0"`, of a ROCm device its architecture as `"gfx942"` (JAX has them in one
            place); None elsewhere or when unknown.
    """

    backend: str
    device_kind: str = ""
    compute_capability: str | None = None

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability as numbers, `(9, 0)`; None when unknown, and of devices that are not NVIDIA's."""
        if self.compute_capability is None or not re.fullmatch(r"\d+(\.\d+)?", self.compute_capability):
            return None
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor or 0)

    @property
    def is_amd(self) -> bool:
        """Whether it is an AMD GPU, as far as is known."""
        return self.backend == "gpu" and (
            self.device_kind.startswith("AMD") or (self.compute_capability or "").startswith("gfx")
        )

    @property
    def lowering_platform(self) -> str:
        """What JAX calls it where a program is lowered for it: `"cuda"`, `"rocm"`, or the backend's name."""
        return ("rocm" if self.is_amd else "cuda") if self.backend == "gpu" else self.backend

    def __str__(self) -> str:
        architecture = self.compute_capability
        if architecture is not None and self.capability is not None:
            architecture = f"sm_{architecture.replace('.', '')}"
        known = (self.device_kind, architecture)
        details = ", ".join(item for item in known if item and item != self.backend)
        return f"{self.backend} ({details})" if details else self.backend


def target_of_device(device: Any) -> Target:
    """Describe a `jax.Device`."""
    backend: str = _BACKEND_OF_PLATFORM.get(device.platform) or device.platform
    capability = getattr(device, "compute_capability", None) if backend == "gpu" else None
    return Target(backend, device.device_kind, None if capability is None else str(capability))


@contextlib.contextmanager
def building_for(target: Target) -> Generator[None]:
    """Say for which device the implementation traced inside the block is built."""
    token = _building.set(target)
    try:
        yield
    finally:
        _building.reset(token)


def current_target() -> Target:
    """The device that the implementation being traced is built for; outside of one, where an array would be put by default.

    Kernels that are compiled while they are traced or lowered ask here and never the host, which may have another device or none.
    """
    return _building.get() or _default_target()


def as_target(value: Target | str | Any) -> Target:
    """Accept a `Target`, a `jax.Device`, or a backend's name such as `"gpu"`, `"cuda"`, `"rocm"`, or a GPU's name with its compute
    capability or architecture, and the device's own name: `"gpu:9.0"`, `"rocm:gfx942"`, `"gpu:9.0:NVIDIA H200"`."""
    if isinstance(value, Target):
        return value
    if isinstance(value, str):
        name, separator, rest = value.partition(":")
        capability, _, kind = rest.partition(":")
        architectures = {"gpu": r"\d+\.\d+|gfx[0-9a-f]+", "cuda": r"\d+\.\d+", "rocm": r"gfx[0-9a-f]+"}
        if name not in _BACKEND_OF_PLATFORM or (separator and not re.fullmatch(architectures.get(name, r"(?!)"), capability)):
            names = ", ".join(sorted(_BACKEND_OF_PLATFORM))
            with_architecture = "'gpu:9.0' or 'rocm:gfx942'"
            raise ValueError(f"target: got {value!r}, expected one of {names}, or a GPU with what it is as {with_architecture}")
        kind = "AMD" if name == "rocm" and not capability else kind
        return Target(_BACKEND_OF_PLATFORM[name], kind, capability or None)
    if hasattr(value, "device_kind"):
        return target_of_device(value)
    raise TypeError(f"target: got {type(value).__name__}, expected Target, jax.Device or a backend's name")


def _target_of_mesh(mesh: Any) -> Target | None:
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is None:
        return None
    backend: str = _BACKEND_OF_PLATFORM.get(abstract.platform or "", abstract.platform or "")
    if not backend:
        return None
    known = _default_target()
    if known.device_kind == abstract.device_kind:
        return known
    return Target(backend, abstract.device_kind or "")


def _default_target() -> Target:
    import jax

    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is not None and not isinstance(default, str):
        return target_of_device(default)
    return target_of_device(jax.local_devices(backend=default)[0])


def resolve_target(leaves: Iterable[Any], explicit: Target | str | Any | None = None) -> Target:
    """Find where a call with these array leaves will run.

    In order: the explicit argument; the device of a mesh, from the leaves' types or the context; the committed device of a
    concrete array; the default device. `jax.default_backend()` alone would be wrong while lowering for another platform.
    """
    import jax

    if explicit is not None:
        return as_target(explicit)
    committed: Target | None = None
    for leaf in leaves:
        if isinstance(leaf, jax.core.Tracer):  # pyright: ignore[reportAttributeAccessIssue]
            mesh = getattr(jax.typeof(leaf).sharding, "mesh", None)
            if mesh is not None and not mesh.empty and (found := _target_of_mesh(mesh)) is not None:
                return found
        elif isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) and committed is None:
            sharding = leaf.sharding
            if sharding is not None and getattr(leaf, "committed", True):
                committed = _target_of_sharding(sharding)
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and (found := _target_of_mesh(context)) is not None:
        return found
    return committed or _default_target()


def _target_of_sharding(sharding: Any) -> Target | None:
    devices = getattr(sharding, "_device_assignment", None) or tuple(sharding.device_set)
    return target_of_device(devices[0]) if devices else None
