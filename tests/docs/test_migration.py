"""The tables of docs/migration.md: what stands on the right exists and takes these arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ejkernel

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
ROWS = [row for row in re.findall(r"^\| (.+) \| (.+) \|$", PAGE, re.MULTILINE) if "`" in row[1]]
CALLS = [call for _, here in ROWS for call in re.findall(r"`([^`]+)`", here)]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.unsampled
def test_right_side_exists(call):
    node = ast.parse(call, mode="eval").body
    while isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
        node = node.value  # of a result
    if isinstance(node, ast.Call):
        function = getattr(ejkernel, ast.unparse(node.func))
        inspect.signature(function).bind(*node.args, **{keyword.arg: None for keyword in node.keywords})
    else:
        importlib.import_module(call)


JAX = [
    pytest.param(there, call, id=there)
    for left, here in ROWS
    for there, call in zip(re.findall(r"`(jax\.[^`]+)`", left), re.findall(r"`([^`]+)`", here), strict=False)
]


@pytest.mark.unsampled
@pytest.mark.parametrize(("there", "here"), JAX)
def test_the_left_side_of_jax_is_its_signature(there, here):
    """Arguments on the left stand where JAX has them, and every name on the right that stands for one is JAX's."""
    node, call = (ast.parse(text.replace(", ...", ""), mode="eval").body for text in (there, here))
    assert isinstance(node, ast.Call) and isinstance(call, ast.Call)
    parameters = [*inspect.signature(operator.attrgetter(ast.unparse(node.func).removeprefix("jax."))(jax)).parameters]
    listed = [ast.unparse(argument) for argument in node.args]
    assert listed == parameters[: len(listed)]
    given = {ast.unparse(argument) for argument in (*call.args, *(keyword.value for keyword in call.keywords))}
    assert given <= {*parameters}
    assert "..." not in there or given == {*parameters}, "the row says that all options are there"


def test_sdpa_has_the_arguments_of_jax():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(ejkernel.scaled_dot_product_attention).parameters
    assert {name: one.default for name, one in theirs.items()} == {name: ours[name].default for name in theirs}
    assert [*ours][:3] == [*theirs][:3]


def test_which_functions_return_a_state():
    assert "return a tuple with the last state, always; `causal_conv1d` does so with `return_state=True`" in PAGE.replace(
        "\n", " "
    )
    u, rates, mixing, skip = jnp.ones((1, 4, 8)), -jnp.ones((8, 2)), jnp.ones((1, 4, 2)), jnp.ones(8)
    assert isinstance(ejkernel.state_space_v1(u, rates, mixing, mixing, skip, u), tuple)
    heads, shared = jnp.ones((1, 4, 2, 4)), jnp.ones((1, 4, 1, 2))
    assert isinstance(ejkernel.state_space_v2(heads, -jnp.ones(2), shared, shared, jnp.ones(2), jnp.ones((1, 4, 2))), tuple)
    weight = jnp.ones((8, 3))
    assert isinstance(ejkernel.causal_conv1d(u, weight), jax.Array)
    assert isinstance(ejkernel.causal_conv1d(u, weight, return_state=True), tuple)


@pytest.mark.unsampled
@pytest.mark.parametrize("path", re.findall(r"^\| `(ejkernel\.[\w.]+)` \|", PAGE, re.MULTILINE))
def test_old_paths_resolve(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parent, _, name = path.rpartition(".")
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(parent), name)
