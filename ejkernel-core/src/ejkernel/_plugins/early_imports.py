"""What is imported before a first program is traced, where an accelerator is.

Since jax 0.12 Pallas adds settings to those that JAX compares when it looks for a compiled program, so that whatever was compiled
before it was imported is traced and compiled again. Platforms of accelerators, jax-triton too, import it when they trace or lower.
"""

from __future__ import annotations

import glob
import importlib
from collections.abc import Iterable

import jax

from ejkernel._plugins.records import PluginRecord
from ejkernel.plugin import FALLBACK

DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel*", "/dev/vfio/*")
"""Files that drivers of GPUs (NVIDIA's, also in WSL, and AMD's) and TPUs make."""


def import_early(records: Iterable[PluginRecord]) -> None:
    """Import Pallas if a platform may, which takes 70 ms; not on a machine without accelerators, where none would run."""
    platforms = any(record.ok and record.name != FALLBACK for record in records)
    if platforms and jax.__version_info__ >= (0, 12) and any(map(glob.glob, DEVICES)):
        importlib.import_module("jax.experimental.pallas")
