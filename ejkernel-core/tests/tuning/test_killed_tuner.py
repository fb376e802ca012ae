"""A tuner that is killed leaves a cache that readers and the next tuner can use."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ejkernel import tuning
from ejkernel.errors import CacheWarning

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")

TUNER = """
import dataclasses, sys
import jax
import jax.numpy as jnp
import ejkernel
from ejkernel import tuning
from ejkernel.operations.rms_norm.interface import RmsNormOutputs
from ejkernel.plugin import ConfigSpace

@dataclasses.dataclass(frozen=True)
class Rows:
    count: int

def forward(call, inputs, config):
    if config.count % 3 == 0:
        raise RuntimeError("not a multiple of three")
    rstd = jax.lax.rsqrt(jnp.mean(inputs.x**2, axis=-1) + call.epsilon)
    return RmsNormOutputs(inputs.x * rstd[..., None], rstd if call.save_residuals else None)

space = ConfigSpace(Rows, lambda call, target: Rows(1), lambda call, target: [Rows(n) for n in range(1, 7)])
ejkernel.kernel_registry.register("rms_norm", "fixture", priority=1000, configs=space)(forward)
program = lambda x: ejkernel.rms_norm(x, platform="fixture")
sizes = range(1, 9)

def tier(n):
    return ejkernel.explain("rms_norm", jnp.ones((n, 4)), platform="fixture").forward

if sys.argv[1] == "tune":
    for n in sizes:
        tuning.install_tuner(tuning.Search(rounds=1, input_sets=1, progress=False, store=True))
        ejkernel.autotune(program, jnp.ones((n, 4)))
else:
    decisions = [tier(n) for n in sizes]
    assert all(decision.config.count % 3 for decision in decisions)
    assert all(bool(jnp.isfinite(program(jnp.ones((n, 4)))).all()) for n in sizes)
    print(*(decision.tier.replace(" ", "-") for decision in decisions))
"""

WRITER = """
import dataclasses
from ejkernel import tuning
from ejkernel.configs import quarantine as _quarantine
key = tuning.Key("rms_norm", "forward", "fixture", 1, "{}", "cpu", "cpu", "", "0.0.0", "0.1")
timing = tuning.Timing({"rows": 1}, tuple(float(i) for i in range(20000)))
for number in range(100000):
    mine = dataclasses.replace(key, version=number % 5)
    tuning.store(tuning.Entry(mine, {"rows": 1}, timings=(timing,), check=tuning.Check(True, 0.5)))
    _quarantine.add([tuning.Quarantined(mine, {"rows": number % 7}, "x" * 200000)])
"""


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "EJKERNEL_CACHE_DIR": str(cache), "PYTHONWARNINGS": "error::UserWarning"}


def start(code: str, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=environment(cache), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def kill_while_writing(code: str, cache: Path, generator: random.Random, *arguments: str, within: float) -> None:
    """SIGKILL at a moment after the first file."""
    process = start(code, cache, *arguments)
    deadline = time.monotonic() + 240
    while not files(cache) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(generator.uniform(0, within))
    process.kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGKILL, 0), said
    assert files(cache)


def check_whole(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry can be read; a writer that was at work leaves no more than its one temporary file."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(cache))
    found = tuning.cache_entries()
    assert {file.state for file in found} <= {"ok", "other version"}
    assert len(files(cache)) - len(found) <= 1


def killed_tuner(seed: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_while_writing(TUNER, cache, random.Random(seed), "tune", within=3.0)
    check_whole(cache, monkeypatch)
    reader = start(TUNER, cache, "read")
    out, said = reader.communicate(timeout=240)
    assert (reader.returncode, said) == (0, "")
    assert {*out.split()} <= {"user-cache", "heuristic"}
    second = start(TUNER, cache, "tune")
    assert (second.communicate(timeout=240)[1], second.returncode) == ("", 0)
    out, _ = start(TUNER, cache, "read").communicate(timeout=240)
    assert out.split() == ["user-cache"] * 8
    check_whole(cache, monkeypatch)
    tuning.clear_cache()
    assert files(cache) == []


def test_a_killed_tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_tuner(0, tmp_path / "cache", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_tuners_killed_at_other_moments(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_tuner(seed, tmp_path / "cache", monkeypatch)


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_writer(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does nothing but write large entries, so that it is killed in the middle of one."""
    cache = tmp_path / "cache"
    kill_while_writing(WRITER, cache, random.Random(seed), within=0.3)
    check_whole(cache, monkeypatch)
    assert tuning.clear_cache() >= 1
    assert files(cache) == []


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a file system of a few kB")
@pytest.mark.filterwarnings("default")
def test_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(disk))
        key = tuning.Key("rms_norm", "forward", "fixture", 1, "{}", "cpu", "cpu", "", "0.0.0", "0.1")
        timing = tuning.Timing({"rows": 1}, tuple(float(i) for i in range(20000)))
        entry = tuning.Entry(key, {"rows": 1}, timings=(timing,), check=tuning.Check(True, 0.5))
        with pytest.warns(CacheWarning, match=r"No space left on device.*EJKERNEL_CACHE_DIR") as caught:
            assert (tuning.store(entry), tuning.store(entry)) == (False, False)
        assert len(caught) == 1 and str(disk) in str(caught[0].message)
        assert files(disk) == []
        tuning.remember(entry)
        assert tuning.remembered() == (entry,)
    finally:
        tuning.forget()
        subprocess.run(["umount", str(disk)], check=True)
