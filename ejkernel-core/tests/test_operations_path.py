"""`ejkernel.modules.operations`: what `ejkernel.modules` has, under the older path."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import ejkernel
from ejkernel import modules
from ejkernel.modules import operations
from ejkernel.modules.operations import configs


def test_every_public_name_is_the_same_object() -> None:
    for name in modules.__all__:
        assert getattr(operations, name) is getattr(modules, name), name
    for name in configs.__all__:
        assert getattr(operations, name) is getattr(configs, name), name
    assert {*modules.__all__, *configs.__all__} == {*dir(operations)}


def test_configs_are_names_of_modules_too() -> None:
    assert modules.GroupedMatmulConfig is configs.GroupedMatmulConfig
    assert modules.UnifiedAttentionConfig is configs.UnifiedAttentionConfig


@pytest.mark.parametrize("module", ["ejkernel.modules", "ejkernel.modules.operations"])
@pytest.mark.parametrize("name", ["no_such_function", "NoSuchConfig"])
def test_unknown_names(module: str, name: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute '{name}'"):
        getattr(importlib.import_module(module), name)


def test_faces_are_attributes_of_the_package_and_lazy(python: Any) -> None:
    assert ejkernel.ops.Kernel is importlib.import_module("ejkernel.ops").Kernel
    assert ejkernel.callib.ejit is importlib.import_module("ejkernel.callib").ejit
    loaded = (
        "import sys, ejkernel; print([n for n in ('ops', 'callib', 'modules', 'tuning') if f'ejkernel.{n}' in sys.modules])"
    )
    assert python(loaded) == "[]\n"
