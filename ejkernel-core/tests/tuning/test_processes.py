"""Tuning in a job of two real processes: the first tunes, both have its result."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

PROGRAM = """
import json, sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import ejkernel
from ejkernel import tuning

class Counting(tuning.Search):
    tuned = 0
    def tune(self, calls):
        Counting.tuned += 1
        return super().tune(calls)

tuning.install_tuner(Counting(rounds=1, progress=False))
x = jax.ShapeDtypeStruct((48, 32), "float32")
w = jax.ShapeDtypeStruct((3, 32, 24), "float32")
sizes = jax.ShapeDtypeStruct((3,), "int32")
result = ejkernel.autotune(lambda *a: ejkernel.grouped_matmul(*a, platform="xla"), x, w, sizes)
print(json.dumps({"tuned": Counting.tuned, "result": result.dumps()}))
"""


def test_the_first_process_tunes_for_both() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "XLA_FLAGS": ""}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    answers = [job.communicate(timeout=240) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], answers
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in answers)
    assert (first["tuned"], second["tuned"]) == (1, 0)
    assert first["result"] == second["result"] and json.loads(first["result"])["entries"]
