"""Wide rows on a real GPU: configs of `layer_norm`, `softmax` and `rms_norm` in Triton, for rows of 16384 to 131072 columns.

    python tests/device/wide_rows.py --out results

For every shape, dtype and phase, each config of the search space is run twice, the two results are compared bit by bit and with
XLA's in float32, then it is timed (device time by CUPTI). Kernels are compiled by threads while others run, the most telling ones
first: the heuristic's, persistent kernels, then the others. Prints a ranking of each, writes `wide_rows.json` under `--out` (or
`$OUT`), exits with 1 if a number is wrong.

`--only softmax,layer_norm,rms_norm`, `--dtypes bfloat16`, `--shapes 2048x32768`, `--budget` seconds after which nothing new is
started (140), `--threads` that compile (14), `--most` configs for each call and phase (0 = all), `--every`: walks over one row, and
other configs that lost before, too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any

import check_gpu
import jax
import jax.numpy as jnp
from row_problems import Prepared, Problem, norm
from rows import Candidate, Rows, gradients_of_interest, timed

from ejkernel.plugin import current_target

SHAPES = ((2048, 32768), (8192, 16384), (1024, 131072), (1024, 65536))
LIMIT = {"float32": 2e-5, "bfloat16": 8e-3}


@dataclasses.dataclass
class Job:
    """One config of one call."""

    problem: Problem
    dtype: str
    phase: str
    config: Any
    chosen: bool
    compiled: concurrent.futures.Future[Any] | None = None

    @property
    def function(self) -> Any:
        return phase_function(specimen(self.problem, self.dtype), self.phase, self.config)


_specimens: dict[tuple[str, str], Prepared] = {}


def specimen(problem: Problem, dtype: str) -> Prepared:
    """What a problem's functions close over, made once; its arrays have two rows."""
    known = _specimens.get((problem.name, dtype))
    if known is not None:
        return known
    shapes = {name: (2, *shape[1:]) if name == "x" else shape for name, shape in problem.shapes.items()}
    prepared = Prepared(dataclasses.replace(problem, shapes=shapes), dtype)
    x = dataclasses.replace(prepared.call.x, shape=problem.shapes["x"])
    prepared.call, prepared.light = (dataclasses.replace(call, x=x) for call in (prepared.call, prepared.light))
    _specimens[problem.name, dtype] = prepared
    return prepared


def phase_function(prepared: Prepared, phase: str, config: Any, module: Any = None) -> Any:
    module = module or prepared.kernel

    def forward(inputs, outputs, cotangents):
        return [getattr(module.forward(prepared.light, inputs, config), name) for name in prepared.public]

    def backward(inputs, outputs, cotangents):
        return gradients_of_interest(prepared, module.backward(prepared.call, inputs, outputs, cotangents, config))

    return forward if phase == "forward" else backward


def stays(config: Any) -> bool:
    """Whether programs stay for more than a row, or for parts of rows."""
    return hasattr(config, "cooperative") and bool(config.programs)


def lost(config: Any) -> bool:
    """Configs that were far behind wherever they were measured, or differ little from others."""
    if not hasattr(config, "cooperative"):
        return config.block != 0 and (config.num_warps == 4) == (config.block == 2048)
    return bool(config.block and not config.cooperative and (config.num_warps, config.num_stages) not in ((16, 1), (4, 3)))


def jobs_of(options: argparse.Namespace) -> list[Job]:
    target, found = current_target(), []
    for dtype in options.dtypes.split(","):
        for rows, width in SHAPES:
            if options.shapes and f"{rows}x{width}" not in options.shapes.split(","):
                continue
            for operation in options.only.split(","):
                softmax = Problem("softmax", {"x": (rows, width)})
                problem = softmax if operation == "softmax" else norm(operation, rows, width)
                prepared = specimen(problem, dtype)
                for phase in ("forward", "backward"):
                    space = prepared.config.FORWARD if phase == "forward" else prepared.config.BACKWARD
                    call = prepared.light if phase == "forward" else prepared.call
                    heuristic = space.heuristic(call, target)
                    configs = [c for c in space.search_space(call, target) if options.every or c == heuristic or not lost(c)]
                    configs.sort(key=lambda c, heuristic=heuristic: (c != heuristic, not stays(c)))
                    for config in configs[: options.most or None]:
                        found.append(Job(problem, dtype, phase, config, config == heuristic))
    return found


def compile_job(job: Job) -> Any:
    """For arrays that are not there yet."""
    prepared = specimen(job.problem, job.dtype)
    call = prepared.call
    rows = call.x.shape[:-1]

    def like(name, value):
        if value is None:
            return None
        shape = rows if name in ("mean", "rstd") else call.x.shape if name in ("x", "out") else value.shape
        return jax.ShapeDtypeStruct(shape, value.dtype)

    def shapes(values):
        return type(values)(**{name: like(name, value) for name, value in values._asdict().items()})

    arguments = (shapes(prepared.inputs), shapes(jax.eval_shape(prepared.outputs)), shapes(prepared.cotangents))
    return jax.jit(_of_sets(phase_function(prepared, job.phase, job.config))).lower([arguments]).compile()


def same_bits(first: Any, second: Any) -> bool:
    def bits(value):
        return jax.lax.bitcast_convert_type(value, jnp.uint32 if value.dtype == jnp.float32 else jnp.uint16)

    return all(bool(jnp.array_equal(bits(a), bits(b))) for a, b in zip(first, second, strict=True))


def run_problem(jobs: list[Job], rows: Rows, options: argparse.Namespace) -> list[dict[str, Any]]:
    problem, dtype = jobs[0].problem, jobs[0].dtype
    prepared = Prepared(problem, dtype)
    values = (prepared.inputs, prepared.outputs(), prepared.cotangents)
    wide = jax.tree.map(lambda value: value.astype(jnp.float32), values)
    wanted = {phase: jax.jit(phase_function(prepared, phase, None, prepared.xla))(*wide) for phase in ("forward", "backward")}
    del wide
    results = []
    for job in jobs:
        left = check_gpu.remaining(options.budget)
        assert job.compiled is not None
        if left <= 0:
            job.compiled.cancel()
            continue
        name = f"{problem.name} {dtype} {job.phase} {check_gpu.knobs(job.config)}"
        try:
            program = job.compiled.result(left)
            got = program([values])
            rows.add(f"{name}: two equal runs", same_bits(got, program([values])), "bit by bit")
            rows.compare(name, numbered(got), numbered(wanted[job.phase]), LIMIT[dtype])
            candidate = Candidate(check_gpu.knobs(job.config), job.phase, job.function, job.chosen)
            results.append({**timed(problem, prepared, candidate, program, [values]), "dtype": dtype})
        except (TimeoutError, concurrent.futures.CancelledError):
            continue
        except Exception as error:  # noqa: BLE001 - a config that does not compile or run is a finding, and others are looked at
            rows.add(name, False, f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
    return results


def numbered(values: Any) -> dict[str, Any]:
    return {str(i): value for i, value in enumerate(values)}


def _of_sets(function: Any) -> Any:
    return lambda sets: function(*sets[0])


def ranking(results: list[dict[str, Any]]) -> None:
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault((row["problem"], row["dtype"], row["phase"]), []).append(row)
    for (problem, dtype, phase), members in groups.items():
        members.sort(key=lambda row: row["microseconds"])
        chosen = [row for row in members if row["chosen"]]
        print(f"{problem} {dtype} {phase}: {len(members)} configs", flush=True)
        for row in (*members[:4], *(row for row in chosen if row not in members[:4])):
            print(f"  {'*' if row['chosen'] else ' '} {row['name']:70s} {row['microseconds']:8.1f} us {row['fraction']:.3f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of wide_rows.json")
    parser.add_argument("--only", default="layer_norm,softmax", help="operations, also rms_norm, comma separated")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="comma separated")
    parser.add_argument("--shapes", default="", help="of 8192x16384,2048x32768,1024x65536,1024x131072")
    parser.add_argument("--budget", type=float, default=140, help="seconds after which nothing new is started")
    parser.add_argument("--threads", type=int, default=14, help="threads that compile")
    parser.add_argument("--most", type=int, default=0, help="configs for each call and phase; 0 = all")
    parser.add_argument("--every", action="store_true", help="configs that lost before, too")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    rows, times = Rows(), []
    versions = check_gpu.versions()
    print(json.dumps(versions), flush=True)
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(options)
    print(f"{len(jobs)} configs", flush=True)
    pool = concurrent.futures.ThreadPoolExecutor(options.threads)
    for job in jobs:
        job.compiled = pool.submit(compile_job, job)
    order = list(dict.fromkeys((job.problem.name, job.dtype) for job in jobs))
    for name, dtype in order:
        if check_gpu.remaining(options.budget) > 0:
            times += run_problem([job for job in jobs if (job.problem.name, job.dtype) == (name, dtype)], rows, options)
            record = {"versions": versions, "checks": rows.rows, "times": times}
            (folder / "wide_rows.json").write_text(json.dumps(record, indent=1))
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"done at {time.monotonic() - check_gpu.started:.0f} s")
    ranking(times)
    wrong = [row for row in rows.rows if not row["passed"]]
    print(f"{len(times)} of {len(jobs)} configs timed, {len(rows.rows)} checks, {len(wrong)} wrong")
    for row in wrong:
        print(f"  {row['check']}: {row['detail']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
