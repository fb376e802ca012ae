"""The key of a tuned config: what was tuned, for which call, on which kind of device, under which versions.

Policy on versions. An implementation raises its own `version` when its timings lose meaning. The user's cache also asks for the
same jax release (three numbers; XLA and the kernel compilers follow it) and the same major.minor of core (calls keep their
meaning within it). A table shipped in a plugin is released with the code that it belongs to, so there both are only provenance.
Drivers, hosts, paths and line numbers are no part of a key; a CPU is only known as `cpu`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from ejkernel._plugins.records import Candidate
from ejkernel._version import __version__
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.contract import Contract
from ejkernel.call.records import by_present_names
from ejkernel.call.request import Request
from ejkernel.errors import wrong_type
from ejkernel.plugin import Phase
from ejkernel.utils.spelled import Spelled

_PASSING = "save_residuals"
"""A forward phase has one config, whether or not it is asked for residuals besides."""


@dataclasses.dataclass(frozen=True)
class Key:
    """What a tuned config belongs to.

    Attributes:
        operation: its name.
        phase: forward or backward.
        implementation: id of the implementation.
        version: of the implementation.
        call: the canonical call as canonical JSON.
        backend: kind of device.
        device_kind: the device's own name.
        compute_capability: of a CUDA device; empty elsewhere.
        jax: release of jax, three numbers.
        core: major.minor of ejkernel-core.
    """

    operation: str
    phase: str
    implementation: str
    version: int
    call: str
    backend: str
    device_kind: str
    compute_capability: str
    jax: str
    core: str

    @classmethod
    def of(cls, request: Request, phase: Phase, candidate: Candidate) -> Key:
        """The key of one implementation for one request.

        Raises:
            TypeError: a field of the call has no JSON form.
        """
        target = request.target
        return cls(
            request.operation.name,
            phase,
            candidate.id,
            candidate.implementation.version,
            _call_text(request.call),
            target.backend,
            target.device_kind,
            target.compute_capability or "",
            *running_versions(),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Key:
        """Read what `to_dict` wrote; KeyError or TypeError if it is something else."""
        types = {field.name: (int if field.name == "version" else str) for field in dataclasses.fields(cls)}
        read: dict[str, Any] = {name: canonical_json(values[name]) if name == "call" else values[name] for name in types}
        for name, expected in types.items():
            if type(read[name]) is not expected:
                raise wrong_type(name, repr(read[name]), expected.__name__)
        return cls(**read)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, the call spelled out."""
        return {**dataclasses.asdict(self), "call": json.loads(self.call)}

    def with_present_names(self, renamed: Mapping[str, str]) -> Key:
        """The key by the names that fields of the call have now."""
        if not renamed:
            return self
        return dataclasses.replace(self, call=canonical_json(by_present_names(json.loads(self.call), renamed)))

    def with_later_fields(self, contract: Contract) -> Key:
        """The key with the fields that later revisions of the contract brought, at their defaults: it is of a call without them."""
        known = json.loads(self.call)
        later = {name for name, revision in contract.optional_fields.items() if revision > 1} - known.keys()
        defaults = {field.name: field.default for field in dataclasses.fields(contract.Call)}
        added = {name: encode(defaults[name], name) for name in later}
        return dataclasses.replace(self, call=canonical_json({**added, **known})) if added else self

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal: the name of the entry's file."""
        return hashlib.sha256(canonical_json(self.to_dict()).encode()).hexdigest()

    @functools.cached_property
    def released(self) -> Key:
        """The key without the versions that a shipped table does not ask for."""
        return dataclasses.replace(self, jax="", core="")

    @functools.cached_property
    def bucket(self) -> Key:
        """The released key with ranks in place of shapes: what calls that differ in sizes only have in common."""
        return dataclasses.replace(self.released, call=canonical_json(_without_sizes(json.loads(self.call))))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Every dim of every array of the call, in the canonical order."""
        return tuple(_sizes(json.loads(self.call)))

    def distance(self, other: Key) -> float:
        """Euclidean distance of two keys of one bucket, in log2 of their sizes; infinite if a size is twice the other's or more."""
        if any(max(pair) > 0 and max(pair) >= 2 * min(pair) for pair in zip(self.sizes, other.sizes, strict=True)):
            return math.inf
        return math.dist([math.log2(1 + size) for size in self.sizes], [math.log2(1 + size) for size in other.sizes])

    def arrays(self) -> str:
        """The arrays of the call, e.g. `x float32[4,64], scale float32[1,64]`."""
        fields = json.loads(self.call).items()
        return ", ".join(
            f"{name} {value['dtype']}[{','.join(map(str, value['shape']))}]" for name, value in fields if _is_array(value)
        )


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted names, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@functools.lru_cache(maxsize=4096)
def _call_text(call: Any) -> str:
    fields = [field.name for field in dataclasses.fields(call) if field.name != _PASSING]
    return canonical_json({name: encode(getattr(call, name), name) for name in fields})


@functools.cache
def running_versions() -> tuple[str, str]:
    """The `jax` and `core` of keys made in this process."""
    import jax
    from packaging.version import Version

    release = (*Version(jax.__version__).release, 0, 0)[:3]
    return ".".join(map(str, release)), ".".join(map(str, Version(__version__).release[:2]))


def encode(value: Any, name: str) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, ArraySpec):
        return {"dtype": value.dtype, "shape": list(value.shape)}
    if isinstance(value, Spelled):
        return value.text
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name), name) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [encode(item, name) for item in value]
    if isinstance(value, (frozenset, set)):
        return sorted((encode(item, name) for item in value), key=canonical_json)
    if isinstance(value, Mapping):
        return {str(item): encode(content, name) for item, content in value.items()}
    if callable(value):  # by name: a config never changes a result, so mistaking one function for another costs time only
        return {"function": f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"}
    raise wrong_type(name, repr(value), "a value with a JSON form in a canonical call")


def _is_array(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"dtype", "shape"}


def _without_sizes(value: Any) -> Any:
    if _is_array(value):
        return {"dtype": value["dtype"], "rank": len(value["shape"])}
    if isinstance(value, dict):
        return {name: _without_sizes(item) for name, item in value.items()}
    return [_without_sizes(item) for item in value] if isinstance(value, list) else value


def _sizes(value: Any) -> list[int]:
    if _is_array(value):
        return list(value["shape"])
    items = [value[name] for name in sorted(value)] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [size for item in items for size in _sizes(item)]
