"""The plugin module: says what there is. Imports the standard library and `ejkernel.plugin` only."""

from __future__ import annotations

from collections.abc import Callable

from ejkernel.plugin import Implementation, OperationPack, Phase, Plugin, hookimpl

API_LEVEL = 3
"""The level of the plugin API that this code was written against: a fact about this code, so never imported from core."""


def _rms_norm(phase: Phase) -> Implementation:
    return Implementation(
        operation="rms_norm",
        phase=phase,
        target=f"acme_ejkernel.rms_norm.kernel:{phase}",
        supports="acme_ejkernel.rms_norm.capability:supports",
        configs="acme_ejkernel.rms_norm.configs:CONFIGS",
        backends=("any",),
        contract=1,
        plain_jax=True,
    )


def _log_sum_exp(phase: Phase) -> Implementation:
    return Implementation(
        operation="log_sum_exp",
        phase=phase,
        target=f"acme_ejkernel.log_sum_exp:{phase}",
        supports="acme_ejkernel.log_sum_exp:supports",
        partitioning="native",
        contract=1,
        plain_jax=True,
    )


@hookimpl
def ejkernel_plugin() -> Plugin:
    return Plugin(
        name="acme",
        api_level=API_LEVEL,
        summary="RMS norm in blocks of rows, and an operation of its own; an example of a third-party platform",
        requires=("jax",),
        versions={"jax": ">=0.10.2"},
        implementations=tuple(record(phase) for record in (_rms_norm, _log_sum_exp) for phase in ("forward", "backward")),
    )


@hookimpl
def ejkernel_operations() -> OperationPack:
    """Operations of our own, beside code for those of core."""
    return OperationPack(
        name="acme", api_level=API_LEVEL, operations="acme_ejkernel.operations", functions="acme_ejkernel.functions"
    )


@hookimpl
def ejkernel_diagnose(report: Callable[[str, str], None]) -> None:
    """Runs in a subprocess of `ejkernel doctor`, so importing heavy modules is fine here."""
    import jax

    report("devices", ", ".join(sorted({device.device_kind for device in jax.devices()})))
