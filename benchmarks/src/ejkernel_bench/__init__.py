"""Benchmarks: our kernels beside those of others, checked and timed; what is recorded, and how two recorded runs compare."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` below finds at run time
    from ejkernel_bench._document import parse_document, read_document
    from ejkernel_bench._run import run
    from ejkernel_bench._select import Selected, select
    from ejkernel_bench._settings import Settings
    from ejkernel_bench.comparison import Comparison, Rule, compare, compare_files

__all__ = [
    "Comparison",
    "Rule",
    "Selected",
    "Settings",
    "compare",
    "compare_files",
    "parse_document",
    "read_document",
    "run",
    "select",
]

_MODULES = {
    **dict.fromkeys(("parse_document", "read_document"), "_document"),
    "run": "_run",
    **dict.fromkeys(("Selected", "select"), "_select"),
    "Settings": "_settings",
    **dict.fromkeys(("Comparison", "Rule", "compare", "compare_files"), "comparison"),
}
"""Names and where they live. Nothing is imported before it is asked for, so that `ejkernel bench --help` needs no JAX."""


if not TYPE_CHECKING:  # checkers would take it to define every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(importlib.import_module(f"ejkernel_bench.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'ejkernel_bench' has no attribute {name!r}")
