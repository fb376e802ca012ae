"""What `ejkernel doctor` has examined in subprocesses: what plugins name, and who would run the operations here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tell = Callable[[dict[str, Any]], None]
"""Passes a finding on to doctor; what was told before a crash is kept."""


def examine_references(platform: str, tell: Tell) -> None:
    """Import everything that a plugin's implementations name, and tell what cannot be."""
    from ejkernel._plugins.containment import imported, raised
    from ejkernel._plugins.registry import kernel_registry

    for candidate in kernel_registry.list_implementations():
        implementation = candidate.implementation
        if candidate.platform != platform or candidate.origin == "registered":
            continue
        for field in ("target", "supports", "configs", "lowered_from"):
            reference = getattr(implementation, field)
            if not isinstance(reference, str):
                continue
            try:
                imported(candidate.id, reference)
            except Exception as error:  # noqa: BLE001 - whatever a plugin's module raises is a finding
                where = {"operation": implementation.operation, "phase": implementation.phase, "field": field}
                tell({**where, "reference": reference, "error": raised(error)})


def examine_dispatch(tell: Tell) -> None:
    """Tell for each operation who would run its usual case here, and which platforms stand before that in the default order."""
    from ejkernel._dispatch.decisions import decide
    from ejkernel._plugins.catalog import OPERATIONS
    from ejkernel.errors import in_one_line
    from ejkernel.targets import resolve_target

    target = resolve_target(())
    for operation in OPERATIONS:
        try:
            request = _usual_request(operation, target)
            decision = decide(request, "forward")
        except Exception as error:  # noqa: BLE001 - of settings, plugins and devices; one operation hides no other
            tell({"operation": operation, "chosen": None, "error": in_one_line(error), "faster": [], "backend": target.backend})
            continue
        chosen = decision.chosen and decision.chosen.id
        faster = _faster(request, chosen)
        tell({"operation": operation, "chosen": chosen, "error": None, "faster": faster, "backend": target.backend})


def _usual_request(operation: str, target: Any) -> Any:
    from ejkernel._pipeline.operation import get_operation
    from ejkernel.call.policy import policy_for_call
    from ejkernel.call.request import Request
    from ejkernel.cli.cases import usual_case
    from ejkernel.testing.shapes import bound_shapes

    dtype = "float32" if target.backend == "cpu" else "bfloat16"
    _, call = bound_shapes(operation, usual_case(operation, target.backend), dtype)
    return Request(get_operation(operation), call, target, policy_for_call(operation, None))


def _faster(request: Any, chosen: str | None) -> list[str]:
    """Platforms that the default order puts before the chosen one for this call."""
    from ejkernel._plugins.catalog import default_order
    from ejkernel.call.order import default_priority

    def level(name: str) -> int:
        return default_priority(name, request.operation.name, request.call, "forward", request.target).level

    least = level(chosen) if chosen else None
    listed = default_order(request.operation.name).get(request.target.backend, {})
    return sorted({name.partition(".")[0] for name in listed if least is None or level(name) > least})
