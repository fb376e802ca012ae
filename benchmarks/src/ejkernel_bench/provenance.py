"""Where a result comes from: device, host, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

from ejkernel import kernel_registry
from ejkernel.targets import target_of_device
from ejkernel_bench.peers import Peer

_ALWAYS = ("jax", "jaxlib", "numpy", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "triton", "jax-triton", "torch")


def describe_device(device: Any) -> dict[str, Any]:
    """The device that is measured and the machine it sits in."""
    driver = str(getattr(device.client, "platform_version", "")).strip() if device.platform != "cpu" else ""
    return {
        "backend": target_of_device(device).backend,
        "kind": device.device_kind,
        "capability": target_of_device(device).compute_capability,
        "driver": " ".join(driver.split()) or None,
        "count": jax.local_device_count(),
        "host": f"{_cpu_model()}, {_cores()} cores, {_memory()}",
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def versions(peers: tuple[Peer, ...]) -> dict[str, str]:
    """Of Python, of what we stand on, of every plugin and of every peer that is there."""
    ours = [name for name in ("ejkernel-core", *(record.distribution for record in kernel_registry.records)) if name]
    theirs = [distribution for peer in peers for distribution in peer.distributions]
    found = {"python": platform.python_version()}
    for name in dict.fromkeys((*_ALWAYS, *ours, *theirs)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout that this code is run from, `-dirty` where files differ; None for an installed package."""
    root = Path(__file__).parents[3]
    if not (root / "ejkernel-core" / "src").is_dir():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (ValueError, OSError, AttributeError):
        return "memory unknown"
