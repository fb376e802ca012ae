"""Candidates -> Decision -> run. Dispatching is explaining: the decision that is printed is the one that is acted on."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ejkernel._arrays import ArraySpec, named
from ejkernel._explain import Decision, Explanation, Verdict
from ejkernel._partition import (
    AUTO_ON_TPU,
    MIXED_AXES,
    Layout,
    is_mixed,
    mesh_of,
    placed_like,
    run_auto,
    run_explicit,
    vary_like,
)
from ejkernel._priority import Standing, standing_of
from ejkernel._records import Candidate, resolve
from ejkernel._registry import kernel_registry
from ejkernel._target import building_for
from ejkernel.errors import FallbackWarning, NoKernelError
from ejkernel.plugin import Phase

if TYPE_CHECKING:
    from ejkernel.operation import Request
    from ejkernel.tuning import Selected

_PORTABLE = "xla"
_warned: set[tuple[str, str, str]] = set()


def decide(request: Request, phase: Phase) -> Decision:
    """Judge every candidate for one phase and choose."""
    wanted, setting, table, judged = _judged(request, phase)
    chosen, picked = _choose(request, phase, judged)
    verdicts = tuple(dataclasses.replace(v, verdict="chosen") if v.candidate is chosen else v for v in judged)
    if not wanted and chosen is not None:
        setting = "tuning table" if table in (chosen.id, chosen.platform) else "priority"
    return Decision(
        operation=request.operation.name,
        phase=phase,
        call=request.call,
        target=request.target,
        verdicts=verdicts,
        chosen=chosen,
        setting=setting,
        config=picked.config if picked else None,
        tier=picked.tier if picked else "",
        quarantined=picked.quarantined if picked else (),
        absent=tuple((r.name, r.state, r.reason) for r in kernel_registry.records if not r.ok),
    )


def willing(request: Request, phase: Phase) -> list[Candidate]:
    """The candidates that support the call and may run it, in the order of preference, whatever becomes of their configs."""
    return [verdict.candidate for verdict in _judged(request, phase)[-1] if verdict.verdict == "available"]


def _judged(request: Request, phase: Phase) -> tuple[tuple[str, ...], str, str | None, list[Verdict]]:
    """The platforms asked for, the setting that did, what tuning tables prefer, and every candidate's verdict, best first."""
    from ejkernel.tuning import preferred_platform

    candidates = kernel_registry.candidates(request.operation.name, phase)
    wanted, setting = _wanted(request, phase, candidates)
    table = None if wanted else preferred_platform(request, phase)
    judged = (_judge(request, candidate, wanted, table) for candidate in candidates)
    return wanted, setting, table, sorted(judged, key=lambda verdict: verdict.rank)


def _choose(request: Request, phase: Phase, judged: list[Verdict]) -> tuple[Candidate | None, Selected | None]:
    """The first that is available, with its config. One whose every config is quarantined is refused in `judged`."""
    from ejkernel.tuning import QuarantinedError, select

    for place, verdict in enumerate(judged):
        if verdict.verdict == "available":
            try:
                return verdict.candidate, select(request, phase, verdict.candidate)
            except QuarantinedError as error:
                reasons = (*verdict.reasons, str(error))
                judged[place] = dataclasses.replace(verdict, verdict="refused", reasons=reasons)
    return None, None


def explain_request(request: Request) -> Explanation:
    """Both phases of a request, without running it."""
    return Explanation(decide(request, "forward"), decide(request.saving_residuals(), "backward"))


def _wanted(request: Request, phase: Phase, candidates: tuple[Candidate, ...]) -> tuple[tuple[str, ...], str]:
    """Platforms that a setting names. For backward, one that has no code for the phase at all leaves it to the others."""
    policy = request.policy
    wanted = policy.platforms
    if phase == "backward" and not any(_matches(candidate, wanted) for candidate in candidates):
        wanted = ()
    return wanted, policy.source if wanted else "priority"


def _matches(candidate: Candidate, names: tuple[str, ...]) -> bool:
    return candidate.platform in names or candidate.id in names


def _judge(request: Request, candidate: Candidate, wanted: tuple[str, ...], table: str | None) -> Verdict:
    implementation = candidate.implementation
    reasons: list[str] = []
    verdict = "available"
    if not {"any", request.target.backend} & {*implementation.backends}:
        reasons.append(f"runs on {'/'.join(implementation.backends)}, the target is {request.target.backend}")
        verdict = "refused"
    elif implementation.supports is not None:
        reason, verdict = _ask_supports(request, implementation)
        reasons += [reason] if reason else []
    if request.native_only and implementation.partitioning != "native":
        reasons.append(request.native_only)
        verdict = "refused"
    if not request.policy.custom_gradients and implementation.phase == "forward" and not implementation.plain_jax:
        reasons.append("custom_gradients=False needs plain JAX code")
        verdict = "refused"
    if wanted and not _matches(candidate, wanted):
        reasons.append(f"{request.policy.source} asks for {', '.join(wanted)}")
        verdict = "not asked for"
    if candidate.platform in request.policy.forbid or candidate.id in request.policy.forbid:
        reasons.append("forbidden by use(...) or EJKERNEL_FORBID")
        verdict = "forbidden"
    named_by_table = table in (candidate.id, candidate.platform)
    if verdict == "available" and candidate.origin == "third-party" and not wanted and not named_by_table:
        reasons.append(f"third party: ask for platform={candidate.platform!r}")
        verdict = "opt-in"
    standing = _standing(request, candidate)
    if verdict == "available" and standing.reason and not wanted and not named_by_table:
        reasons.append(f"stands lower: {standing.reason}")
    return Verdict(candidate, verdict, tuple(reasons), _rank(candidate, wanted, named_by_table, standing))


def _standing(request: Request, candidate: Candidate) -> Standing:
    """In the default order. What was registered takes part with its own priority."""
    if candidate.origin == "registered":
        return Standing(candidate.implementation.priority)
    phase = candidate.implementation.phase
    return standing_of(candidate.id, request.operation.name, request.target.backend, request.call, phase)


def _ask_supports(request: Request, implementation: Any) -> tuple[str, str]:
    try:
        reason = resolve(implementation.supports)(request.call, request.target)
    except Exception as error:  # noqa: BLE001 - a raise means broken, which is reported and never taken for "unsupported"
        line = traceback.format_exception_only(error)[-1].strip()
        return f"supports() raised {line}", "broken"
    if reason is not None and not isinstance(reason, str):
        return f"supports() returned {reason!r}, expected None or a reason", "broken"
    return (reason or "", "refused" if reason is not None else "available")


def _rank(candidate: Candidate, wanted: tuple[str, ...], named_by_table: bool, standing: Standing) -> tuple[Any, ...]:
    """Smaller is better: the order asked for, then the tuning table, then priority, then the alphabet."""
    place = next((i for i, name in enumerate(wanted) if name in (candidate.platform, candidate.id)), len(wanted))
    own = 0 if candidate.origin == "registered" else candidate.implementation.priority
    return (place, not named_by_table, -standing.level, -own, candidate.id)


def _admitted(request: Request, phase: Phase) -> tuple[Decision, Candidate]:
    decision = decide(request, phase)
    if decision.chosen is None:
        raise NoKernelError(f"{decision}\n{_next_step(request)}", decision)
    _warn_of_fallback(decision)
    return decision, decision.chosen


def _next_step(request: Request) -> str:
    if request.policy.platforms or request.policy.forbid:
        return "Widen or drop the platform setting, or install a plugin that supports this call; see `ejkernel doctor`."
    return "Install a plugin that supports this call (`pip install ejkernel-xla` runs everywhere); see `ejkernel doctor`."


def _warn_of_fallback(decision: Decision) -> None:
    """Warn once when something preferred could not run: it is broken, or it leaves an accelerator to the portable path."""
    if decision.setting != "priority":
        return
    chosen = next(verdict for verdict in decision.verdicts if verdict.verdict == "chosen")
    fell_back = decision.target.backend != "cpu" and chosen.candidate.platform == _PORTABLE
    for verdict in decision.verdicts:
        if verdict.rank < chosen.rank and (verdict.verdict == "broken" or (verdict.verdict == "refused" and fell_back)):
            key = (decision.operation, verdict.candidate.id, "; ".join(verdict.reasons))
            if key not in _warned:
                _warned.add(key)
                where = f"{decision.operation} ({decision.phase}) runs on {chosen.candidate.id}"
                warnings.warn(f"{where}: {verdict.candidate.id}: {key[2]}", FallbackWarning, stacklevel=2)


def run_forward(request: Request, inputs: Any) -> Any:
    """Dispatch and run the forward phase, split over devices where the inputs are. Returns Outputs."""
    return _run_partitioned(request, "forward", (inputs,))


def run_backward(request: Request, inputs: Any, outputs: Any, cotangents: Any) -> Any:
    """Dispatch and run the backward phase. Returns an Inputs tuple of gradients, None where there is none."""
    return _run_partitioned(request, "backward", (inputs, outputs, cotangents))


def _run_partitioned(request: Request, phase: Phase, arguments: tuple[Any, ...]) -> Any:
    mesh = mesh_of(arguments)
    if mesh is None:
        return _run_local(request, phase, arguments)
    if is_mixed(mesh):
        request = dataclasses.replace(request, native_only=MIXED_AXES)
    explicit = any(mesh.shape[axis] > 1 for axis in mesh.explicit_axes)
    if request.target.backend == "tpu" and not explicit and not request.native_only:
        request = dataclasses.replace(request, native_only=AUTO_ON_TPU)
    if not explicit and _admitted(request, phase)[1].implementation.partitioning == "native":
        return _run_local(request, phase, arguments)
    results = _expected(request, phase, arguments)
    layout = Layout.of(request.operation, request.call, arguments, results)

    def run(*shards: Any) -> Any:
        return _run_local(request.reshaped(shards[0]), phase, shards)

    if explicit:
        found = run_explicit(layout, mesh, run, arguments, results)
        return placed_like(found, arguments[0], mesh) if phase == "backward" else found
    return run_auto(layout, run, arguments, results)


def _run_local(request: Request, phase: Phase, arguments: tuple[Any, ...]) -> Any:
    from ejkernel.tuning._recording import note

    decision, chosen = _admitted(request, phase)
    function: Callable[..., Any] = resolve(chosen.implementation.target)
    expected = _expected(request, phase, arguments)
    suffix = "" if phase == "forward" else ".backward"
    mark = note(request, decision)
    with jax.named_scope(f"ejkernel.{request.operation.name}{suffix}[{chosen.id}]{mark}"), building_for(request.target):
        try:
            results = function(request.call, *arguments, decision.config)
        except Exception:
            if not mark:
                raise
            # The calls of a program are being listed, so that the tuner can find out which of their configs work.
            results = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), expected)
    results = vary_like(results, arguments)
    _check_results(chosen, phase, results, expected)
    return results


def _expected(request: Request, phase: Phase, arguments: tuple[Any, ...]) -> Any:
    """The tuple of ArraySpecs that a phase must return."""
    operation = request.operation
    if phase == "forward":
        return operation.output_specs(request.call)
    present = {name: ArraySpec.of(value) for name, value in operation.moving(arguments[0]).items()}
    return operation.Inputs(**{**dict.fromkeys(operation.Inputs._fields), **present})


def _check_results(chosen: Candidate, phase: Phase, results: Any, expected: Any) -> None:
    """An implementation that returns something else than the contract is broken, and said to be so at once."""
    got = {name: ArraySpec.of(value) for name, value in named(results)}
    wanted = dict(named(expected))
    if got != wanted:
        differences = [
            f"{name}: returned {got.get(name)}, contract says {wanted.get(name)}"
            for name in dict.fromkeys((*wanted, *got))
            if got.get(name) != wanted.get(name)
        ]
        raise TypeError(
            f"{chosen.id} ({phase}) breaks the contract of {chosen.implementation.operation}: {'; '.join(differences)}"
        )
