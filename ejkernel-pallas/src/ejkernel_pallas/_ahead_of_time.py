"""Ahead-of-time compilation of every TPU kernel without a TPU: whether it compiles, and its resource usage.

Needs `libtpu`. Each phase of a problem is checked, configured and compiled as dispatch would do it for that kind of TPU.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from ejkernel.call import Request, has_gradient, named
from ejkernel.call.case import Case
from ejkernel.operations import get_operation
from ejkernel.plugin import Phase, Target, resolve
from ejkernel.targets import building_for
from ejkernel.testing.dispatch import decide, policy_for_call
from ejkernel.testing.shapes import bound_shapes
from ejkernel_pallas import _listings
from ejkernel_pallas._call import MIN_VMEM, with_vmem_limits
from ejkernel_pallas._listings import Listing

PLATFORM = "pallas"
TOPOLOGIES: Mapping[str, str] = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
"""The smallest topology of each kind that the compiler supports."""

_ALONE = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

_NEEDS = re.compile(r"stack for %?([\w.-]+?)(?:\.\d+)? =.*?Scoped allocation with size ([\d.]+)([KMG]?)", re.DOTALL)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SCOPED_LIMIT = "xla_tpu_scoped_vmem_limit_kib"


@dataclasses.dataclass(frozen=True)
class Row:
    """One phase of one problem, compiled once.

    Attributes:
        operation: that is compiled.
        case: the problem.
        dtype: of that problem's floats.
        phase: forward or backward.
        kind: what it was compiled for, e.g. `v6e`.
        config: the config that was tried; empty for the heuristic's.
        peer: the other library whose kernel it is; empty for ours.
        refused: why the call is refused; empty if it is not.
        failed: the compiler's error; empty if it compiled.
        seconds: compile time.
        code: bytes of the program.
        temporary: bytes of temporary device memory.
        kernels: kernel -> its compiler listing; empty if listings were not requested.
        flops, accessed, optimal_seconds: XLA's estimates, which use each kernel's own cost estimate.
    """

    operation: str
    case: str
    dtype: str
    phase: str
    kind: str
    config: str = ""
    peer: str = ""
    refused: str = ""
    failed: str = ""
    seconds: float = 0.0
    code: int = 0
    temporary: int = 0
    kernels: Mapping[str, Listing] = dataclasses.field(default_factory=dict)
    flops: float | None = None
    accessed: float | None = None
    optimal_seconds: float | None = None

    def problem(self) -> str | None:
        """What failed; None if nothing did. Refusals and failures of peers do not count."""
        if not self.failed or self.peer:
            return None
        where = f"{self.operation} {self.phase} for {self.kind} ({self.case}, {self.dtype}, {self.config or 'heuristic'})"
        return f"{where}: {self.failed}"


def unavailable() -> str | None:
    """Why nothing can be compiled here; None if compilation works."""
    return None if importlib.util.find_spec("libtpu") else "libtpu is not installed: pip install libtpu"


def devices_of(kind: str) -> list[Any]:
    """Devices of a topology description. Does not query the metadata server, and lets other processes use libtpu."""
    for name, value in _ALONE.items():
        os.environ.setdefault(name, value)
    return list(topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[kind]).devices)


def device_of(kind: str) -> Any:
    """The first of them."""
    return devices_of(kind)[0]


def compile_for(device: Any, function: Callable[..., Any], *arguments: Any, options: Mapping[str, str] | None = None) -> Any:
    """Compile a function of arrays, given as shapes and dtypes, for that device."""
    placed = SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed), arguments)
    mesh = AbstractMesh((1,), ("device",), abstract_device=AbstractDevice(device.device_kind, 1, "tpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        # A new function each time, so that JAX's trace cache is not used. Keep unused arguments: arrays of size 0 are not used.
        lowered = (
            jax.jit(lambda *arrays: function(*arrays), keep_unused=True).trace(*arguments).lower(lowering_platforms=("tpu",))
        )
        return lowered.compile(compiler_options=dict(options or {}))


def vmem_of(device: Any, function: Callable[..., Any], *arguments: Any) -> dict[str, int]:
    """Bytes of VMEM that each kernel of a function needs, as the compiler counts them.

    The compiler reports the first allocation beyond the limit, so each kernel's limit is raised to the reported size until all
    compile. Kernels built without `compiler_params` get the limit as a compiler option of the program; only the first is found.
    """
    found: dict[str, int] = {}
    for options in ({}, {_SCOPED_LIMIT: str(MIN_VMEM >> 10)}):
        while (complaint := _complaint(device, function, arguments, found, options)) is not None:
            name, size = complaint
            if size <= found.get(name, 0) or (options and found):
                return {**found, name: max(size, found.get(name, 0))}
            found[name] = size
        if found:
            break
    return found


def _complaint(
    device: Any, function: Callable[..., Any], arguments: Any, limits: Mapping[str, int], options: Mapping[str, str]
) -> tuple[str, int] | None:
    """The kernel that the compiler reports as over the limit, and the bytes it needs; None if there is none."""
    try:
        with with_vmem_limits(limits):
            compile_for(device, function, *arguments, options=options)
    except jax.errors.JaxRuntimeError as error:
        complaint = _NEEDS.search(str(error))
        if complaint is not None:  # the size is printed with three digits
            return complaint[1], int(float(complaint[2]) * 1.005 * _UNITS[complaint[3]])
    return None


@dataclasses.dataclass(frozen=True)
class Problem:
    """One phase of a case in a dtype, on a kind of TPU."""

    operation: str
    case: Case
    dtype: str
    phase: Phase
    kind: str

    def rows(self, *, space: bool = False, listings: Path | None = None, known: dict[Any, Row] | None = None) -> Iterator[Row]:
        """Rows of the heuristic's config, or of every config of the search space. Problems in `known` are not compiled again.

        With `listings`, a folder passed to `_listings.request_listings`, rows include the listings of all kernels.
        """
        known = {} if known is None else known
        row = Row(self.operation, self.case.name, self.dtype, self.phase, self.kind)
        inputs, call = bound_shapes(self.operation, self.case, self.dtype)
        owner, device = get_operation(self.operation), device_of(self.kind)
        target = Target("tpu", device.device_kind)
        call = dataclasses.replace(call, save_residuals=True)
        decision = decide(Request(owner, call, target, policy_for_call(self.operation, PLATFORM)), self.phase)
        if decision.chosen is None or decision.chosen.platform != PLATFORM:
            own = [verdict for verdict in decision.verdicts if verdict.candidate.platform == PLATFORM]
            if own:
                yield dataclasses.replace(row, refused="; ".join(reason for verdict in own for reason in verdict.reasons))
            return
        implementation = decision.chosen.implementation
        configs = [decision.config]
        if space and implementation.configs is not None:
            configs = resolve(implementation.configs).search_space(call, target)
        arguments = (inputs,) if self.phase == "forward" else (inputs, *_outputs(owner, call))
        for config in configs:
            own = dataclasses.replace(row, config=str(config) if space else "")
            key = (implementation.target, self.kind, call, config)
            if key not in known:
                run = _on(target, resolve(implementation.target), call, config)
                known[key] = compiled_row(own, device, run, *arguments, listings=listings)
            yield dataclasses.replace(known[key], case=own.case, config=own.config)


def _outputs(owner: Any, call: Any) -> tuple[Any, Any]:
    """Outputs and cotangents as shapes and dtypes."""
    outputs = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), owner.output_specs(call))
    public = owner.public(call)
    kept = {name: value if name in public and has_gradient(value) else None for name, value in named(outputs)}
    return outputs, outputs._replace(**kept)


def _on(target: Target, function: Callable[..., Any], call: Any, config: Any) -> Callable[..., Any]:
    def run(*arrays: Any) -> Any:
        with building_for(target):
            return function(call, *arrays, config)

    return run


def compiled_row(row: Row, device: Any, run: Callable[..., Any], *arguments: Any, listings: Path | None = None) -> Row:
    """The row completed with the results of compiling the function."""
    started = time.perf_counter()
    try:
        program = compile_for(device, run, *arguments)
    except Exception as error:  # noqa: BLE001 - whatever lowering or the compiler raises is the finding
        return dataclasses.replace(row, failed=_first_lines(error))
    taken = round(time.perf_counter() - started, 2)
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    return dataclasses.replace(
        row,
        seconds=taken,
        code=memory.generated_code_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        kernels={} if listings is None else _listings.taken(listings),
        flops=cost.get("flops"),
        accessed=cost.get("bytes accessed"),
        # XLA counts -1 second for each loop of unknown length and each unknown instruction.
        optimal_seconds=None if (seconds := cost.get("optimal_seconds")) is None else seconds % 1.0,
    )


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:4])[:600]}"


def compiled(
    operation: str,
    cases: Iterable[Case],
    dtypes: Iterable[str],
    kinds: Iterable[str],
    *,
    space: bool = False,
    listings: Path | None = None,
) -> Iterator[Row]:
    """Compile both phases of every case in every dtype for every kind; problems that cases share are compiled once."""
    phases: tuple[Phase, ...] = ("forward", "backward")
    known: dict[Any, Row] = {}
    for case, dtype, phase, kind in itertools.product(cases, dtypes, phases, kinds):
        yield from Problem(operation, case, dtype, phase, kind).rows(space=space, listings=listings, known=known)


def summary(rows: Iterable[Row]) -> list[str]:
    """A line per operation, phase and kind: counts of compiled, failed and refused problems, and the largest resource usage."""
    groups: dict[tuple[str, str, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        if not row.peer:
            groups[row.operation, row.phase, row.kind].append(row)
    lines = [
        f"{'operation':24} {'phase':9} {'kind':5} {'compiled':>8} {'failed':>6} {'refused':>7} {'VMEM KiB':>9} {'seconds':>8}"
    ]
    for (operation, phase, kind), members in groups.items():
        failed, refused = sum(bool(row.failed) for row in members), sum(bool(row.refused) for row in members)
        vmem = max((kernel.vmem for row in members for kernel in row.kernels.values()), default=0) >> 10
        seconds = max(row.seconds for row in members)
        done = len(members) - failed - refused
        lines.append(f"{operation:24} {phase:9} {kind:5} {done:8} {failed:6} {refused:7} {vmem:9} {seconds:8.1f}")
    return lines
