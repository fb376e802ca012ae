"""Serving functions over two devices, in processes that XLA's compiler may end without ending this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving_on_meshes import RESULTS

SCRIPT = Path(__file__).with_name("serving_on_meshes.py")


@pytest.mark.unsampled
@pytest.mark.parametrize("way", ["Explicit", "Auto", "shard_map", "unchecked"])
def test_every_serving_function(way):
    found = subprocess.run([sys.executable, str(SCRIPT), way], env={**os.environ}, capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"after {found.stdout.splitlines()[-1:]}: {found.stderr[-3000:]}"
    assert found.stdout.endswith("done\n")
    assert {line.split()[0] for line in found.stdout.splitlines()[:-1]} == {*RESULTS}
