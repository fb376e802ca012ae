"""Every implementation over a grid of shapes of every operation, and where the default order does not choose the fastest.

    python tests/device/orders.py --out results --only attention,pages

Problems are those of `order_areas.py`, by turns of their grids, and some between them that `--seed` draws, which is printed. Each
implementation that takes a call is compared with the chosen one's numbers and timed by turns with the others: by JAX's profiler,
and calls of less than 50 us also by the clock of a host that repeats them, which counts gaps between kernels and its own time.
Inputs that fit stay in the L2 cache. Marks a line where another is faster by more than `--margin` and a microsecond, writes
`orders.json` under `--out` (or `$OUT`) after each problem, exits with 1 if numbers differ. `tools/default_order.py` reads it, and
so does `tests/test_order_records.py` those in benchmarks/results.

`--only` areas or public functions; `--cases` a regular expression for names; `--done` records whose problems are left out; `--more`
drawn problems of each grid; `--budget` seconds, after which nothing is started; `--threads` that compile, while nothing is timed;
`--small` small problems on a CPU, Triton in its interpreter; `--lower` times nothing, but lowers what a GPU would run, which need
not be here.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

if "--small" in sys.argv:
    os.environ["EJKERNEL_TRITON_INTERPRET"] = "1"

import jax
from delta_rule import Report
from order_areas import AREAS, problems
from order_grid import Problem
from order_trial import NAMES, Trial, milliseconds_of, with_host

import ejkernel

TOLERANCE = 2e-2
"""Of the norm of the chosen implementation's results: two roundings to bfloat16, and weights in bfloat16."""
AMPLIFIED = {"newton_schulz": 5e-2}
"""By function: each step rounds, and the next multiplies small singular values by up to 3.4445."""
SCHEMA = "ejkernel-orders-1"
"""Which `tools/default_order.py` reads."""
TARGET = "gpu:9.0:NVIDIA H200"
SHORT, SLACK = 0.05, 0.001
"""Milliseconds: calls that are timed with the host too, and what no two times are told apart by."""

PATIENCE = 60
"""Seconds that a batch is compiled for; what takes longer has no times."""
SILENT = 5
"""Calls that fail on every implementation, one after the other."""


def trials_of(wanted: Iterable[tuple[Problem, str]], threads: int, clear: Any) -> Iterator[list[Trial]]:
    """Batches of problems in a phase whose programs keep the threads busy, of those that more than one implementation takes."""
    batch: list[Trial] = []
    for problem, phase in wanted:
        if clear() < 0:
            return
        trial = Trial(problem, phase)
        if len(trial.names) < 2:
            print(f"  {problem.function} {problem.name} {phase}: {', '.join(trial.names) or trial.refusal}", flush=True)
            continue
        batch.append(trial)
        if sum(len(one.programs) for one in batch) >= 2 * threads:
            yield batch
            batch = []
    if batch:
        yield batch


def compile_all(batch: list[Trial], threads: int, seconds: float) -> None:
    """What is not compiled in time has an error in place of a program."""
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    futures = [pool.submit(program.compile) for trial in batch for program in trial.programs.values()]
    concurrent.futures.wait(futures, timeout=min(max(seconds, 1), PATIENCE))
    pool.shutdown(wait=False, cancel_futures=True)


def measure(report: Report, trial: Trial, margin: float) -> bool:
    """Whether anything ran."""
    label = report.result["last"] = f"{trial.problem.function} {trial.problem.name} {trial.phase}"
    report.save()  # with the name of what may never end
    deviations, failed = trial.run()
    tolerance = AMPLIFIED.get(trial.problem.function, TOLERANCE)
    wrong = {name: f"{error:.1e}" for name, error in deviations.items() if error >= tolerance}
    for name, why in (wrong | failed).items():
        report.check(f"{label} {name}", False, why)
    times = milliseconds_of({name: trial.calls[name] for name in deviations})
    short = [name for name, taken in times.items() if taken < SHORT and trial.phase != "both"]
    hosted = {name: with_host(trial.calls[name][-1]) for name in short}
    row = {**trial.problem.row(trial.phase), "operation": trial.operation, "chosen": trial.chosen, "milliseconds": times}
    row |= {"with_host": hosted, "deviations": deviations, "failed": failed}
    report.result["times"].append(row)
    trial.forget()
    best = min(times, key=lambda name: times[name], default=trial.chosen)
    slower = trial.chosen in times and times[trial.chosen] > (1 + margin) * times[best] + SLACK
    if slower:
        ratio = times[trial.chosen] / times[best]
        report.result["slower"].append([trial.problem.function, trial.problem.name, trial.phase, trial.chosen, best, ratio])
    listed = ", ".join(
        f"{name} {taken:.4f}{f' ({hosted[name]:.4f})' if name in hosted else ''}" for name, taken in times.items()
    )
    print(f"{'!' if slower else ' '} {time.monotonic() - report.started:4.0f} s {label:64s} {listed}", flush=True)
    return bool(times)


def lowered(wanted: list[tuple[Problem, str]]) -> int:
    """Lower every program for a GPU; how many cannot be. Triton's kernels are then compiled, and kept as for that GPU."""
    wrong = 0
    with ejkernel.use(target=TARGET):
        for problem, phase in wanted:
            trial = Trial(problem, phase)
            for name, program in trial.programs.items():
                if (why := program.lowered()) is not None:
                    wrong += 1
                    print(f"  {problem.function} {problem.name} {phase} {name}: {why}", flush=True)
            print(f"{problem.function} {problem.name} {phase}: {', '.join(trial.names) or trial.refusal}", flush=True)
    return wrong


def selected(options: argparse.Namespace) -> list[tuple[Problem, str]]:
    """Problems and phases that are asked for and not measured before."""
    only = options.only.split(",") if options.only else [*AREAS]
    areas = [name for name in only if name in AREAS]
    functions = {name for name in only if name not in AREAS}
    found = problems(areas or [*AREAS], options.seed, options.more, small=options.small)
    if functions:
        found = [
            one for one in problems([*AREAS], options.seed, options.more, small=options.small) if one.function in functions
        ] + (found if areas else [])
    records = [json.loads(pathlib.Path(path).read_text()) for path in options.done]
    known = {(row["function"], row["problem"], row["phase"]) for record in records for row in record["times"]}
    return [
        (one, phase)
        for one in found
        for phase in one.phases
        if (one.function, one.name, phase) not in known and re.search(options.cases, f"{one.function} {one.name} {phase}")
    ]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of orders.json")
    parser.add_argument("--only", default="", help=f"of {','.join(AREAS)} or functions")
    parser.add_argument("--cases", default="")
    parser.add_argument("--done", nargs="*", default=[])
    parser.add_argument("--more", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--budget", type=float, default=200)
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--margin", type=float, default=0.05)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--lower", action="store_true")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    print(f"--seed {options.seed}", flush=True)
    wanted = selected(options)
    if options.lower:
        return 1 if lowered(wanted) else 0
    if jax.default_backend() != "gpu" and not options.small:
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    report = Report(options.out, options.budget, "orders")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report.result |= {"schema": SCHEMA, "date": now, "seed": options.seed, "what": NAMES, "slower": []}
    silent = 0
    for batch in trials_of(wanted, options.threads, report.remaining):
        compile_all(batch, options.threads, report.remaining())
        print(f"{sum(len(one.programs) for one in batch)} programs at {time.monotonic() - report.started:.0f} s", flush=True)
        for trial in batch:
            if report.remaining() < 0 or silent == SILENT:
                break
            silent = 0 if measure(report, trial, options.margin) else silent + 1
            report.save()
        if silent == SILENT:
            print(f"stopped: the last {SILENT} calls all failed, as after an error of the device", flush=True)
            break
    report.save()
    rows, slower = report.result["times"], report.result["slower"]
    print(f"{len(rows)} of {len(wanted)} calls, default slower in {len(slower)}:")
    for function, name, phase, chosen, best, ratio in sorted(slower, key=lambda row: -row[-1]):
        print(f"  {function} {name} {phase}: {chosen}, {best} is {ratio:.2f} times as fast")
    return 1 if any(not row["passed"] for row in report.result["numbers"]) else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a compiler that is not done is not waited for
