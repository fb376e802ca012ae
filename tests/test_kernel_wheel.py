"""What tools/kernel_wheel.py builds distributions of compiled kernels from."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from ejkernel.cli.tune import calls_in_file, program_of
from ejkernel.targets import as_target

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool():
    """The tool, which is a script."""
    pytest.importorskip("triton", reason="the tool compiles Triton kernels")
    spec = importlib.util.spec_from_file_location("kernel_wheel", ROOT / "tools" / "kernel_wheel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_a_distribution_asks_for_what_its_kernels_were_made_with(tool, capability):
    pytest.importorskip("jax_triton")
    project = tomllib.loads(tool.description(capability))["project"]
    assert project["name"] == f"ejkernel-kernels-sm{capability}"
    assert project["requires-python"] == f"=={sys.version_info.major}.{sys.version_info.minor}.*"
    assert [item.partition("==")[0] for item in project["dependencies"]] == ["ejkernel-triton", "jax-triton", "triton"]
    name = tool.capability_name(capability)
    assert as_target(f"gpu:{name}").capability == (capability // 10, capability % 10)


def test_the_calls_can_be_made(tool):
    for operation in json.loads(tool.SHAPES.read_text()):
        for arrays, options in calls_in_file(tool.SHAPES, operation):
            function, arguments = program_of(operation, arrays, options, ("xla",), gradient=False)
            assert jax.tree.leaves(jax.eval_shape(function, *arguments))
