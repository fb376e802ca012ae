"""Benchmarks: ours on every installed platform beside named peers, each right before it is timed."""

from __future__ import annotations

from ejkernel.bench._result import Loss, losses, time_of
from ejkernel.bench._run import run
from ejkernel.bench._select import Selected, select
from ejkernel.bench._settings import Settings

__all__ = ["Loss", "Selected", "Settings", "losses", "run", "select", "time_of"]
