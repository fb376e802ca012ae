"""Level 0: the plugin is found, light and well-formed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ejkernel._pipeline.operation import get_operation
from ejkernel._plugins.catalog import OPERATIONS
from ejkernel._plugins.registry import kernel_registry
from ejkernel.configs.entry import load_entries
from ejkernel.plugin import SUPPORTED_API_LEVELS, resolve
from ejkernel.testing.problem import is_of
from ejkernel.testing.report import Report
from ejkernel.testing.tables import unused

__all__ = [
    "test_accepted_fields_exist",
    "test_plugin_is_found",
    "test_plugin_module",
    "test_references_resolve",
    "test_tuning_tables_are_of_use",
]

IMPORT_BUDGET_SECONDS = 0.005
_HEAVY = ("jax", "jaxlib", "numpy", "triton", "jax_triton", "torch", "cupy")

_PROBE = """
import importlib, json, sys, time, warnings
warnings.simplefilter("error")
import ejkernel.plugin
before = set(sys.modules)
start = time.perf_counter()
importlib.import_module({module!r})
seconds = time.perf_counter() - start
new = {{m.partition(".")[0] for m in set(sys.modules) - before}}
print(json.dumps({{"seconds": seconds, "heavy": sorted(new & set({heavy!r}))}}))
"""


def _record(platform: str):
    name = platform.partition(".")[0]
    found = [record for record in kernel_registry.records if record.name == name]
    assert found, f"no installed distribution has an entry point named {name!r} in group 'ejkernel.plugins'"
    return found[0]


@pytest.mark.ejkernel_level("packaging")
def test_plugin_is_found(platform_name: str, conformance_report: Report) -> None:
    record = _record(platform_name)
    assert record.state == "ok", f"{record.state}: {record.reason}\n{record.traceback}"
    assert record.plugin is not None
    assert record.plugin.api_level in SUPPORTED_API_LEVELS
    assert record.plugin.summary


@pytest.mark.ejkernel_level("packaging")
def test_plugin_module(platform_name: str) -> None:
    """Importing the plugin module is fast and pulls in nothing heavy that core has not imported already."""
    probe = _PROBE.format(module=_record(platform_name).value.partition(":")[0], heavy=_HEAVY)
    seconds: list[float] = []
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=120)
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout.splitlines()[-1])
        assert not found["heavy"], f"the plugin module imports {', '.join(found['heavy'])}"
        seconds.append(found["seconds"])
    assert min(seconds) < IMPORT_BUDGET_SECONDS, f"{min(seconds) * 1e3:.1f} ms, allowed {IMPORT_BUDGET_SECONDS * 1e3:.0f} ms"


@pytest.mark.ejkernel_level("packaging")
def test_accepted_fields_exist(platform_name: str) -> None:
    """`Implementation.accepts` and `without` name optional fields of the operation's call."""
    for candidate in kernel_registry.list_implementations():
        implementation, operation = candidate.implementation, candidate.implementation.operation
        if is_of(candidate, platform_name) and operation in OPERATIONS:
            owner = get_operation(operation)
            optional, former = owner.optional_fields, {old for old, _ in owner.renamed}
            unknown = {*(implementation.accepts or implementation.without)} - {*optional} - former
            assert not unknown, f"{candidate.id} names {', '.join(sorted(unknown))}, {operation} has {', '.join(optional)}"


@pytest.mark.ejkernel_level("packaging")
def test_references_resolve(platform_name: str) -> None:
    """Everything that the plugin's records name can be imported."""
    for candidate in kernel_registry.list_implementations():
        if is_of(candidate, platform_name):
            implementation = candidate.implementation
            assert callable(resolve(implementation.target))
            if implementation.supports is not None:
                assert callable(resolve(implementation.supports))
            if implementation.configs is not None:
                assert isinstance(resolve(implementation.configs).config, type)  # pyright: ignore[reportArgumentType]


@pytest.mark.ejkernel_level("packaging")
def test_tuning_tables_are_of_use(platform_name: str) -> None:
    """Every entry of a shipped table is of a call and a config that its implementation has today."""
    own = [candidate for candidate in kernel_registry.list_implementations() if is_of(candidate, platform_name)]
    for path in _record(platform_name).tables:
        for entry in load_entries(Path(path).read_text(encoding="utf-8")):
            assert unused(entry, own) is None, (path, entry.key)
