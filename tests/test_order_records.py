"""The default order against records of `tests/device/orders.py`: what is chosen today was as fast as any other."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

import ejkernel

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

_UNKNOWN_LENGTHS = "lengths are not known before a program runs, and with as many keys as there is room for CUDA's is faster"
KNOWN: dict[tuple[str, str, str], str] = {
    **{
        ("unified_attention", f"{requests} x 1 of {keys}, room {room} H32/8 D128 page 16", "forward"): _UNKNOWN_LENGTHS
        for requests, keys, room in ((1, 200, 8192), (1, 1000, 8192), (4, 200, 8192), (4, 200, 1024))
    },
    ("fused_kl_divergence", "1024x50257", "forward"): "the forward decides on gradients too, with which Triton's is faster",
    ("gated_linear_unit", "16384x14336 silu", "forward"): "XLA may fuse its own with what stands beside it",
}
"""Function, problem and phase -> why the default may be slower there."""


def script(path: Path) -> Any:
    """A module of a folder that is no package."""
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[path.stem]


TOOL = script(ROOT / "tools" / "default_order.py")


@functools.cache
def recorded(without: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Every kept row, with today's choice where these platforms are not installed."""
    return tuple(TOOL.kept_rows(RESULTS, without))


@pytest.mark.unsampled  # one problem that was not seen in time is one too many
@pytest.mark.parametrize("without", [(), ("cuda",), ("cuda", "pallas")], ids=lambda without: ",".join(without) or "nothing")
def test_the_default_is_never_slower(without: tuple[str, ...]):
    lost = [row for row in recorded(without) if row.lost and (row.function, row.problem, row.phase) not in KNOWN]
    assert not lost, "\n".join(["", *TOOL.losses(lost)])


def test_exceptions_are_still_needed():
    assert KNOWN.keys() <= {(row.function, row.problem, row.phase) for row in recorded() if row.lost}


@pytest.fixture
def areas(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "device"))
    return pytest.importorskip(
        "order_areas", reason="a platform that the problems are made with is not installed", exc_type=ImportError
    )


def record(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    versions = {"device": "gpu (NVIDIA H200, sm_90)"}
    return {"schema": TOOL.SCHEMA, "date": "2026-01-01", "seed": 0, "versions": versions, "times": rows, **more}


def measured(problem: Any, phase: str, operation: str, **milliseconds: float) -> dict[str, Any]:
    names = {name.replace("_", ".", 1): taken for name, taken in milliseconds.items()}
    return {**problem.row(phase), "operation": operation, "chosen": "", "milliseconds": names}


def test_a_slower_default_is_found(
    areas: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (softmax,), (_, norm, *_) = (areas.problems([name], 0, 0, small=True) for name in ("softmax", "norms"))
    steps = areas.problems(["pages"], 0, 0)[:2]
    rows = [
        measured(softmax, "forward", "softmax", triton=0.0100, xla=0.0094),  # less than a microsecond apart
        measured(softmax, "backward", "softmax", triton=0.120, xla=0.100),
        measured(norm, "forward", "add_rms_norm", cuda=0.101, xla=0.100),
        *(measured(one, "forward", "paged_attention", triton=1.0, cuda=2.0, xla=9.0) for one in steps),
    ]
    rows[0]["with_host"] = {"triton": 0.030, "xla": 0.020}
    path = tmp_path / "orders.json"
    path.write_text(json.dumps(record(rows)))
    found = TOOL.rows_of([json.loads(path.read_text())])
    assert [row.chosen for row in found[:3]] == ["triton", "triton", "cuda"]
    assert [(row.name, row.best, row.ratio) for row in found if row.function == "softmax" and row.lost] == [
        (f"softmax {softmax.name} backward", "xla", pytest.approx(1.2))
    ]
    assert found[0].lost_with_host == "xla"
    monkeypatch.setattr(sys, "argv", ["default_order.py", str(path)])
    assert TOOL.main() == 1
    shown = capsys.readouterr().out
    assert f"1.20  softmax {softmax.name} backward: triton 0.1200, xla 0.1000 ms" in shown
    assert "! softmax, backward, few rows, narrow: xla 1.00 (1 of 1); triton 1.20 (0 of 1); chosen: triton" in shown
    later = record([measured(softmax, "backward", "softmax", triton=0.100, xla=0.120)], date="2026-01-02")
    assert [row.lost for row in TOOL.rows_of([later, record(rows)]) if row.name.endswith("backward")] == [False]


def test_another_choice_without_a_platform(areas: Any):
    (softmax,) = areas.problems(["softmax"], 0, 0, small=True)
    rows = [measured(softmax, "forward", "softmax", cuda=0.1, triton=0.2, xla=0.3, pallas_mosaic_gpu=0.4)]
    (row,) = TOOL.rows_of([record(rows)], without=("pallas", "cuda"))
    assert row.milliseconds == {"triton": 0.2, "xla": 0.3}
    assert TOOL.rows_of([record(rows)], without=("pallas", "cuda", "xla")) == []


@pytest.mark.parametrize("area", ["attention", "pages", "grouped", "sample", "cross_entropy", "conv"])
def test_what_stands_first_is_what_the_dispatcher_chooses(area: str, areas: Any):
    """Of what is installed here."""
    problem = random.Random(0).choice(areas.problems([area], 0, 1))
    for phase in problem.phases:
        with ejkernel.use(target="gpu:9.0"):
            decided = problem.decision(phase).to_dict()
        names = [row["implementation"] for row in decided["candidates"] if row["verdict"] in ("chosen", "available")]
        assert TOOL.chosen_today(json.loads(json.dumps(problem.row(phase))), names, "gpu:9.0") == decided["chosen"], problem


def test_a_seed_draws_the_same_problems(areas: Any):
    """No two of a function have a name in common, and another seed adds others."""
    names = [[(one.function, one.name) for one in areas.problems([*areas.AREAS], seed, 2)] for seed in (1, 1, 2)]
    assert names[0] == names[1] and {*names[0]} != {*names[2]}
    assert len({*names[0]}) == len(names[0])
