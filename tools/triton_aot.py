"""Compile every Triton kernel for GPUs that are not there, and check registers and shared memory.

    python tools/triton_aot.py --out triton_aot.json

Prints a line per kernel, writes every compilation as JSON, and exits with 1 if one is beyond the limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
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
    for operation in arguments.operation or operations_of(aot.PLATFORM):
        before = len(rows)
        try:
            cases = _cases(operation, arguments)
            dtypes, capabilities = arguments.dtype or DTYPES, arguments.capability or aot.CAPABILITIES
            rows.extend(aot.compiled(operation, cases, dtypes, capabilities, space=arguments.space))
        except Exception as error:  # noqa: BLE001 - what cannot be compiled is a finding, and the other operations are looked at
            problems.append(f"{operation}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        problems += [problem for row in rows[before:] if (problem := row.problem())]
        print(f"{operation}: {len(rows) - before} compiled", flush=True)
    print(*aot.summary(rows), *problems, sep="\n")
    if arguments.out:
        record = {"schema": 1, "versions": installed(), "problems": problems, "rows": [dataclasses.asdict(row) for row in rows]}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(rows)} compiled, {len(problems)} beyond the limits")
    return 1 if problems or not rows else 0


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
