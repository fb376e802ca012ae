"""Two real processes with a device each, found through `jax.distributed`: data parallel on a CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from ejkernel_train import data, report
from ejkernel_train.config import TrainConfig

STEPS = 3


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def test_two_processes_have_the_losses_of_one(tmp_path: Path):
    out = tmp_path / "record.json"
    command = [sys.executable, "-m", "ejkernel_train", "--steps", str(STEPS), "--dtype", "float32", "--mesh", "data=2"]
    command += ["--out", str(out), "--coordinator", f"localhost:{free_port()}", "--processes", "2"]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "EJKERNEL_TYPECHECK")}
    started = [
        subprocess.Popen(
            [*command, "--process", str(number)],
            env={**environment, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    assert "tokens/s" in said[0] and "tokens/s" not in said[1]
    record = json.loads(out.read_text())
    assert record["devices"] == 2
    alone = report.run([TrainConfig(steps=STEPS, dtype="float32")], data.load())
    np.testing.assert_allclose(record["builds"][0]["losses"], alone["builds"][0]["losses"], atol=1e-5, rtol=0)
