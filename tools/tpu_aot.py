"""Compile every Pallas kernel for TPUs that are not there, and say which fail and what the others take.

    python tools/tpu_aot.py --out tpu_aot.json

Needs libtpu. Prints a line per failure and a table, writes every compilation as JSON, and exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--operation", action="append", default=[], help="only this operation (repeatable)")
    parser.add_argument("--kind", action="append", default=[], help="only this kind, as v6e (repeatable)")
    parser.add_argument("--dtype", action="append", default=[], help="only this dtype (repeatable)")
    parser.add_argument("--case", action="append", default=[], help="only this case (repeatable)")
    parser.add_argument("--no-vmem", action="store_true", help="do not measure VMEM, which takes several compilations more")
    parser.add_argument("--quick", action="store_true", help="only cases for transforms and benchmarks")
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
    rows: list[aot.Row] = []
    for operation in arguments.operation or operations_of(aot.PLATFORM):
        before = len(rows)
        dtypes, kinds = arguments.dtype or DTYPES, arguments.kind or aot.TOPOLOGIES
        measure = not (arguments.no_vmem or arguments.space)
        cases = _cases(operation, arguments)
        for row in aot.compiled(operation, cases, dtypes, kinds, space=arguments.space, measure=measure):
            rows.append(row)
            if arguments.out:  # after every row: a run takes long
                arguments.out.write_text(json.dumps(_record(rows), indent=1) + "\n")
            if problem := row.problem():
                print(problem, flush=True)
        print(f"{operation}: {len(rows) - before} tried", flush=True)
    print(*aot.summary(rows), sep="\n")
    failed = sum(bool(row.failed) for row in rows)
    print(f"{len(rows)} tried, {failed} failed")
    return 1 if failed or not rows else 0


def _record(rows: list[Any]) -> dict[str, Any]:
    versions = {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
    failed = sum(bool(row.failed) for row in rows)
    return {"schema": 1, "versions": versions, "failed": failed, "rows": [_short(row) for row in rows]}


def _short(row: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(row).items() if value not in ("", None, {})}


def _cases(operation: str, arguments: argparse.Namespace) -> list[Any]:
    from ejkernel.testing.problem import representative

    every = importlib.import_module(f"ejkernel.operations.{operation}.cases").CASES
    if arguments.case:
        return [case for case in every if case.name in arguments.case]
    if arguments.quick or arguments.space:
        return [*representative(operation), *(case for case in every if "bench" in case.tags)]
    return list(every)


if __name__ == "__main__":
    raise SystemExit(main())
