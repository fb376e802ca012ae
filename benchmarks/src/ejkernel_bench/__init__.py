"""Benchmarks: our kernels beside those of others, checked and timed; what is recorded, and how two recorded runs compare."""

from __future__ import annotations

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
