"""Compile every Pallas kernel for TPUs that are not there, and say which fail and what the others take.

    python tools/tpu_aot.py --out tpu_aot.json

Needs libtpu. Prints a line per failure and a table, writes every compilation as JSON, and exits with 1 if one failed. Kinds are
shared out to processes. With `--peers` the same of other libraries' kernels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ejkernel.operations import operation_module

DTYPES = ("float32", "bfloat16")
BENCHMARKED = ("bfloat16",)
"""Of benchmark cases: large blocks of float32 take minutes to compile and show nothing more."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--keep", action="store_true", help="keep what the file holds of other operations, kinds and libraries")
    parser.add_argument("--operation", action="append", default=[], help="only this operation (repeatable)")
    parser.add_argument("--kind", action="append", default=[], help="only this kind, as v6e (repeatable)")
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        help="only this dtype (repeatable); without, float32 and bfloat16, and bfloat16 alone for benchmarks",
    )
    parser.add_argument("--case", action="append", default=[], help="only this case (repeatable)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--quick", action="store_true", help="only cases for transforms and benchmarks")
    parser.add_argument("--bench", action="store_true", help="only benchmark cases")
    parser.add_argument("--peers", action="store_true", help="other libraries' kernels instead, on benchmark cases")
    parser.add_argument(
        "--space", action="store_true", help="every config of the search space, on benchmark and representative cases"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Not the user's tuned configs.
        os.environ.update(EJKERNEL_CACHE_DIR=folder, JAX_PLATFORMS="cpu")
        return _compile_all(arguments)


def _compile_all(arguments: argparse.Namespace) -> int:
    from ejkernel.testing.problem import operations_of
    from ejkernel_pallas import _ahead_of_time as aot

    if reason := aot.unavailable():
        print(reason)
        return 2
    started = time.perf_counter()
    operations = arguments.operation or operations_of(aot.PLATFORM)
    parts = [(operation, kind) for operation in operations for kind in arguments.kind or aot.TOPOLOGIES]
    kept = _kept(arguments, parts) if arguments.keep else []
    rows: list[aot.Row] = []
    # Each with a fresh interpreter: libtpu reads what it shall list only once.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        for future in concurrent.futures.as_completed([pool.submit(_compile_part, arguments, *part) for part in parts]):
            found = future.result()
            rows += found
            for operation, kind in {(row.operation, row.kind) for row in found}:
                print(f"{time.perf_counter() - started:5.0f} s: {operation} for {kind}, {len(found)}", flush=True)
            for problem in filter(None, (row.problem() for row in found)):
                print(problem, flush=True)
            if arguments.out:  # after every part: a run takes long
                arguments.out.write_text(_document([*kept, *map(_short, rows)]))
    failed = sum(row.problem() is not None for row in rows)
    print(*aot.summary(rows), sep="\n")
    print(f"{len(rows)} tried, {failed} failed, {time.perf_counter() - started:.0f} s")
    return 1 if failed or not rows else 0


def _compile_part(arguments: argparse.Namespace, operation: str, kind: str) -> list[Any]:
    """The rows of one operation and kind, in a process of its own."""
    from ejkernel_pallas import _ahead_of_time as aot, _listings

    with tempfile.TemporaryDirectory() as folder:
        _listings.request_listings(Path(folder))
        cases, rows = _cases(operation, arguments), []
        benchmarks = [case for case in cases if case.is_benchmark]
        for some, dtypes in ((benchmarks, BENCHMARKED), ([case for case in cases if case not in benchmarks], DTYPES)):
            dtypes = arguments.dtype or dtypes
            if arguments.peers:
                import tpu_peers

                rows += tpu_peers.compiled(operation, some, dtypes, kind, listings=Path(folder))
            else:
                rows += aot.compiled(operation, some, dtypes, [kind], space=arguments.space, listings=Path(folder))
        return rows


def _kept(arguments: argparse.Namespace, parts: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Rows of the file that are not made anew."""
    if arguments.out is None or not arguments.out.exists():
        return []
    rows = json.loads(arguments.out.read_text())["rows"]
    return [row for row in rows if (row["operation"], row["kind"]) not in parts or ("peer" in row) != arguments.peers]


def _document(rows: list[dict[str, Any]]) -> str:
    """A row to a line, in one order whichever part came first."""
    names = ("operation", "kind", "case", "dtype", "phase", "peer", "config")
    rows = sorted(rows, key=lambda row: [row.get(name, "") for name in names])
    versions = {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
    head = {"schema": 2, "versions": versions, "failed": sum("failed" in row and not row.get("peer") for row in rows)}
    lines = ",\n".join(json.dumps(row) for row in rows)
    return json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n"


def _short(row: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(row).items() if value not in ("", None, {})}


def _cases(operation: str, arguments: argparse.Namespace) -> list[Any]:
    from ejkernel.testing.problem import representative

    every = operation_module(operation, "cases").CASES
    if arguments.case:
        return [case for case in every if case.name in arguments.case]
    benchmarks = [case for case in every if "bench" in case.tags]
    if arguments.bench or arguments.peers:
        return benchmarks
    if arguments.quick or arguments.space:
        return [*representative(operation), *benchmarks]
    return list(every)


if __name__ == "__main__":
    raise SystemExit(main())
