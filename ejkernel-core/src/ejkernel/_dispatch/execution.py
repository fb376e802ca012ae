"""Decision -> run: the chosen implementation of a phase, split over devices where its inputs are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._dispatch.decisions import decide
from ejkernel._dispatch.log import log_decision
from ejkernel._dispatch.recording import note
from ejkernel._plugins.catalog import OPERATIONS
from ejkernel._plugins.containment import EndedError, contained, imported, raised
from ejkernel._plugins.records import Candidate
from ejkernel._plugins.registry import kernel_registry
from ejkernel.call.arrays import ArraySpec, known_size, named
from ejkernel.call.decision import Decision
from ejkernel.call.partition import (
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
from ejkernel.call.request import Request
from ejkernel.errors import FallbackWarning, NoKernelError, PluginError, suggestion, warn
from ejkernel.plugin import FALLBACK, FIRST_PARTY, Phase
from ejkernel.targets import building_for

_warned: set[tuple[str, str, str]] = set()


def _admitted(request: Request, phase: Phase) -> tuple[Decision, Candidate]:
    decision = decide(request, phase)
    if decision.chosen is None:
        raise NoKernelError(f"{decision}\n{_next_step(request, decision)}", decision)
    _warn_of_fallback(decision)
    return decision, decision.chosen


def _next_step(request: Request, decision: Decision) -> str:
    if request.policy.platforms or request.policy.forbid:
        step = "Widen or drop the platform setting, or install a plugin that supports this call; see `ejkernel doctor`."
        return step + _other_target(request, decision) + _misspelt(request.policy.platforms)
    installed = {record.name: record.state for record in kernel_registry.records}
    if installed.get(FALLBACK) == "disabled":
        return f"Add {FALLBACK!r}, which runs everywhere, to EJKERNEL_PLUGINS, or unset the variable to load all that is installed."
    everywhere = f"`pip install {FIRST_PARTY[FALLBACK]}` runs everywhere"
    if FALLBACK in installed:
        everywhere = f"{FALLBACK!r} runs everywhere; it is installed and {installed[FALLBACK]}"
    return f"Install a plugin that supports this call ({everywhere}); see `ejkernel doctor`."


def _other_target(request: Request, decision: Decision) -> str:
    """How to say where the program will run, where the platforms asked for run elsewhere than this call does."""
    asked = [v.candidate for v in decision.verdicts if v.verdict == "refused"]
    backends = {backend for candidate in asked for backend in candidate.implementation.backends}
    if request.policy.target is not None or not backends or backends & {"any", request.target.backend}:
        return ""
    elsewhere = "gpu:9.0" if "gpu" in backends else min(backends)
    return (
        f" This call is dispatched for {request.target}, where its arrays are or would be put. To lower or export a program for "
        f"another device, say which: `with ejkernel.use(target={elsewhere!r}):`."
    )


def _misspelt(platforms: tuple[str, ...]) -> str:
    """What plugins that were asked for implement and core does not have: perhaps the operation is meant."""
    named = dict.fromkeys(
        (found.platform, found.implementation.operation)
        for found in kernel_registry.list_implementations()
        if found.platform in platforms and found.origin != "registered" and found.implementation.operation not in OPERATIONS
    )
    said = (f" {name} implements {one!r}, which is no operation{suggestion(one, OPERATIONS)}." for name, one in named)
    return "".join(said)


def _warn_of_fallback(decision: Decision) -> None:
    """Warn once when something preferred could not run: it is broken, or it leaves an accelerator to the portable path."""
    if decision.setting != "priority":
        return
    chosen = next(verdict for verdict in decision.verdicts if verdict.verdict == "chosen")
    fell_back = decision.target.backend != "cpu" and chosen.candidate.platform == FALLBACK
    for verdict in decision.verdicts:
        if verdict.rank < chosen.rank and (verdict.verdict == "broken" or (verdict.verdict == "refused" and fell_back)):
            key = (decision.operation, verdict.candidate.id, "; ".join(verdict.reasons))
            if key not in _warned:
                _warned.add(key)
                where = f"{decision.operation} ({decision.phase}) runs on {chosen.candidate.id}"
                warn(f"{where}: {verdict.candidate.id}: {key[2]}", FallbackWarning)


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
    explicit = bool(mesh.explicit_axes)
    if request.target.backend == "tpu" and not explicit and not request.native_only:
        request = dataclasses.replace(request, native_only=AUTO_ON_TPU)
    if not explicit:
        admitted = _admitted(request, phase)
        if admitted[1].implementation.partitioning == "native":
            return _run(request, phase, arguments, *admitted)
    results = _expected(request, phase, arguments)
    layout = Layout.of(request.operation, request.call, phase, arguments, results)

    def run(*shards: Any) -> Any:
        return _run_local(request.reshaped(shards[0]), phase, shards)

    if explicit:
        found = run_explicit(layout, mesh, run, arguments, results)
        return placed_like(found, arguments[0], mesh) if phase == "backward" else found
    return run_auto(layout, run, arguments, results)


def _run_local(request: Request, phase: Phase, arguments: tuple[Any, ...]) -> Any:
    return _run(request, phase, arguments, *_admitted(request, phase))


def _run(request: Request, phase: Phase, arguments: tuple[Any, ...], decision: Decision, chosen: Candidate) -> Any:
    log_decision(decision)
    expected = _expected(request, phase, arguments)
    suffix = "" if phase == "forward" else ".backward"
    mark = note(request, decision)
    with jax.named_scope(f"ejkernel.{request.operation.name}{suffix}[{chosen.id}]{mark}"), building_for(request.target):
        try:
            results = _traced(request, decision, chosen, arguments, expected, listed=bool(mark))
        except Exception:
            if not mark:
                raise
            # The calls of a program are being listed, so that the tuner can find out which of their configs work.
            results = _zeros(expected)
    return vary_like(results, arguments)


def _zeros(specs: Any) -> Any:
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)


def _is_empty(arrays: Any) -> bool:
    """Whether no array of these has elements. Of such results nothing is computed, and such cotangents give gradients of 0, so
    that no kernel has to be right for them."""
    return all(0 in map(known_size, array.shape) for _, array in named(arrays))


def _traced(
    request: Request, decision: Decision, chosen: Candidate, arguments: tuple[Any, ...], expected: Any, *, listed: bool
) -> Any:
    """The implementation's results, by lowered code that an earlier trace left where there is any."""
    if _is_empty(expected if decision.phase == "forward" else arguments[2]):
        return _zeros(expected)

    def trace(*arguments: Any) -> Any:
        results = _call(chosen, decision.phase, request.call, *arguments, decision.config)
        _check_results(chosen, decision.phase, results, expected)
        return results

    if listed or chosen.implementation.lowered_from is None:
        return trace(*arguments)
    from ejkernel._dispatch.lowered import run_lowered  # imports Pallas, see `_plugins/early_imports.py`

    return run_lowered(request, chosen, decision.phase, decision.config, arguments, trace, expected)


def _call(chosen: Candidate, phase: Phase, *arguments: Any) -> Any:
    """Import and trace an implementation's code; what either raises says whose it is."""
    target, who = chosen.implementation.target, _who(chosen)
    what = f"{target if isinstance(target, str) else chosen.id} ({chosen.implementation.operation} {phase}) of {who}"
    try:
        code = imported(what, target)
    except Exception as error:
        remedy = "see `ejkernel doctor`, or choose another platform"
        raise PluginError(f"{what} cannot be imported: {raised(error)}; {remedy}") from error
    try:
        return contained(what, code, *arguments, watch="settings of ejkernel")
    except EndedError as error:
        remedy = "choose another platform, and report it to its authors"
        raise PluginError(f"{what} raised {raised(error)}; {remedy}") from error
    except Exception as error:
        error.add_note(f"raised in {what}")
        raise


def _who(candidate: Candidate) -> str:
    """The plugin, its distribution and its entry point."""
    if candidate.origin == "registered":
        return f"{candidate.id!r}, which this program registered"
    found = (record for record in kernel_registry.records if record.name == candidate.platform and record.ok)
    entry = next((f", entry point {record.name} = {record.value}" for record in found), "")
    return f"plugin {candidate.platform!r} ({candidate.distribution} {candidate.version}{entry})"


def _expected(request: Request, phase: Phase, arguments: tuple[Any, ...]) -> Any:
    """The tuple of ArraySpecs that a phase must return."""
    operation = request.operation
    if phase == "forward":
        return operation.output_specs(request.call)
    present = {name: ArraySpec.of(value) for name, value in operation.moving(arguments[0]).items()}
    return operation.Inputs(**{**dict.fromkeys(operation.Inputs._fields), **present})


def _check_type(chosen: Candidate, phase: Phase, results: Any, expected: Any) -> None:
    """Refuse what is no tuple of the operation's fields with arrays in it."""
    got = type(results).__name__
    if getattr(results, "_fields", None) == expected._fields:
        others = [
            f"{name}: returned {type(value).__name__}, contract says an array"
            for name, value in named(results)
            if not (hasattr(value, "shape") and hasattr(value, "dtype"))
        ]
    else:
        others = [f"returned {got}, contract says {type(expected).__name__}({', '.join(expected._fields)})"]
    if others:
        raise _broken_contract(chosen, phase, others)


def _broken_contract(chosen: Candidate, phase: Phase, differences: list[str]) -> TypeError:
    return TypeError(
        f"{chosen.id} ({phase}) breaks the contract of {chosen.implementation.operation}: {'; '.join(differences)}; "
        f"it is of {_who(chosen)}"
    )


def _check_results(chosen: Candidate, phase: Phase, results: Any, expected: Any) -> None:
    """An implementation that returns something else than the contract is broken, and said to be so at once."""
    _check_type(chosen, phase, results, expected)
    got = {name: ArraySpec.of(value) for name, value in named(results)}
    wanted = dict(named(expected))
    if got != wanted:
        differences = [
            f"{name}: returned {got.get(name)}, contract says {wanted.get(name)}"
            for name in dict.fromkeys((*wanted, *got))
            if got.get(name) != wanted.get(name)
        ]
        raise _broken_contract(chosen, phase, differences)
