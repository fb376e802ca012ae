"""The tables of docs/migration.md: what stands on the right exists and takes these arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from pathlib import Path

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
