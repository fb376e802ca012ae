"""The README's tables, from recorded runs that no machine made."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench_documents import document, runs_of

pytest.importorskip("ejkernel_bench", reason="run: pip install --editable ./benchmarks")
from ejkernel_bench._document import parse_document

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables():
    """The tool, which is a script."""
    spec = importlib.util.spec_from_file_location("generated_tables", ROOT / "tools" / "generated_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def times(operation: str, name: str) -> float:
    return {"xla": 1.0, "jax.nn": 1.6, "torch": 0.9 if operation == "softmax" else 1.3}[name]


def test_benchmarks(tables):
    found = document(operations=("rms_norm", "softmax"), lengths=(512,), times=times, noise=0.002)
    for run in runs_of(found, "xla"):
        run.update(compile_s=0.2, temporary_bytes=3 << 20)
    lines = tables.benchmarks(parse_document(found))
    assert lines[0] == "A CPU, 2 cores, 8 GiB; jax 0.11.2, python 3.12.1; 15 rounds, wall time; commit 0123abc."
    row = "| `rms_norm` | 1 | 1.30 | 1.30 | 2.00 (2.00 to 2.00) | 3 MiB / 1 MiB | 0 of 2 |"
    assert row in lines
    assert [line.split(" | ")[-1] for line in lines if "`softmax`" in line] == ["**2 of 2** |"]
    assert "2 of 4 cases that a peer runs too are lost:" in lines
    losses = [line for line in lines if line.startswith("- `softmax T512 float32")]
    assert len(losses) == 2
    assert all(line.endswith("against torch") and ": 0.90 (" in line for line in losses)


def test_what_is_behind_by_the_median_is_listed_though_it_is_unresolved(tables):
    found = document(operations=("softmax",), lengths=(512,), times=times, noise=0.4, rounds=5)
    lines = tables.benchmarks(parse_document(found))
    listed = [line for line in lines if line.startswith("- `softmax")]
    standings = [tables.standing(case) for case in parse_document(found).cases]
    behind = [one for one in standings if one.ratio < 0.95]
    assert behind and all(one.word == "even" for one in behind)
    assert len(listed) == len(behind) and all(line.endswith(", unresolved") for line in listed)
    heading = f"0 of 2 cases that a peer runs too are lost, and {len(behind)} more are below 0.95 by the median and unresolved:"
    assert heading in lines
    assert [line.split(" | ")[-1] for line in lines if line.startswith("| `softmax`")] == [
        f"0 of 2, {len(behind)} unresolved |"
    ]


def test_without_peers_or_results(tables):
    found = document(operations=("softmax",), lengths=(512,))
    for case in found["cases"]:
        case["runs"] = case["runs"][:1]
    assert "| `softmax` | 1 | - | - | - | - | no peer |" in tables.benchmarks(parse_document(found))
    runs_of(found, "xla")[0].update(status="wrong", wall_s=None)
    lines = tables.benchmarks(parse_document(found))
    assert "| `softmax` | 1 | - | - | - | - | **1 of 1** |" in lines
    assert lines[-1] == "- `softmax T512 float32 forward`: no result of ours"


def test_every_case(tables):
    found = document(operations=("softmax",), lengths=(512,), times=times, noise=0.002)
    lines = tables.every_case(parse_document(found))
    assert lines[0] == "A CPU, 2 cores, 8 GiB; jax 0.11.2; 15 rounds, wall time."
    rows = [line for line in lines if line.startswith("| `softmax T512` | float32 | forward | xla | ")]
    assert len(rows) == 1 and rows[0].endswith("| torch | 0.90 |")
    runs_of(found, "xla")[0].update(status="wrong", wall_s=None)
    assert any("| forward | **none** | - | - | torch | - |" in line for line in tables.every_case(parse_document(found)))


def test_lost_cases(tables):
    """The newest record beside a peer counts, and a record beside another peer takes nothing back."""
    old, new = (parse_document(found) for found in (recorded("2026-01-01", 0.9), recorded("2026-02-01", 0.8)))
    lines = tables.lost_cases([("new", new), ("old", old)])
    counted = "2 of 4 cases that a peer runs too are lost, and 0 more are behind and unresolved."
    assert lines[:3] == ["## A CPU, 2 cores, 8 GiB", "", counted]
    rows = [line for line in lines if line.startswith("| `softmax T512` | float32 | forward | xla | 0.80 (")]
    assert len(rows) == 1 and rows[0].endswith("| torch | `new` | 2026-02-01 |")
    without = recorded("2026-03-01", 0.8)
    for case in without["cases"]:
        case["runs"] = [run for run in case["runs"] if run["name"] != "torch"]
    assert tables.lost_cases([("new", new), ("without", parse_document(without))]) == lines


def test_a_case_that_is_behind_within_the_noise_is_listed_as_unresolved(tables):
    noisy = document(operations=("softmax",), lengths=(512,), times=lambda _, name: 0.97 if name == "torch" else 1.0, noise=0.2)
    lines = tables.lost_cases([("noisy", parse_document({**noisy, "date": "2026-03-01"}))])
    rows = [line for line in lines if line.startswith("| `softmax")]
    behind = [row for row in rows if "unresolved" in row]
    assert behind and lines[2].startswith(f"{len(rows) - len(behind)} of 2 cases")
    verb = "is" if len(behind) == 1 else "are"
    assert lines[2].endswith(f"and {len(behind)} more {verb} behind and unresolved.")
    for row in behind:
        ratio, low, high = map(float, re.search(r"\| ([\d.]+) \(([\d.]+) to ([\d.]+)\), unresolved", row).groups())
        assert ratio <= 1 and low <= 1 <= high


def recorded(date: str, torch: float) -> dict[str, Any]:
    """A document in which torch is that much faster in softmax."""
    slower = lambda operation, name: torch if (operation, name) == ("softmax", "torch") else times(operation, name)
    return {**document(operations=("rms_norm", "softmax"), lengths=(512,), times=slower, noise=0.002), "date": date}


def trained(model: str, rates: dict[str, float], **fields: Any) -> dict[str, Any]:
    """A record of the trainer with these tokens per second."""
    builds = [
        {
            "kernels": name,
            "plain": [],
            "tokens_per_second": rate,
            "program_bytes": 3 << 30,
            "agreement": {"agrees": True},
        }
        for name, rate in rates.items()
    ]
    config = {"model": model, "size": "125m", "float8": False, "mesh": "", "remat": "none", "batch": 16, "length": 2048}
    where = {"device": "A GPU", "devices": 1, "date": "2026-01-02T03:04:05", "commit": "0123abc", "failed": []}
    return {"config": config, "builds": builds, **where, **fields}


def test_training_steps(tables):
    """What we lose most stands first, against the better of the two others."""
    records = [
        trained("llama", {"ejkernel": 1100.0, "plain": 1000.0, "peers": 1000.0}),
        trained("mamba2", {"ejkernel": 900.0, "plain": 500.0, "peers": 1000.0}),
        trained("moe", {"ejkernel": 950.0, "plain": 1000.0}, failed=[{"kernels": "peers", "error": "no memory"}]),
    ]
    lines = tables.training_tables.training_steps(records)
    assert lines[2] == (
        "| mamba2 125m, 16 x 2048 | 900 | 500 | 1,000 | 1.80 | 0.90 | 3.0 / 3.0 / 3.0 | A GPU, 2026-01-02, 0123abc |"
    )
    assert lines[3].startswith("| moe 125m, 16 x 2048 | 950 | 1,000 | failed | 0.95 | - | 3.0 / 3.0 / - |")
    assert lines[4].startswith("| llama 125m, 16 x 2048 | 1,100 |")
    assert lines[5:] == ["", "- moe 125m, 16 x 2048: others' best failed"]
    assert tables.training_tables.training_steps([]) == ["No run is recorded yet."]


def test_training_in_short(tables):
    records = [
        trained("llama", {"ejkernel": 1100.0, "plain": 1000.0, "peers": 1000.0}),
        trained("mamba2", {"ejkernel": 900.0, "plain": 500.0}),
    ]
    lines = tables.training_tables.training_ratios(records)
    assert lines[2:4] == ["| llama 125m, 16 x 2048 | 1,100 | 1.10 | 1.10 |", "| mamba2 125m, 16 x 2048 | 900 | 1.80 | - |"]
    assert lines[-1] == "Measured on A GPU, 2026-01-02."
    assert tables.training_tables.training_ratios([]) == ["No run is recorded yet."]


def test_builds_that_differ_are_not_compared(tables):
    record = trained("llama", {"ejkernel": 1100.0, "plain": 1000.0})
    record["builds"][0]["agreement"] = {"agrees": False}
    lines = tables.training_tables.training_steps([record])
    assert lines[2:] == ["", "- llama 125m, 16 x 2048: builds differ by more than rounding, so it is left out"]


def test_scaled_steps(tables):
    """Over one device of the same run, which the record holds."""
    record = trained("llama", {"ejkernel": 1900.0, "plain": 1500.0}, devices=2, one_device={"ejkernel": 1000.0, "peers": 900.0})
    record["config"]["mesh"] = "fsdp=2"
    assert tables.training_tables.scaled_steps([record])[2:] == ["| llama 125m, fsdp=2, 16 x 2048 | 0.95 | - | - |"]


def report(device: str, platform: str, failed: int = 0) -> dict[str, Any]:
    outcome = {"levels": {"numbers": {"pass": 3, "refused": 0, "fail": failed}}}
    return {"device": device, "platform": platform, "operations": {"rope": outcome}}


@pytest.mark.parametrize(
    ("made", "mark"),
    [
        (report("NVIDIA H200", "triton"), "measured"),
        (report("NVIDIA H200", "triton", failed=1), "compiled"),
        (report("NVIDIA H200", "xla"), "compiled"),
        (report("NVIDIA A100", "triton"), "compiled"),
    ],
)
def test_hardware_says_no_more_than_records(tables, tmp_path, monkeypatch, made, mark):
    """A failing run, one of plain JAX and one on another generation show nothing of a kernel on this one."""
    hardware = tables.hardware_table
    monkeypatch.setattr(hardware, "RESULTS", tmp_path)
    (tmp_path / "conformance_made_up.json").write_text(json.dumps(made))
    (tmp_path / "triton_aot.json").write_text(json.dumps({"rows": [["rope", 90, "plain"]]}))
    for function in (hardware.measured_on, hardware.compiled_for):
        function.cache_clear()
    try:
        found = {one.name: hardware.standing("rope", one) for one in hardware.GENERATIONS if one.target.backend == "gpu"}
    finally:
        for function in (hardware.measured_on, hardware.compiled_for):
            function.cache_clear()
    assert found["Hopper"] == mark
    assert found["Ampere"] == ("measured" if "A100" in made["device"] else "accepted")
    assert found["AMD"] == "xla"
