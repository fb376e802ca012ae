"""Compile every Triton kernel for GPUs that are not there, and check registers and shared memory.

    python tools/triton_aot.py --out triton_aot.json

Prints a line per kernel, writes every compilation as JSON, and exits with 1 if one is beyond the limits. All of them take two
processes about 40 minutes; what was changed can be compiled anew with `--keep`, `--operation` and `--capability`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

from ejkernel.operations import operation_module

DTYPES = ("float32", "bfloat16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--keep", action="store_true", help="keep what the file holds of other operations and capabilities")
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

    parts = [
        (operation, capability)
        for operation in arguments.operation or operations_of(aot.PLATFORM)
        for capability in arguments.capability or aot.CAPABILITIES
    ]
    document = _Document(arguments.out, parts if arguments.keep else None)
    rows: list[aot.Row] = []
    problems: list[str] = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        for part, (found, failure) in zip(parts, pool.map(_compile_part, parts, [arguments] * len(parts)), strict=True):
            beyond = [*([failure] if failure else []), *(problem for row in found if (problem := row.problem()))]
            rows += found
            problems += beyond
            document.add(part, found, beyond)  # after every part: a run takes long
            print(f"{part[0]} for sm_{part[1]}: {len(found)} compiled", flush=True)
    print(*aot.summary(rows), *problems, sep="\n")
    print(f"{len(rows)} compiled, {len(problems)} beyond the limits")
    return 1 if problems or not rows else 0


class _Document:
    """The file: what is beyond the limits, by operation and capability, and a line per compilation, with its tile alone."""

    COLUMNS = (
        "operation", "capability", "case", "dtype", "config", "kernel", "tile", "num_warps", "num_stages", "registers", "stack",
        "shared", "spilling",
    )  # fmt: skip

    def __init__(self, path: Path | None, anew: list[tuple[str, int]] | None) -> None:
        """anew: the parts that are compiled anew, where the others are kept."""
        self.path = path
        kept = json.loads(path.read_text()) if path and anew is not None and path.exists() else {}
        self.problems, self.rows = (
            [line for line in kept.get(name, ()) if tuple(line[:2]) not in (anew or ())] for name in ("problems", "rows")
        )

    def add(self, part: tuple[str, int], rows: list[Any], problems: list[str]) -> None:
        from ejkernel_triton._versions import installed

        self.problems += [[*part, problem] for problem in problems]
        self.rows += map(self._line, rows)
        if self.path is None:
            return
        head = {"schema": 2, "versions": installed(), "problems": sorted(self.problems), "columns": self.COLUMNS}
        lines = ",\n".join(json.dumps(line) for line in sorted(self.rows))
        self.path.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n")

    def _line(self, row: Any) -> list[Any]:
        sizes = {name: size for name, size in row.constants.items() if name.startswith(("BLOCK", "CHUNK", "ROWS"))}
        tile = " ".join(f"{name}={size}" for name, size in sizes.items())
        values = {**dataclasses.asdict(row), "tile": tile, "spilling": round(row.spilling, 3)}
        return [values[name] for name in self.COLUMNS]


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

    every = operation_module(operation, "cases").CASES
    if arguments.quick:
        return list(representative(operation))
    if arguments.space:
        return [*representative(operation), *(case for case in every if "bench" in case.tags)]
    return list(every)


if __name__ == "__main__":
    raise SystemExit(main())
