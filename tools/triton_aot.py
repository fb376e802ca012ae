"""Compile every Triton kernel for GPUs that are not there, and check registers and shared memory.

    python tools/triton_aot.py --out triton_aot.json

Prints a line per kernel, writes every compilation as JSON, and exits with 1 if one is beyond the limits.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--operation", action="append", default=[], help="only this operation (repeatable)")
    parser.add_argument("--capability", action="append", type=int, default=[], help="only this one, as 90 (repeatable)")
    parser.add_argument("--dtype", action="append", default=[], help="only this dtype (repeatable)")
    parser.add_argument("--quick", action="store_true", help="only the cases that transforms are tried on")
    parser.add_argument(
        "--space", action="store_true", help="every config of the search space, on benchmark and representative cases"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Neither the user's tuned configs nor what Triton compiled for somebody else.
        os.environ.update(EJKERNEL_CACHE_DIR=folder, TRITON_CACHE_DIR=folder)
        return _compile_all(arguments)


def _compile_all(arguments: argparse.Namespace) -> int:
    from ejkernel.testing.problem import operations_of
    from ejkernel_triton import _ahead_of_time as aot
    from ejkernel_triton._versions import installed

    rows: list[aot.Row] = []
    problems: list[str] = []
    parts = [
        (operation, capability)
        for operation in arguments.operation or operations_of(aot.PLATFORM)
        for capability in arguments.capability or aot.CAPABILITIES
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        for part, (found, failure) in zip(parts, pool.map(_compile_part, parts, [arguments] * len(parts)), strict=True):
            rows += found
            problems += [failure] if failure else []
            problems += [problem for row in found if (problem := row.problem())]
            print(f"{part[0]} for sm_{part[1]}: {len(found)} compiled", flush=True)
    print(*aot.summary(rows), *problems, sep="\n")
    if arguments.out:
        record = {"schema": 1, "versions": installed(), "problems": problems, "rows": [dataclasses.asdict(row) for row in rows]}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(rows)} compiled, {len(problems)} beyond the limits")
    return 1 if problems or not rows else 0


def _compile_part(part: tuple[str, int], arguments: argparse.Namespace) -> tuple[list[Any], str]:
    """What one operation launches on one kind of device, and what went wrong, in a process of its own."""
    from ejkernel_triton import _ahead_of_time as aot

    operation, capability = part
    rows: list[Any] = []
    try:
        cases, dtypes = _cases(operation, arguments), arguments.dtype or DTYPES
        rows.extend(aot.compiled(operation, cases, dtypes, (capability,), space=arguments.space))
    except Exception as error:  # noqa: BLE001 - what cannot be compiled is a finding, and the other operations are looked at
        return (
            rows,
            f"{operation} for sm_{capability}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        )
    return rows, ""


def _cases(operation: str, arguments: argparse.Namespace) -> list[Any]:
    from ejkernel.testing.problem import representative

    every = importlib.import_module(f"ejkernel.operations.{operation}.cases").CASES
    if arguments.quick:
        return list(representative(operation))
    if arguments.space:
        return [*representative(operation), *(case for case in every if "bench" in case.tags)]
    return list(every)


if __name__ == "__main__":
    raise SystemExit(main())
