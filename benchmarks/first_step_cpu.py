"""Seconds until the training step of an example is lowered for a GPU, in fresh processes without one: with nothing, and warm.

python benchmarks/first_step_cpu.py --out benchmarks/results/first_step_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET, PLATFORMS = "gpu:9.0:NVIDIA H200", "triton,xla"
MODELS = {"llama": "125m", "hybrid": "125m"}

PROGRAM = """
import dataclasses, functools, hashlib, json, sys, time
clock = [time.perf_counter()]
import jax, jax.numpy as jnp, ejkernel
from ejkernel_train.config import TrainConfig
from ejkernel_train.step import initialise, train_step

def step_of(model, size):
    config = TrainConfig(model=model, size=size, batch=8, length=2048)
    state = jax.eval_shape(lambda: initialise(config))
    window = jax.ShapeDtypeStruct((config.batch, config.length + 1), jnp.int32)
    return jax.jit(functools.partial(train_step, config)), (state, window)

%s

if __name__ == "__main__":
    function, arguments = step_of(*sys.argv[1:3])
    with ejkernel.use(*sys.argv[4].split(","), target=sys.argv[3]):
        clock.append(time.perf_counter())
        traced = function.trace(*arguments)
        clock.append(time.perf_counter())
        lowered = traced.lower(lowering_platforms=("cuda",))
        clock.append(time.perf_counter())
    text = lowered.as_text()
    print(json.dumps({"import_s": clock[1] - clock[0], "trace_s": clock[2] - clock[1], "lower_s": clock[3] - clock[2],
                      "kernels": text.count("@triton_kernel_call"), "program": hashlib.sha256(text.encode()).hexdigest()}))
"""
"""With a function for each model, which `ejkernel compile` calls."""


def measured(folder: Path, model: str, cache: Path, bundle: Path | None, *, runs: int, empty: bool) -> dict[str, Any]:
    """Medians of fresh processes; `empty` gives each an empty cache."""
    found: list[dict[str, Any]] = []
    for _ in range(runs):
        if empty:
            shutil.rmtree(cache, ignore_errors=True)
        own = {"EJKERNEL_CACHE_DIR": str(cache), "EJKERNEL_KERNELS": str(bundle or ""), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(folder / "steps.py"), model, MODELS[model], TARGET, PLATFORMS]
        found.append(json.loads(subprocess.check_output(command, env={**os.environ, **own}, text=True).splitlines()[-1]))
    (program,) = {(one["kernels"], one["program"]) for one in found}
    times = {name: round(statistics.median(one[name] for one in found), 2) for name in ("import_s", "trace_s", "lower_s")}
    return {**times, "kernels": program[0], "program": program[1]}


def compiled(folder: Path, model: str, bundle: Path) -> float:
    """Seconds that `ejkernel compile` takes."""
    arguments = ["--target", TARGET, "--platform", PLATFORMS, "--out", str(bundle)]
    start = time.perf_counter()
    command = [sys.executable, "-m", "ejkernel", "compile", f"{folder / 'steps.py'}:{model}", *arguments]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return round(time.perf_counter() - start, 2)


def measured_model(folder: Path, model: str, runs: int) -> dict[str, Any]:
    bundle, cache = folder / f"bundle-{model}", folder / "cache"
    found: dict[str, Any] = {"compile_s": compiled(folder, model, bundle)}
    files = [*bundle.glob("kernels-*/*.kernel")]
    found["bundle"] = {"kernels": len(files), "bytes": sum(file.stat().st_size for file in files)}
    compiled_only = folder / f"compiled-{model}"
    shutil.copytree(bundle, compiled_only, ignore=shutil.ignore_patterns("kernels-lowered"))
    found["nothing"] = measured(folder, model, cache, None, runs=runs, empty=True)
    found["own_cache"] = measured(folder, model, cache, None, runs=runs, empty=False)
    found["bundle_of_this_device"] = measured(folder, model, cache, bundle, runs=runs, empty=True)
    found["bundle_of_another_device"] = measured(folder, model, cache, compiled_only, runs=runs, empty=True)
    assert len({found[name]["program"] for name in found if isinstance(found[name], dict) and "program" in found[name]}) == 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = "\n".join(f"def {model}():\n    return step_of({model!r}, {size!r})\n" for model, size in MODELS.items())
        (folder / "steps.py").write_text(PROGRAM % steps)
        result: dict[str, Any] = {model: measured_model(folder, model, arguments.runs) for model in MODELS}
    import importlib.metadata

    names = ("ejkernel-core", "jax", "jax-triton", "triton")
    result["target"] = TARGET
    result["versions"] = {**{name: importlib.metadata.version(name) for name in names}, "python": platform.python_version()}
    result["host"] = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
