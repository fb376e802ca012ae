"""Training steps of `examples/train` on real GPUs: ejkernel beside plain JAX and the best kernels of others.

    python train.py --out FOLDER                    rows of one GPU, most telling first; train.json
    python train.py --out FOLDER --devices 2        rows of two GPUs, and what they are held against on one; train_2.json
    python train.py --record FILE ...               write benchmarks/results/train_*.json of what these found
    python train.py --small --rows llama-125m       try the script on a CPU

Each row is a process of its own, `python -m ejkernel_train --compare`, and is written as it ends. One that would not end within
`--budget` seconds is not begun; `--rows` names those that are left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BUILDS = "plain,peers,ejkernel"

SMALL = "--steps 10 --rounds 23"
LARGE = "--steps 6 --rounds 15"
ONE = {
    "mamba2-125m": f"--model mamba2 --size 125m --batch 2 --length 2048 {SMALL}",
    "moe-125m": f"--model moe --size 125m {SMALL}",
    "llama-125m": f"--model llama --size 125m {SMALL}",
    "hybrid-125m": f"--model hybrid --size 125m --batch 8 {SMALL}",
    "llama-1.3b": f"--model llama --size 1.3b {LARGE}",
    "llama-1.3b-float8": f"--model llama --size 1.3b --float8 {LARGE}",
    "moe-1.3b": f"--model moe --size 1.3b --batch 2 {LARGE}",
    "hybrid-1.3b": f"--model hybrid --size 1.3b --batch 1 {LARGE}",
    "mamba2-125m-8": f"--model mamba2 --size 125m --batch 8 --length 2048 {SMALL}",
    "hybrid-1.3b-4": f"--model hybrid --size 1.3b --batch 4 --remat dots {LARGE}",
}
TWO = {
    "llama-125m": ONE["llama-125m"],
    "llama-125m-fsdp": f"{ONE['llama-125m']} --mesh fsdp=2",
    "moe-125m": ONE["moe-125m"],
    "moe-125m-expert": f"{ONE['moe-125m']} --mesh expert=2",
    "llama-125m-data": f"{ONE['llama-125m']} --mesh data=2",
    "llama-125m-tensor": f"{ONE['llama-125m']} --mesh tensor=2",
}
ROWS = {1: ONE, 2: TWO}
SMALLEST = "--size tiny --batch 2 --length 64 --steps 2 --rounds 2 --dtype float32"
LEAST = 50
"""Seconds that a row takes at least."""


CUBLAS = "--xla_gpu_enable_triton_gemm=false"
"""Products by cuBLAS alone: XLA tries no kernels of its own, of which it has many for float8."""


def environment(asked: str, flags: str = "") -> dict[str, str]:
    """One GPU where the row has no mesh; most of its memory; flags for XLA, with `CUBLAS` where products are float8."""
    given = {"JAX_COMPILATION_CACHE_DIR": "/tmp/jax-cache", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "PYTHONUNBUFFERED": "1"}
    if "--mesh" not in asked:
        given["CUDA_VISIBLE_DEVICES"] = "0"
    if flags := CUBLAS if "--float8" in asked else flags:
        given["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    return {**os.environ, **given}


def commit() -> str | None:
    """As `build_wheels.sh` left it beside the wheels that run here, or of this checkout."""
    left = ROOT / ".whl" / "commit"
    if left.exists():
        return left.read_text().strip()
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def run(name: str, asked: str, builds: str, seconds: float) -> dict[str, Any]:
    """The record of a row, or {"error": ...}."""
    out = Path("/tmp") / f"train-{name}.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "ejkernel_train", "--compare", builds, *asked.split(), "--out", str(out)]
    try:
        process = subprocess.run(command, env=environment(asked), capture_output=True, text=True, timeout=seconds, check=False)
        said, code = process.stdout + process.stderr, process.returncode
    except subprocess.TimeoutExpired as error:
        said, code = str(error), 124
    print("\n".join(line for line in said.splitlines() if not line.startswith("step "))[-3000:], flush=True)
    return json.loads(out.read_text()) if out.exists() else {"error": f"exit code {code}: {said[-1500:]}"}


def measure(arguments: argparse.Namespace) -> int:
    begin, rows = time.monotonic(), ROWS[arguments.devices]
    names = arguments.rows.split(",") if arguments.rows else list(rows)
    if unknown := sorted({*names} - {*rows}):
        print(f"--rows has {', '.join(unknown)}; there are {', '.join(rows)}", file=sys.stderr)
        return 2
    out = Path(arguments.out) / ("train.json" if arguments.devices == 1 else f"train_{arguments.devices}.json")
    if arguments.small:
        rows = {
            name: f"{re.sub('--(size|batch|length|steps|rounds) [^ ]+', '', asked)} {SMALLEST}" for name, asked in rows.items()
        }
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name in names:
        left = arguments.budget - (time.monotonic() - begin)
        if left < LEAST:
            print(f"{name}: not begun, {left:.0f} s are left", flush=True)
            continue
        print(f"== {name}, {arguments.budget - left:.0f} s", flush=True)
        found[name] = {"commit": commit(), **run(name, rows[name], arguments.builds, left)}
        out.write_text(json.dumps(found, indent=1) + "\n")
    missing = [name for name in names if "error" in found.get(name, {"error": "not begun"})]
    print(f"{time.monotonic() - begin:.0f} s; missing: {', '.join(missing) or 'none'}")
    return int(any("error" in record for record in found.values()))


def record(files: list[Path]) -> int:
    """One file for each row; a row of two devices says what one did in the same run."""
    for file in files:
        found = {name: row for name, row in json.loads(file.read_text()).items() if "error" not in row}
        several = any(row["devices"] > 1 for row in found.values())
        for row in found.values():
            config = row["config"]
            if several and row["devices"] == 1:
                continue
            if several:
                row["one_device"] = one_device(row, list(found.values()))
            kind = row["device"].removeprefix("NVIDIA ").split()[0].lower()
            parts = [config["model"], config["size"], "float8" if config["float8"] else "", config["mesh"].split("=")[0]]
            usual = {"mamba2": 2, "hybrid": {"125m": 8, "1.3b": 1}.get(config["size"])}.get(config["model"], config["batch"])
            parts += ["" if config["batch"] == usual else f"batch{config['batch']}", kind]
            path = RESULTS / f"train_{'_'.join(part for part in parts if part)}.json"
            path.write_text(json.dumps(row, indent=1) + "\n")
            print(path.relative_to(ROOT))
    return 0


def one_device(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens per second of each build of the same model on one device, in the same run."""
    alike = [
        other
        for other in rows
        if other["devices"] == 1
        and all(other["config"][key] == row["config"][key] for key in ("model", "size", "batch", "length"))
    ]
    return {build["kernels"]: build["tokens_per_second"] for other in alike for build in other["builds"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--devices", type=int, choices=list(ROWS), default=1)
    parser.add_argument("--rows", default="", help="some of them, in this order")
    parser.add_argument("--builds", default=BUILDS)
    parser.add_argument("--budget", type=float, default=560, help="seconds; a row that they end is stopped")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script on a CPU")
    parser.add_argument("--record", type=Path, nargs="+", metavar="FILE")
    arguments = parser.parse_args()
    return record(arguments.record) if arguments.record else measure(arguments)


if __name__ == "__main__":
    sys.exit(main())
