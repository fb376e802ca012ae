"""Recurrences by default dispatch beside jax-linear-attention on a real GPU: device times, memory, and single steps.

    python tests/device/recurrence_sweep.py --out results
    python tests/device/recurrence_sweep.py --only decode --out results

Forward, and forward with backward in one program, of each family over a star of shapes around B1 T8192 H32 D128, in bfloat16:
device time by JAX's profiler, and the temporary bytes of the compiled programs. On one shape of each family both are compared
with our XLA in float32. `decode` is one token with a state: time, and bytes of state read and written beside a copy that is
measured here, beside jax-linear-attention and the textbook's update in plain JAX.

`x time` and `x mem` are peer / ours: above 1 we are ahead. Programs are lowered by `--threads` threads while others are timed,
and compiled between timings, because XLA times kernels when it compiles. Prints a table, writes `recurrence_sweep.json` or
`recurrence_decode.json` under `--out` (or `$OUT`), exits with 1 if a number of ours is wrong.

`--only` families, comma separated (default: all but decode), or decode; `--cases` a regular expression for lines of the table;
`--turns` a file that processes share which run at once, one for each family: they compile beside each other, and time in turns;
`--budget` seconds after which nothing new is started; `--small` tries the script without a GPU, by wall time.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import functools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from delta_rule import Report, distances
from recurrence_problems import CHECKED, FAMILIES, SHAPES, SMALL, SMALL_STEPS, STEPS, SWEPT, Family, Shape

import ejkernel
from ejkernel_bench._clock import DeviceClock
from ejkernel_bench._program import Program

RUNS = 5
TOLERANCE = {"forward": 1e-2, "both": 2e-2, "step": 1e-2}
CACHED = 256 * 2**20
"""Bytes of states that steps rotate over, more than any cache holds."""


class Job(NamedTuple):
    """One line of the table."""

    family: str
    shape: Shape
    phase: str
    check: bool = False

    @property
    def name(self) -> str:
        return f"{self.family} {self.shape} {self.phase}"

    @property
    def recurrence(self) -> Family:
        return FAMILIES[self.family]


def swept(families: list[str], small: bool) -> Iterator[Job]:
    """The first shapes of all families before the second."""
    shapes = SMALL if small else SHAPES
    most = len(shapes) + (0 if small else max(len(FAMILIES[name].more) for name in families))
    for index in range(most):
        for name in families:
            own = (*shapes, *(() if small else FAMILIES[name].more))
            if index < len(own):
                check = own[index] == CHECKED or small
                yield from (Job(name, own[index], phase, check) for phase in ("forward", "both"))


def steps(small: bool) -> Iterator[Job]:
    for shape in SMALL_STEPS if small else STEPS:
        yield from (Job(name, shape, "step", True) for name in FAMILIES)


def with_gradients(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Also those of all floating arrays, in one program."""

    def both(arrays: Any, cotangent: Any) -> Any:
        moving = {name: array for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)}
        out, pull = jax.vjp(lambda moving: function({**arrays, **moving}), moving)
        return out, pull(cotangent)[0]

    return both


def candidates(job: Job) -> dict[str, Callable[..., Any]]:
    """Functions of the arrays, and of the cotangent where gradients are wanted, by label."""
    family, step = job.recurrence, job.phase == "step"
    found: dict[str, Callable[..., Any]] = {"ours": family.ours}
    if family.peer is not None:
        found["jla"] = family.peer
    if step:
        found["jax"] = family.step
    exact = family.step if step else functools.partial(family.ours, platform="xla")
    if job.phase == "both":
        found, exact = {label: with_gradients(one) for label, one in found.items()}, with_gradients(exact)
    return {**found, "exact": lambda *given: exact(*_wide(given))} if job.check else found


def _wide(values: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, values)


@functools.cache
def result_of(family: str, shape: Shape) -> Any:
    """Shape and dtype; XLA's form compiles nothing when it is traced."""
    function = functools.partial(FAMILIES[family].ours, platform="xla")
    return jax.tree.leaves(jax.eval_shape(lambda: function(FAMILIES[family].make(shape))))[0]


def data(job: Job) -> tuple[Any, Any]:
    """The arrays, and a cotangent for the result."""
    arrays, out = job.recurrence.make(job.shape), result_of(job.family, job.shape)
    return arrays, jax.random.normal(jax.random.key(1), out.shape, jnp.bfloat16).astype(out.dtype)


def given_to(job: Job, label: str, made: tuple[Any, Any]) -> tuple[Any, ...]:
    arrays, cotangent = made
    arrays = job.recurrence.for_peer(arrays) if label == "jla" else arrays
    return (arrays, cotangent) if job.phase == "both" else (arrays,)


def lowered(job: Job, label: str, function: Callable[..., Any]) -> Any:
    """Traced and lowered for arrays that are not there yet; an exception as a finding."""
    try:
        return jax.jit(function).lower(*jax.eval_shape(lambda: given_to(job, label, data(job))))
    except Exception as error:  # noqa: BLE001 - what does not lower is a finding
        return error


def compiled(given: Any) -> Any:
    if isinstance(given, Exception):
        return given
    try:
        return given.compile()
    except Exception as error:  # noqa: BLE001 - what does not compile is a finding
        return error


def samples(program: Any, sets: list[tuple[Any, ...]]) -> list[float]:
    """Milliseconds on the device; wall time where there is no device."""
    if jax.default_backend() != "gpu":
        return [_wall(program, given) for given in sets]
    for _ in range(2):
        clock = DeviceClock("gpu")
        if taken := clock.samples(Program(program, sets, lambda found: {}), 0):
            return [1e3 * one for one in taken]
    raise RuntimeError(clock.reason or "runs of one program were not alike")


def _wall(program: Any, given: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*given))
    return 1e3 * (time.perf_counter() - start)


def rotated(given: tuple[Any, ...], phase: str) -> list[tuple[Any, ...]]:
    """Arguments of each run; steps have their own state each time."""
    if phase != "step":
        return [given] * RUNS
    (arrays,) = given
    name = next(name for name in ("initial_state", "state") if name in arrays)
    state = arrays[name]
    count = min(max(CACHED // state.nbytes, RUNS), 64)
    return [({**arrays, name: state + 0},) for _ in range(count)]


def leaves(found: Any) -> dict[str, Any]:
    """Arrays by name, with axes of length 1 that one of two forms may lack removed."""
    named = jax.tree_util.tree_leaves_with_path(found)
    return {jax.tree_util.keystr(path): jnp.squeeze(array) for path, array in named}


def errors_of(job: Job, label: str, got: Any, exact: Any) -> dict[str, float]:
    """Relative errors in the norm; where the exact result is 0 there is none."""
    if label == "jla" and job.phase == "step" and job.recurrence.swapped:
        got = got[0], jnp.swapaxes(got[1], -1, -2)
    got, exact = leaves(got), leaves(exact)
    nonzero = {key: array for key, array in exact.items() if float(jnp.abs(array).max()) > 0}
    return {key: float(value) for key, value in distances({key: got[key] for key in nonzero}, nonzero).items()}


def measured(report: Report, job: Job, label: str, program: Any, given: tuple[Any, ...], exact: Any) -> dict[str, Any]:
    """Of one candidate; a failure is written down and the others go on."""
    try:
        if isinstance(program, Exception):
            raise program
        found: dict[str, Any] = {}
        if exact is not None:
            found["errors"] = errors_of(job, label, program(*given), exact)
            found["error"] = max(found["errors"].values())
            if label == "ours":
                detail = " ".join(f"{key} {error:.1e}" for key, error in found["errors"].items())
                report.check(job.name, all(error < TOLERANCE[job.phase] for error in found["errors"].values()), detail)
        taken = samples(program, rotated(given, job.phase))
        return {
            **found,
            "milliseconds": statistics.median(taken),
            "spread": (max(taken) - min(taken)) / statistics.median(taken),
            "temporary_bytes": getattr(program.memory_analysis(), "temp_size_in_bytes", None),
        }
    except Exception as error:  # noqa: BLE001 - the others are measured all the same
        text = f"{type(error).__name__}: {str(error)[:300]}"
        if label == "ours":
            report.check(f"{job.name} {label}", False, text)
        return {"failed": text}


def chosen(job: Job) -> dict[str, str]:
    """Which implementation the default takes, by phase."""
    arrays = jax.eval_shape(lambda: job.recurrence.make(job.shape))
    explained = ejkernel.explain(job.recurrence.function, **arrays, **job.recurrence.settings(arrays))
    phases = ("forward", "backward") if job.phase == "both" else ("forward",)
    return {phase: getattr(explained, phase).to_dict()["chosen"] for phase in phases}


@functools.cache
def copied(count: int) -> float:
    """Milliseconds of a program that reads float32 numbers and writes as many."""
    sets = [(jnp.full(count, float(index)),) for index in range(min(max(CACHED // (4 * count), RUNS), 64))]
    program = jax.jit(lambda x: -x).lower(*sets[0]).compile()
    return statistics.median(samples(program, sets))


def state_numbers(job: Job) -> int:
    arrays = jax.eval_shape(lambda: job.recurrence.make(job.shape))
    return next(arrays[name].size for name in ("initial_state", "state") if name in arrays)


def exact_of(report: Report, job: Job, program: Any, given: tuple[Any, ...]) -> Any:
    """What is right; None where it could not be computed."""
    try:
        if isinstance(program, Exception):
            raise program
        return jax.block_until_ready(program(*given))
    except Exception as error:  # noqa: BLE001 - times are taken all the same
        report.check(f"{job.name} exact", False, f"{type(error).__name__}: {str(error)[:300]}")
        return None


def row_of(report: Report, job: Job, programs: dict[str, Any], made: tuple[Any, Any]) -> dict[str, Any]:
    given = {label: given_to(job, label, made) for label in programs}
    exact = exact_of(report, job, programs["exact"], given["exact"]) if job.check else None
    row: dict[str, Any] = {
        "case": job.name,
        "family": job.family,
        "function": job.recurrence.function,
        "shape": job.shape._asdict(),
        "phase": job.phase,
        "chosen": chosen(job),
    }
    for label, program in programs.items():
        if label != "exact":
            row[label] = measured(report, job, label, program, given[label], exact)
    for name, key in (("time", "milliseconds"), ("memory", "temporary_bytes")):
        ours, theirs = row["ours"].get(key), row.get("jla", {}).get(key)
        row[f"{name}_ratio"] = theirs / ours if ours and theirs else None
    if job.phase == "step":
        count = state_numbers(job)
        row["state_bytes"] = 8 * count
        row["copy_milliseconds"] = copied(count)
        if "milliseconds" in row["ours"]:
            row["bytes_per_s"] = 8e3 * count / row["ours"]["milliseconds"]
            row["fraction"] = row["bytes_per_s"] / report.result["bytes_per_s"]
    return row


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return f"{'-':>17s}"
    if "failed" in found:
        return f"{'failed':>17s}"
    return f"{found['milliseconds']:8.4f} {(found['temporary_bytes'] or 0) / 2**20:8.1f}"


def _number(value: float | None, width: int = 6) -> str:
    return f"{'-':>{width}s}" if value is None else f"{value:{width}.2f}"


HEADINGS = {
    "sweep": f"{'case':44s} {'ours ms':>8s} {'MiB':>8s} {'jla ms':>8s} {'MiB':>8s} x time  x mem  error  by",
    "decode": f"{'case':36s} {'ours ms':>8s} {'MiB':>8s} {'jla ms':>8s} {'jax ms':>8s} {'copy ms':>8s}  frac x time  error  by",
}


def line_of(row: dict[str, Any]) -> str:
    by = "/".join(dict.fromkeys(name or "none" for name in row["chosen"].values()))
    error = f"{row['ours']['error']:.0e}" if "error" in row["ours"] else "-"
    if row["phase"] != "step":
        ratios = f"{_number(row['time_ratio'])} {_number(row['memory_ratio'])}"
        return f"{row['case']:44s} {_cell(row['ours'])} {_cell(row.get('jla'))} {ratios} {error:>6s}  {by}"
    times = " ".join(f"{_milliseconds(row.get(label)):>8s}" for label in ("jla", "jax"))
    ratios = f"{_number(row.get('fraction'), 5)} {_number(row['time_ratio'])}"
    return f"{row['case']:36s} {_cell(row['ours'])} {times} {row['copy_milliseconds']:8.4f} {ratios} {error:>6s}  {by}"


def _milliseconds(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['milliseconds']:.4f}" if "milliseconds" in found else "failed"


def failures(row: dict[str, Any]) -> Iterator[str]:
    for label in ("ours", "jla", "jax"):
        if "failed" in row.get(label, {}):
            yield f"    {label}: {row[label]['failed'][:200]}"
        elif row.get(label, {}).get("error", 0.0) > TOLERANCE[row["phase"]]:
            yield f"    {label}: error {row[label]['error']:.1e}"


def run(report: Report, jobs: list[Job], options: argparse.Namespace) -> None:
    """In waves: lowered ahead of time, compiled together, then run one by one with nothing beside them."""
    with concurrent.futures.ThreadPoolExecutor(options.threads) as lowering:
        futures: dict[tuple[Any, str], Any] = {}
        for job in jobs:
            for label, function in candidates(job).items():
                futures[job, label] = lowering.submit(lowered, job, label, function)
        for first in range(0, len(jobs), options.wave):
            wave = jobs[first : first + options.wave]
            given = {key: future for key, future in futures.items() if key[0] in wave}
            if not finished(list(given.values()), report):
                break
            makers = {(job.family, job.shape): jax.jit(functools.partial(data, job)).lower() for job in wave}
            with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
                programs = dict(zip(given, pool.map(compiled, [future.result() for future in given.values()]), strict=True))
                makers = dict(zip(makers, pool.map(compiled, makers.values()), strict=True))
            print(f"  compiled {len(programs)} programs at {time.monotonic() - report.started:.0f} s", flush=True)
            with turn(options.turns):
                time_wave(report, wave, programs, makers)
            for key in given:
                del futures[key]
        lowering.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def turn(path: str) -> Iterator[None]:
    """While no other process that names the file has its turn."""
    with open(path or os.devnull, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if path else fcntl.LOCK_UN)
        yield


def time_wave(report: Report, wave: list[Job], programs: dict[tuple[Any, str], Any], makers: dict[Any, Any]) -> None:
    held, made = None, (None, None)
    for job in wave:
        if report.remaining() < 0:
            return
        try:
            if held != (job.family, job.shape):
                held, made = None, (None, None)  # before others take their place
                made = jax.block_until_ready(makers[job.family, job.shape]())
                held = job.family, job.shape
            own = {label: program for (one, label), program in programs.items() if one == job}
            row = row_of(report, job, own, made)
        except Exception as error:  # noqa: BLE001 - the other lines are measured all the same
            report.check(job.name, False, f"{type(error).__name__}: {str(error)[:300]}")
            continue
        report.result["times"].append(row)
        print("\n".join((line_of(row), *failures(row))), flush=True)
        report.save()


def finished(futures: list[Any], report: Report) -> bool:
    """Waits, as long as there is time."""
    done = concurrent.futures.wait(futures, timeout=max(report.remaining(), 0))
    return not done.not_done and report.remaining() > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of recurrence_sweep.json")
    parser.add_argument("--only", default=",".join(SWEPT))
    parser.add_argument("--cases", default="")
    parser.add_argument("--budget", type=float, default=280)
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--wave", type=int, default=14, help="lines that are compiled together")
    parser.add_argument("--turns", default="")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if jax.default_backend() != "gpu" and not options.small:
        print(f"needs a GPU, JAX has {jax.devices()}; --small does without")
        return 2
    decode = options.only == "decode"
    report = Report(options.out, options.budget, "recurrence_decode" if decode else "recurrence_sweep")
    print(json.dumps(report.result["versions"]), flush=True)
    made = steps(options.small) if decode else swept(options.only.split(","), options.small)
    jobs = [job for job in made if re.search(options.cases, job.name)]
    if decode:
        count = 2**16 if options.small else 2**28
        report.result["bytes_per_s"] = 8e3 * count / copied(count)
        print(f"copy of {count * 4 >> 20} MiB: {report.result['bytes_per_s'] / 1e12:.2f} TB/s", flush=True)
    print(HEADINGS["decode" if decode else "sweep"], flush=True)
    run(report, jobs, options)
    report.save()
    wrong = [row for row in report.result["numbers"] if not row["passed"]]
    print(f"{len(report.result['times'])} of {len(jobs)} lines, {len(wrong)} wrong; {time.monotonic() - report.started:.0f} s")
    sys.stdout.flush()
    os._exit(1 if wrong else 0)  # threads that still lower are not waited for


if __name__ == "__main__":
    sys.exit(main())
