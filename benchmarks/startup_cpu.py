"""Import time beyond jax, and the cost of dispatching a warm eager call.

python benchmarks/startup_cpu.py --out benchmarks/results/startup_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import timeit
from pathlib import Path
from typing import Any

IMPORT = "import time, jax; t = time.perf_counter(); import ejkernel; print((time.perf_counter() - t) * 1e3)"
LAZY = "import time, jax, ejkernel; t = time.perf_counter(); ejkernel.flash_attention; print((time.perf_counter() - t) * 1e3)"


def spread(values: list[float]) -> dict[str, float]:
    """Median with the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "lower_quartile": low, "upper_quartile": high, "runs": len(values)}


def in_fresh_process(code: str, runs: int) -> dict[str, float]:
    return spread([float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(runs)])


def eager_calls(number: int, repeat: int) -> dict[str, Any]:
    """Microseconds per warm eager call, ours and an equivalent `jax.jit` function, on arrays too small to matter."""
    import jax
    import jax.numpy as jnp

    import ejkernel

    x, scale = jnp.ones((4, 8)), jnp.ones(8)
    q = jnp.ones((1, 8, 2, 8))
    jitted_norm = jax.jit(lambda x, s: ejkernel.rms_norm(x, s))
    jitted_attention = jax.jit(lambda q, k, v: ejkernel.flash_attention(q, k, v, causal=True))
    pairs = {
        "rms_norm": (lambda: ejkernel.rms_norm(x, scale), lambda: jitted_norm(x, scale)),
        "flash_attention": (lambda: ejkernel.flash_attention(q, q, q, causal=True), lambda: jitted_attention(q, q, q)),
    }
    found: dict[str, Any] = {}
    for name, (ours, jitted) in pairs.items():
        jax.block_until_ready((ours(), jitted()))
        times: dict[str, list[float]] = {"ours": [], "jitted": []}
        for _ in range(repeat):
            times["ours"].append(timeit.timeit(ours, number=number) / number * 1e6)
            times["jitted"].append(timeit.timeit(jitted, number=number) / number * 1e6)
        found[name] = {key: spread(values) for key, values in times.items()}
        found[name]["overhead_us"] = found[name]["ours"]["median"] - found[name]["jitted"]["median"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "import_beyond_jax_ms": in_fresh_process(IMPORT, arguments.runs),
        "first_public_name_ms": in_fresh_process(LAZY, arguments.runs),
        "eager_call_us": eager_calls(1000, arguments.runs),
    }
    import jax

    import ejkernel

    result["versions"] = {"ejkernel": ejkernel.__version__, "jax": jax.__version__, "python": platform.python_version()}
    result["host"] = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
