"""A tuning table is data only: a file in `ejkernel_pallas/tables` is found, answers calls, and is held against its kernels."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ejkernel import kernel_registry
from ejkernel._dispatch.decisions import decide
from ejkernel.call import Request
from ejkernel.call.policy import policy_for_call
from ejkernel.configs.entry import Check, Entry, dump_entries, load_entries
from ejkernel.configs.key import Key
from ejkernel.configs.spaces import config_space, to_plain
from ejkernel.operations import get_operation
from ejkernel.plugin import Target
from ejkernel.testing.problem import case_named
from ejkernel.testing.shapes import bound_shapes
from ejkernel.testing.tables import unused
from ejkernel_pallas import _plugin
from ejkernel_pallas.mosaic_gpu import _device

H200 = Target("gpu", "NVIDIA H200", "9.0")
CASES = {"flash_attention": "gqa-causal-tail", "grouped_matmul": "skewed"}
OWN = [candidate for candidate in kernel_registry.list_implementations() if candidate.platform == "pallas"]


def request_of(operation):
    _, call = bound_shapes(operation, case_named(operation, CASES[operation]), "bfloat16")
    return Request(get_operation(operation), call, H200, policy_for_call(operation, "pallas")).saving_residuals()


def entry_of(operation, phase):
    """An entry as `ejkernel tune --platform pallas --out` writes them, of the search space's last config."""
    request = request_of(operation)
    (candidate,) = (
        c for c in OWN if (c.id, c.implementation.operation, c.implementation.phase) == ("pallas.mosaic_gpu", operation, phase)
    )
    config = config_space(candidate).search_space(request.call, H200)[-1]
    return Entry(Key.of(request, phase, candidate), to_plain(config), check=Check(True, 0.5)), config


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """`shipped(*entries)` puts a table beside the plugin module, and the plugin is asked again."""

    def ship(*entries):
        (tmp_path / "tables").mkdir()
        (tmp_path / "tables" / "h200.json").write_text(dump_entries(entries))
        monkeypatch.setattr(_plugin, "__file__", str(tmp_path / "_plugin.py"))
        tables = tuple(_plugin.ejkernel_tuned_configs())
        records = [dataclasses.replace(r, tables=tables) if r.name == "pallas" else r for r in kernel_registry.records]
        monkeypatch.setattr(kernel_registry, "_records", tuple(records))
        return tables

    return ship


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("operation", CASES)
def test_a_table_answers_calls(operation, phase, shipped, monkeypatch):
    monkeypatch.setattr(_device, "version_problem", lambda: None)  # nothing is lowered here
    entry, config = entry_of(operation, phase)
    before = decide(request_of(operation), phase)
    assert (before.chosen.id, before.tier) == ("pallas.mosaic_gpu", "heuristic")
    assert before.config != config
    (path,) = shipped(entry)
    after = decide(request_of(operation), phase)
    assert (after.chosen.id, after.tier, after.config) == ("pallas.mosaic_gpu", "shipped table", config)
    assert [unused(one, OWN) for one in load_entries(Path(path).read_text())] == [None]


@pytest.mark.parametrize(("operation", "knob"), [("flash_attention", "block_k"), ("grouped_matmul", "l2_swizzle")])
def test_an_entry_that_is_of_no_use_is_found(operation, knob):
    entry, _ = entry_of(operation, "forward")
    call = entry.key.call
    for change, said in (
        ({"version": 2}, "it is of version 2 of 'pallas.mosaic_gpu', which is at 1"),
        ({"implementation": "pallas.moon"}, "the plugin has no 'pallas.moon'"),
        ({"call": call.replace('"precision"', '"exactness"')}, "unexpected keyword argument"),
        ({"call": call.replace('"precision":null,', "")}, "its call is not one of today's"),
    ):
        assert said in unused(dataclasses.replace(entry, key=dataclasses.replace(entry.key, **change)), OWN)
    illegal = dataclasses.replace(entry, config={**entry.config, knob: 7 * entry.config[knob]})
    assert "is not in the search space of its call" in unused(illegal, OWN)
    assert "unknown knob 'turbo'" in unused(dataclasses.replace(entry, config={**entry.config, "turbo": 1}), OWN)


def test_shipped_entries_are_used() -> None:
    """Every entry answers a call of today with a config that is in its search space."""
    (path,) = _plugin.ejkernel_tuned_configs()
    entries = load_entries(Path(path).read_text())
    assert entries and [unused(one, OWN) for one in entries] == [None] * len(entries)
    assert all(one.check is not None and one.check.passed for one in entries)
