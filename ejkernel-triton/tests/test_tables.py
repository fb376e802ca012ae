"""The tables of tuned configs that the distribution ships; the conformance suite holds each entry against its implementation."""

import importlib
from pathlib import Path

import pytest

from ejkernel.operations import operation_module
from ejkernel.testing.problem import operations_of
from ejkernel.tuning import AutotuningResult
from ejkernel_triton import _plugin
from ejkernel_triton._ahead_of_time import PLATFORM, decisions_of, target_of
from ejkernel_triton._versions import version_problem

needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
ENTRIES = [entry for path in _plugin.ejkernel_tuned_configs() for entry in AutotuningResult.load(path).entries]


@pytest.mark.tree
def test_there_is_a_table_of_each_operation_that_was_tuned():
    assert {Path(path).name for path in _plugin.ejkernel_tuned_configs()} == {"h200.json"}
    assert {entry.key.implementation for entry in ENTRIES} == {"triton"}
    assert {"flash_attention", "grouped_matmul"} <= {entry.key.operation for entry in ENTRIES} <= {*operations_of("triton")}


@needs_jax_triton
@pytest.mark.parametrize("operation", sorted({entry.key.operation for entry in ENTRIES}))
def test_benchmarked_calls_are_answered_from_the_table_with_what_is_legal_for_them(operation):
    found = 0
    for case in operation_module(operation, "cases").CASES:
        if "bench" not in case.tags:
            continue
        for decision in decisions_of(operation, case, "bfloat16", target_of(90)):
            if decision.chosen is None or decision.chosen.platform != PLATFORM or decision.tier != "shipped table":
                continue
            space = getattr(importlib.import_module(f"ejkernel_triton.{operation}.config"), decision.phase.upper())
            assert decision.config in space.search_space(decision.call, decision.target)
            found += 1
    assert found == sum(entry.key.operation == operation for entry in ENTRIES)
