"""No program is compiled twice: nothing of ours changes what JAX compares when it looks for a program that it has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ejkernel._plugins import early_imports
from ejkernel._plugins.catalog import FUNCTIONS


def test_every_program_is_compiled_once():
    command = [sys.executable, str(Path(__file__).with_name("compiled_once.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["again"] == {}
    assert found["programs"] > len(FUNCTIONS) / 2


def test_pallas_is_imported_early_where_an_accelerator_is(monkeypatch, tmp_path):
    record = type("Record", (), {"ok": True, "name": "triton"})
    imported = []
    monkeypatch.setattr(early_imports.importlib, "import_module", imported.append)
    monkeypatch.setattr(early_imports.jax, "__version_info__", (0, 12, 0))
    monkeypatch.setattr(early_imports, "DEVICES", (str(tmp_path / "accel*"),))
    early_imports.import_early([record])
    assert not imported
    (tmp_path / "accel0").touch()
    early_imports.import_early([type("Record", (), {"ok": True, "name": "xla"})])
    assert not imported
    early_imports.import_early([record])
    assert imported == ["jax.experimental.pallas"]
