"""Check Triton kernels on two or more real GPUs: each launch on its own device, and a second process that compiles nothing.

    python tests/device/check_devices.py

Prints a line per check and exits with 1 if one fails.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel

SHAPE = (64, 512)
rms_norm = functools.partial(ejkernel.rms_norm, platform="triton")


def problem(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(SHAPE).astype(np.float32), rng.standard_normal(SHAPE[-1]).astype(np.float32)


def expected(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale


def check(got: Any, x: np.ndarray, scale: np.ndarray) -> None:
    wanted = expected(x, scale)
    error = np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < 1e-5, error


def on_every_device() -> None:
    """One program per device, in both directions, so that a module of the first device would be used on the second."""
    for device in (*jax.devices(), *reversed(jax.devices())):
        x, scale = problem(device.id)
        placed = jax.device_put((x, scale), device)
        for run in (rms_norm, jax.jit(rms_norm)):
            out = run(*placed)
            assert out.devices() == {device}, (out.devices(), device)
            check(out, x, scale)
        gradient = jax.jit(jax.grad(lambda x, scale: rms_norm(x, scale).sum()))(*placed)
        assert gradient.devices() == {device}
        assert np.isfinite(np.asarray(gradient)).all()


def on_the_default_device() -> None:
    for device in jax.devices():
        x, scale = problem(device.id)
        with jax.default_device(device):
            out = jax.jit(rms_norm)(jnp.asarray(x), jnp.asarray(scale))
        assert out.devices() == {device}
        check(out, x, scale)


def from_threads() -> None:
    failures: list[str] = []

    def run(device: Any) -> None:
        try:
            x, scale = problem(device.id)
            placed = jax.device_put((x, scale), device)
            for _ in range(50):
                check(jax.jit(rms_norm)(*placed), x, scale)
        except Exception:  # noqa: BLE001 - said by the thread that waits
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=(device,)) for device in jax.devices()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def over_a_mesh() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)) for spec in (("data",), ()))
    x, scale = problem(7)
    placed = jax.device_put(x, rows), jax.device_put(scale, whole)
    specs = {"in_specs": (rows.spec, whole.spec), "out_specs": rows.spec}
    for run in (jax.jit(rms_norm), jax.jit(jax.shard_map(rms_norm, mesh=mesh, **specs))):
        out = run(*placed)
        assert out.sharding.is_equivalent_to(rows, 2), out.sharding
        check(out, x, scale)
    assert "all-gather" not in jax.jit(rms_norm).lower(*placed).compile().as_text()


PROCESS = """
import json
from unittest import mock
import jax, jax.numpy as jnp
from triton.backends.nvidia.compiler import CUDABackend
import ejkernel

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
x = jnp.arange(64.0 * 512).reshape(64, 512)
gradient = jax.jit(jax.grad(lambda x: ejkernel.rms_norm(x, jnp.ones(512), platform="triton").sum()))
with mock.patch.object(CUDABackend, "make_llir", autospec=True, side_effect=CUDABackend.make_llir) as compiled:
    gradient(x).block_until_ready()
hits = events.count("/jax/compilation_cache/cache_hits")
print(json.dumps({"compiled": compiled.call_count, "hits": hits, "device": jax.devices()[0].id}))
"""


def a_second_process() -> None:
    """It compiles no kernel, and its program comes out of JAX's persistent cache, on another device too."""
    with tempfile.TemporaryDirectory() as folder:
        own = {
            "EJKERNEL_CACHE_DIR": folder,
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        answers = []
        for visible in ("0", "0", "1"):
            command = [sys.executable, "-c", PROCESS]
            environment = {**os.environ, **own, "CUDA_VISIBLE_DEVICES": visible, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            answers.append(json.loads(done.stdout.splitlines()[-1]))
    first, second, elsewhere = answers
    assert first["compiled"] > 0, answers
    assert (second["compiled"], elsewhere["compiled"]) == (0, 0), answers
    assert second["hits"] > first["hits"], answers
    print("  ", answers)


CHECKS: tuple[Callable[[], None], ...] = (on_every_device, on_the_default_device, from_threads, over_a_mesh, a_second_process)


def main() -> int:
    devices = jax.devices()
    if devices[0].platform != "gpu" or len(devices) < 2:
        print(f"needs two GPUs, found {devices}")
        return 1
    failed = 0
    for run in CHECKS:
        try:
            run()
            print(f"ok      {run.__name__}", flush=True)
        except Exception:  # noqa: BLE001 - every check is run and each failure is printed
            failed += 1
            print(f"FAILED  {run.__name__}\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
