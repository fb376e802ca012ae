"""Benchmarks: what is read from a recorded run, and how two runs compare."""

from __future__ import annotations

from ejkernel.bench._document import read_document
from ejkernel.bench.comparison import Comparison, Rule, compare, compare_files

__all__ = ["Comparison", "Rule", "compare", "compare_files", "read_document"]
