"""Questions to native code, asked in subprocesses, so that a crash or a hang there is an answer and not the end of doctor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

TIMEOUT = 60.0
"""Seconds; the first contact with a busy accelerator can take half a minute."""

_MARK = "ejkernel-probe:"

_DEVICES = """
import jax
for device in jax.devices():
    tell({"platform": device.platform, "kind": device.device_kind, "id": device.id,
          "compute_capability": getattr(device, "compute_capability", None)})
"""

_DIAGNOSE = """
import pkgutil, pluggy
from ejkernel.plugin import Hooks
manager = pluggy.PluginManager("ejkernel")
manager.add_hookspecs(Hooks)
manager.register(pkgutil.resolve_name(argument))
manager.hook.ejkernel_diagnose(report=lambda name, finding: tell({"name": str(name), "finding": str(finding)}))
"""

_REFERENCES = """
from ejkernel.cli._examination import examine_references
examine_references(argument, tell)
"""

_DISPATCH = """
from ejkernel.cli._examination import examine_dispatch
examine_dispatch(tell)
"""

_PROLOGUE = """
import json, sys, warnings
warnings.simplefilter("ignore")
argument = sys.argv[1]
def tell(value):
    sys.stdout.write("\\n" + %r + json.dumps(value) + "\\n")
    sys.stdout.flush()
"""


def probe_devices(timeout: float = TIMEOUT) -> dict[str, Any]:
    """What `jax.devices()` says: `{"devices": [...], "error": str | None}`."""
    found, error = ask(_DEVICES, "", timeout)
    return {"devices": found, "error": error}


def probe_plugin(value: str, timeout: float = TIMEOUT) -> dict[str, Any]:
    """What the `ejkernel_diagnose` of an entry point's value reports: `{"findings": [...], "error": str | None}`."""
    found, error = ask(_DIAGNOSE, value, timeout)
    return {"findings": found, "error": error}


def probe_references(platform: str, timeout: float = TIMEOUT) -> dict[str, Any]:
    """What a plugin's implementations name that cannot be imported: `{"findings": [...], "error": str | None}`."""
    found, error = ask(_REFERENCES, platform, timeout)
    return {"findings": found, "error": error}


def probe_dispatch(timeout: float = TIMEOUT) -> dict[str, Any]:
    """Who would run each operation here: `{"operations": [...], "error": str | None}`."""
    found, error = ask(_DISPATCH, "", timeout)
    return {"operations": found, "error": error}


def ask(code: str, argument: str, timeout: float) -> tuple[list[dict[str, Any]], str | None]:
    """Run code that calls `tell(value)`; returns what it told before it ended, and how it failed if it did."""
    command = [sys.executable, "-c", _PROLOGUE % _MARK + code, argument]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "EJKERNEL_STRICT": "0"}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=timeout, env=environment, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as late:
        return _told(late.stdout), f"no answer within {timeout:g} s"
    return _told(done.stdout), _failure(done.returncode, done.stderr.decode("utf-8", "replace"))


def _told(output: bytes | None) -> list[dict[str, Any]]:
    lines = (output or b"").decode("utf-8", "replace").splitlines()
    return [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]


def _failure(status: int, errors: str) -> str | None:
    if status == 0:
        return None
    if status < 0:
        return f"the probe was killed by {signal.Signals(-status).name}"
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"the probe ended with status {status}"
