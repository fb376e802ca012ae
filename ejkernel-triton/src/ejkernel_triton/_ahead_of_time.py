"""Ahead-of-time compilation of every kernel, without a GPU, and checks of its resource usage.

An operation's cases are traced for a target with a `Recorder` instead of launches, so the code that is compiled is the code
that dispatch would run: the heuristic's config and, on request, every config of the search space.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from ejkernel.call import Request, has_gradient, named
from ejkernel.call.case import Case
from ejkernel.operations import get_operation
from ejkernel.plugin import Target, resolve
from ejkernel.testing.dispatch import Decision, explain_request, policy_for_call
from ejkernel.testing.shapes import shapes_of
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._jax_triton import intercept_launches
from ejkernel_triton.testing import Compilation, Recorder, resources

CAPABILITIES = (80, 90, 100)
PLATFORM = "triton"
_KINDS = {80: "NVIDIA A100-SXM4-80GB", 90: "NVIDIA H200", 100: "NVIDIA B200"}


TOLERATED = 0.1
"""Share of a loop's instructions that may be spill loads and stores. On an H200 the fastest of nine attention configs spilled
0.06."""


@dataclasses.dataclass(frozen=True)
class Allowance:
    """Permission for a kernel to spill more than `TOLERATED`.

    Attributes:
        kernel: its name.
        most: largest share of spill instructions in a loop.
        reason: why that is right.
        constants: applies only with these constants.
        capabilities: applies only to these.
        dtypes: applies only to problems of these dtypes; to any if empty.
    """

    kernel: str
    most: float
    reason: str
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    capabilities: tuple[int, ...] = CAPABILITIES
    dtypes: tuple[str, ...] = ()

    def covers(self, row: Row) -> bool:
        return (
            row.kernel == self.kernel
            and row.spilling <= self.most
            and row.capability in self.capabilities
            and (not self.dtypes or row.dtype in self.dtypes)
            and all(row.constants.get(name) == repr(value) for name, value in self.constants.items())
        )


_WIDE = {"BLOCK_D": 512}
_TF32X3 = "3xTF32 with heads of 128: smaller tiles spill as much, in 1.5 to 6 times as many instructions"
_BF16X6 = "bf16x6 with heads of 256: spilling 0.17 to 0.19 runs at 30 to 43 TFLOP/s on an H200, without tensor cores at 3.5"
_EXACT_LATENTS = "float32 latents of 512 without tensor cores, in the smallest tile there is: gradients that run, slowly"
ALLOWED: tuple[Allowance, ...] = (
    Allowance("forward_kernel", 0.2, "heads of 512: 2.8 ms on an H200, the smaller tile 3.8 ms", _WIDE),
    Allowance("key_gradient_kernel", 0.25, "heads of 512: 8.8 ms on an H200 for both gradients, smaller tiles 12.8 ms", _WIDE),
    Allowance("query_gradient_kernel", 0.25, "heads of 512: 5.7 ms on an H200, smaller tiles 6.9 ms", _WIDE),
    *(
        Allowance(f"{name}_kernel", 0.25, _BF16X6, {"BLOCK_D": 256}, dtypes=("float32",))
        for name in ("forward", "key_gradient", "query_gradient")
    ),
    Allowance("general_prepare_kernel", 0.12, "heads of 64: 0.38 ms on an H100, smaller tiles 0.53", {"BLOCK_K": 64}),
    Allowance("latent_query_gradient_kernel", 0.2, "0.08 or 0.15 by the version of ptxas; not timed", {"BLOCK_V": 512}),
    *(
        Allowance(f"{name}_kernel", 0.55, _EXACT_LATENTS, {"BLOCK_V": 512}, dtypes=("float32",))
        for name in ("latent_query_gradient", "latent_page_gradient", "sparse_query_gradient", "sparse_part")
    ),
    Allowance("fused_chunk_kernel", 0.16, _TF32X3, {"BLOCK_K": 128, "BLOCK_V": 64}, capabilities=(90,), dtypes=("float32",)),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel, compiled once.

    Attributes:
        operation: that launches the kernel.
        case: the first problem that launches it.
        dtype: of that problem's floats.
        config: the config that was tried; empty for the heuristic's.
        kernel: its name.
        capability: what it was compiled for: 90 for 9.0.
        constants: its `tl.constexpr` parameters, as text.
        num_warps: warps per program.
        num_stages: stages of the software pipeline.
        registers: per thread.
        stack: spilled bytes per thread.
        shared: bytes of shared memory per program.
        limit: the device's limit of `shared`.
        spilling: share of spill instructions in the worst loop.
    """

    operation: str
    case: str
    dtype: str
    config: str
    kernel: str
    capability: int
    constants: Mapping[str, str]
    num_warps: int
    num_stages: int
    registers: int
    stack: int
    shared: int
    limit: int
    spilling: float = 0.0

    def problem(self, allowed: Iterable[Allowance] = ALLOWED) -> str | None:
        """The limit that is exceeded; None if none is. Configs of a search space may spill: they are only slow."""
        config = self.config or "heuristic"
        where = f"{self.kernel} for sm_{self.capability} ({self.operation}, {self.case}, {self.dtype}, {config})"
        if self.shared > self.limit:
            return f"{where}: {self.shared} bytes of shared memory, the device has {self.limit}"
        if self.spilling > TOLERATED and not self.config and not any(allowance.covers(self) for allowance in allowed):
            return f"{where}: spills {self.stack} bytes per thread, with {self.spilling:.0%} of the instructions of a loop"
        return None


def target_of(capability: int) -> Target:
    """A GPU target; `capability` is 90 for 9.0. The device kinds are those that tuning tables exist for."""
    return Target("gpu", _KINDS.get(capability, ""), f"{capability // 10}.{capability % 10}")


def decisions_of(operation: str, case: Case, dtype: str, target: Target) -> list[Decision]:
    """The dispatch decisions of both phases of a problem on a target."""
    found: list[Decision] = []
    run = _Run(operation, case.options, target)
    jax.eval_shape(lambda arrays: found.extend(run.decisions(arrays)), shapes_of(case, dtype))
    return found


def recorded(
    operation: str, case: Case, dtype: str, target: Target, *, space: bool = False
) -> Iterator[tuple[str, Compilation]]:
    """The launches of both phases of one problem, with the heuristic's config (named "") or every config of the search space.

    Yields nothing for a problem that is refused.
    """
    arrays, run = shapes_of(case, dtype), _Run(operation, case.options, target)
    decisions = decisions_of(operation, case, dtype, target)
    own = [decision for decision in decisions if decision.chosen is not None and decision.chosen.platform == PLATFORM]
    if not decisions[0].chosen:
        return
    configs = [config for decision in own for config in _search_space(decision)] if space else [None]
    for config in configs:
        recorder = Recorder()
        with intercept_launches(recorder):
            jax.eval_shape(lambda arrays, config=config: run.both_phases(arrays, config), arrays)
        for compilation in recorder.compilations:
            yield "" if config is None else str(config), compilation


@dataclasses.dataclass(frozen=True)
class _Run:
    """An operation with its options, on this platform, for a target."""

    operation: str
    options: Mapping[str, Any]
    target: Target

    def bind(self, arrays: Mapping[str, Any], config: Any = None) -> tuple[Request, Any]:
        owner = get_operation(self.operation)
        bound = owner.canonicalise(**arrays, **self.options)
        policy = policy_for_call(self.operation, PLATFORM)
        return Request(owner, bound.call, self.target, policy, config), bound.inputs

    def decisions(self, arrays: Mapping[str, Any]) -> tuple[Decision, ...]:
        explanation = explain_request(self.bind(arrays)[0])
        return explanation.forward, explanation.backward

    def both_phases(self, arrays: Mapping[str, Any], config: Any) -> None:
        request, inputs = self.bind(arrays, config)
        moving = request.operation.moving(inputs)

        def outputs(values: dict[str, Any]) -> dict[str, Any]:
            found = dict(named(request.operation.run(request, inputs._replace(**values))))
            return {name: value for name, value in found.items() if has_gradient(value)}

        found, pullback = jax.vjp(outputs, moving)
        if moving:
            pullback(found)


def _search_space(decision: Decision) -> Iterable[Any]:
    assert decision.chosen is not None
    if decision.chosen.implementation.configs is None:
        return ()
    space: Any = resolve(decision.chosen.implementation.configs)
    return space.search_space(decision.call, decision.target)


def compiled(
    operation: str,
    cases: Iterable[Case],
    dtypes: Iterable[str],
    capabilities: Iterable[int] = CAPABILITIES,
    *,
    space: bool = False,
) -> Iterator[Row]:
    """Compile the kernels that an operation launches, each once per capability."""
    problems = [(case, dtype) for case in cases for dtype in dtypes]
    for capability in capabilities:
        target = target_of(capability)
        seen: set[Any] = set()
        for case, dtype in problems:
            for config, compilation in recorded(operation, case, dtype, target, space=space):
                if compilation.identity in seen:
                    continue
                seen.add(compilation.identity)
                taken = resources(compilation.compile(capability))
                yield Row(
                    operation=operation,
                    case=case.name,
                    dtype=dtype,
                    config=config,
                    kernel=compilation.kernel.fn.__name__,
                    capability=capability,
                    constants={name: repr(value) for name, value in compilation.constants.items()},
                    num_warps=compilation.num_warps,
                    num_stages=compilation.num_stages,
                    limit=shared_memory_limit(target),
                    **dataclasses.asdict(taken),
                )


def summary(rows: Iterable[Row]) -> list[str]:
    """A line per kernel and capability: how often it was compiled, and its largest resource usage."""
    groups: dict[tuple[str, int], list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[row.kernel, row.capability].append(row)
    lines = [f"{'kernel':40} {'sm':>4} {'compiled':>8} {'registers':>9} {'stack':>6} {'shared':>7} {'limit':>7}"]
    for (kernel, capability), members in sorted(groups.items()):
        most = [max(getattr(row, name) for row in members) for name in ("registers", "stack", "shared", "limit")]
        lines.append(f"{kernel:40} {capability:4} {len(members):8} {most[0]:9} {most[1]:6} {most[2]:7} {most[3]:7}")
    return lines
