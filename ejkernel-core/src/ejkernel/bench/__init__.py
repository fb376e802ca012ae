"""Benchmarks: our kernels beside those of others, checked and timed; what is recorded, and how two recorded runs compare."""

from __future__ import annotations

from ejkernel.bench._document import parse_document, read_document
from ejkernel.bench._run import run
from ejkernel.bench._select import Selected, select
from ejkernel.bench._settings import Settings
from ejkernel.bench.comparison import Comparison, Rule, compare, compare_files

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
