"""Where the time of a decoding step of `examples/serve` goes on a real GPU: the engine's steps, kernels, gaps and host.

    python decode_step.py --out FOLDER --requests 1 16 -- --random 1.3b --buckets 1 16 256

What follows `--` is of `python -m ejkernel_serve.bench`. Each number of requests decodes with the sampling of that benchmark; steps
are timed first and traced then, as tracing makes the host slower. decode_step.json under `--out`.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from profile_step import kernels, summary

STEPS = 24


def decoding(engine: Any, number: int, prompt: int, generate: int) -> list[Any]:
    """Requests whose prompts are computed."""
    import numpy as np

    from ejkernel_serve.config import Sampling

    engine.scheduler.ends = frozenset()  # random weights may draw the mark that ends a text
    rng = np.random.default_rng(number)
    sampling = [Sampling(generate, temperature=0.8, top_k=50, top_p=0.95, seed=each) for each in range(number)]
    requests = [engine.submit(rng.integers(0, 256, prompt).tolist(), each) for each in sampling]
    while any(len(request.generated) < 4 for request in requests):
        engine.step()
    return requests


def measure(engine: Any, number: int, prompt: int) -> dict[str, Any]:
    import jax

    requests = decoding(engine, number, prompt, 8 * STEPS)

    def generated() -> int:
        return sum(len(request.generated) for request in requests)

    seconds, begin = [], generated()
    while generated() < begin + STEPS * number:
        before, start = generated(), time.perf_counter()
        engine.step()
        seconds += [(time.perf_counter() - start) * number / max(generated() - before, 1)]
    with tempfile.TemporaryDirectory() as folder:
        begin = generated()
        with jax.profiler.trace(folder):
            while generated() < begin + STEPS * number:
                engine.step()
        tokens = (generated() - begin) / number
        found = summary(kernels(Path(folder)), tokens)
    engine.finish()
    return {"requests": number, "token_ms": round(statistics.median(seconds) * 1e3, 4), "traced": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--shown", type=int, default=20, help="kernels that are printed")
    parser.add_argument("asked", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    from ejkernel_serve import bench

    arguments = bench.parser().parse_args([each for each in options.asked if each != "--"])
    engine = bench.load_engine(arguments)
    start = time.perf_counter()
    engine.warm_up()
    rows: list[dict[str, Any]] = []
    found = {"compile_seconds": round(time.perf_counter() - start, 1), "rows": rows}
    for number in options.requests:
        rows.append(measure(engine, number, options.prompt))
        print(json.dumps({**rows[-1], "traced": {k: v for k, v in rows[-1]["traced"].items() if k != "kernels"}}), flush=True)
        for each in rows[-1]["traced"]["kernels"][: options.shown]:
            print(f"{each['ms'] * 1e3:9.1f} us {each['calls']:6.1f}  {each['name'][:60]}  {each['for'][-80:]}")
        (options.out / "decode_step.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"compiled in {found['compile_seconds']} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
