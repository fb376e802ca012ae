"""Candidates -> Decision -> run. Dispatching is explaining: the decision that is printed is the one that is acted on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ejkernel._plugins.catalog import is_stranger
from ejkernel._plugins.containment import contained, imported, raised
from ejkernel._plugins.records import Candidate
from ejkernel._plugins.registry import kernel_registry
from ejkernel.call.decision import Decision, Verdict
from ejkernel.call.order import Priority, default_priority
from ejkernel.call.records import given_fields
from ejkernel.call.request import Request
from ejkernel.configs.quarantine import QuarantinedError
from ejkernel.configs.select import Selected, preferred_platform, select
from ejkernel.plugin import Phase


def decide(request: Request, phase: Phase) -> Decision:
    """Judge every candidate for one phase and choose."""
    wanted, setting, table, judged = _judged(request, phase)
    chosen, picked = _choose(request, phase, judged)
    verdicts = tuple(dataclasses.replace(v, verdict="chosen") if v.candidate is chosen else v for v in judged)
    if not wanted and chosen is not None:
        setting = "tuning table" if chosen.id == table else "priority"
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
    candidates = kernel_registry.candidates(request.operation.name, phase)
    wanted = request.policy.platforms
    judged = [_judge(request, candidate, wanted) for candidate in candidates] if wanted else []
    if wanted and (phase == "forward" or any(verdict.verdict == "available" for verdict in judged)):
        return wanted, request.policy.source, None, _in_order(request, judged, wanted, None)
    # Platforms that have no backward for this call leave it to the others.
    judged = [_judge(request, candidate, ()) for candidate in candidates]
    # Tables choose among what may run; they admit nothing.
    table = preferred_platform(request, phase, [one.candidate for one in judged if one.verdict == "available"])
    return (), "priority", table, _in_order(request, judged, (), table)


def _in_order(request: Request, judged: list[Verdict], wanted: tuple[str, ...], table: str | None) -> list[Verdict]:
    """The verdicts, best first: the order asked for, then the tuning table, then priority, then the alphabet."""
    placed: list[Verdict] = []
    for verdict in judged:
        candidate, reasons = verdict.candidate, verdict.reasons
        priority, named_by_table = _priority(request, candidate), candidate.id == table
        if verdict.verdict == "available" and priority.reason and not wanted and not named_by_table:
            reasons = (*reasons, f"lower priority: {priority.reason}")
        rank = _rank(candidate, wanted, named_by_table, priority)
        placed.append(dataclasses.replace(verdict, reasons=reasons, rank=rank))
    return sorted(placed, key=lambda verdict: verdict.rank)


def _choose(request: Request, phase: Phase, judged: list[Verdict]) -> tuple[Candidate | None, Selected | None]:
    """The first that is available, with its config. One whose every config is quarantined is refused in `judged`."""
    for place, verdict in enumerate(judged):
        if verdict.verdict == "available":
            try:
                return verdict.candidate, select(request, phase, verdict.candidate, lambda: _other_phase(request, phase))
            except QuarantinedError as error:
                reasons = (*verdict.reasons, str(error))
                judged[place] = dataclasses.replace(verdict, verdict="refused", reasons=reasons)
    return None, None


def _other_phase(request: Request, phase: Phase) -> Candidate | None:
    """What runs the other phase, if anything can; its configs are not looked at."""
    if phase == "forward":
        return next(iter(willing(request.saving_residuals(), "backward")), None)
    return next(iter(willing(request, "forward")), None)


def _matches(candidate: Candidate, names: tuple[str, ...]) -> bool:
    return candidate.platform in names or candidate.id in names


def _judge(request: Request, candidate: Candidate, wanted: tuple[str, ...]) -> Verdict:
    """Whether a candidate may run; its place among the others is for `_in_order` to say."""
    implementation, policy = candidate.implementation, request.policy
    asked_for = _matches(candidate, wanted)
    stranger = is_stranger(candidate)
    forbidden = candidate.platform in policy.forbid or candidate.id in policy.forbid
    reasons: list[str] = []
    verdict = "available"
    if not {"any", request.target.backend} & {*implementation.backends}:
        reasons.append(f"runs on {'/'.join(implementation.backends)}, the target is {request.target.backend}")
        verdict = "refused"
    elif implementation.supports is not None and (not stranger or (asked_for and not forbidden)):
        # A third party's code is not run before somebody asks for it: it may be slow, or do worse.
        reason, verdict = _ask_supports(request, candidate)
        reasons += [reason] if reason else []
    if unknown := [name for name in given_fields(request.call) if not request.operation.accepts(implementation, name)]:
        brought = [name for name in unknown if {*request.operation.brought.get(name, ())} & {*unknown}]
        reasons.append(f"{candidate.id} does not accept {', '.join(name for name in unknown if name not in brought)}")
        verdict = "refused"
    if request.native_only and implementation.partitioning != "native":
        reasons.append(request.native_only)
        verdict = "refused"
    if not policy.custom_gradients and implementation.phase == "forward" and not implementation.plain_jax:
        reasons.append("custom_gradients=False needs plain JAX code")
        verdict = "refused"
    if wanted and not asked_for:
        reasons.append(f"{policy.source} asks for {', '.join(wanted)}")
        verdict = "not asked for"
    if forbidden:
        reasons.append("forbidden by use(...) or EJKERNEL_FORBID")
        verdict = "forbidden"
    if verdict == "available" and stranger and not asked_for:
        reasons.append(f"third party: ask for platform={candidate.platform!r}")
        verdict = "opt-in"
    return Verdict(candidate, verdict, tuple(reasons))


def _priority(request: Request, candidate: Candidate) -> Priority:
    """In the default order. What was registered takes part with its own priority."""
    if candidate.origin == "registered":
        return Priority(candidate.implementation.priority)
    phase = candidate.implementation.phase
    return default_priority(candidate.id, request.operation.name, request.call, phase, request.target)


def _ask_supports(request: Request, candidate: Candidate) -> tuple[str, str]:
    who = f"supports() of {candidate.id!r}"
    try:
        reason = contained(who, imported(who, candidate.implementation.supports), request.call, request.target)
    except jax.errors.InconclusiveDimensionOperation:
        return "its support depends on a symbolic dimension", "refused"
    except Exception as error:  # noqa: BLE001 - a raise means broken, and never ends the user's program
        return f"supports() raised {raised(error)}", "broken"
    if reason is not None and not isinstance(reason, str):
        return f"supports() returned {type(reason).__name__}, expected None or a reason", "broken"
    return (reason or "", "refused" if reason is not None else "available")


def _rank(candidate: Candidate, wanted: tuple[str, ...], named_by_table: bool, priority: Priority) -> tuple[Any, ...]:
    place = next((i for i, name in enumerate(wanted) if name in (candidate.platform, candidate.id)), len(wanted))
    own = 0 if candidate.origin == "registered" else candidate.implementation.priority
    return (place, not named_by_table, -priority.level, -own, candidate.id)
