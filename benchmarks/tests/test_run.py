"""What a benchmark records: who ran, who was right, and how long it took."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest

import ejkernel_bench as bench
from ejkernel._plugins.catalog import OPERATIONS
from ejkernel.operations.cross_entropy.cases import CASES as LOSSES
from ejkernel.operations.rms_norm.cases import CASES
from ejkernel_bench import provenance
from ejkernel_bench._document import parse_document
from ejkernel_bench._problem import BenchProblem, prepare
from ejkernel_bench._select import Selected


def runs(case):
    return {run["name"]: run for run in case["runs"]}


def test_forward(benchmark):
    (case,) = benchmark(phases=("forward",), platforms=("moon", "slow"))["cases"]
    found = runs(case)
    assert list(found)[:2] == ["moon", "slow"]
    assert {name: (run["kind"], run["status"], run["reason"]) for name, run in found.items()} == {
        "moon": ("ours", "refused", "needs a moon"),
        "slow": ("ours", "ok", None),
        "quick": ("peer", "ok", None),
        "wrong": ("peer", "wrong", found["wrong"]["reason"]),
        "raising": ("peer", "failed", "RuntimeError: out of registers"),
        "choosy": ("peer", "refused", "does not do scale"),
        "elsewhere": ("peer", "refused", "runs on gpu, the target is cpu"),
    }
    assert found["wrong"]["reason"].startswith("out: ")
    assert found["wrong"]["reason"].endswith(" times the error that is tolerated, against NumPy float64")
    assert found["wrong"]["error"]["out"]["norm"] == pytest.approx(0.01, rel=1e-3)
    assert found["quick"]["error"]["out"]["norm"] < 1e-6
    assert [name for name, run in found.items() if run["chosen"]] == ["slow"]
    for name, run in found.items():
        assert (run["wall_s"] is None) == (name not in ("slow", "quick"))
    assert len(found["slow"]["wall_s"]) == len(found["quick"]["wall_s"]) == 5
    assert found["slow"]["device_s"] is None
    assert min(found["slow"]["wall_s"]) > 3 * min(found["quick"]["wall_s"])


def test_rates_and_limits(benchmark):
    (case,) = benchmark(phases=("forward",))["cases"]
    size = 4 * 33 * 64
    assert (case["flops"], case["bytes"]) == (4 * size, 4 * (2 * size + 64))
    assert case["limited_by"] == "bytes" and case["limit_s"] == case["bytes"] / 1e9
    for run in runs(case).values():
        if run["status"] == "ok":
            took = statistics.median(run["wall_s"])
            assert run["flops_per_s"] == case["flops"] / took and run["bytes_per_s"] == case["bytes"] / took
            assert run["fraction"] == case["limit_s"] / took
            assert run["compile_s"] > 0 and run["temporary_bytes"] >= 0


@pytest.mark.parametrize("phase", ["backward", "forward+backward"])
def test_gradients(benchmark, phase):
    (case,) = benchmark(phases=(phase,))["cases"]
    found = runs(case)
    assert case["phase"] == phase and case["reference"] == "NumPy float64"
    for name in ("slow", "quick"):
        assert found[name]["status"] == "ok" and found[name]["error"].keys() == {"x", "scale"}
    assert found["wrong"]["reason"].startswith("gradient of ")


def test_interrupted_it_keeps_what_is_complete(benchmark):
    def stop(case):
        raise KeyboardInterrupt

    result = benchmark(phases=("forward", "backward"), each=stop)
    assert [case["phase"] for case in result["cases"]] == ["forward"] and result["settings"]["interrupted"]


def test_what_is_complete_is_saved_after_each_case(benchmark):
    saved = []
    result = benchmark(phases=("forward", "backward"), save=lambda so_far: saved.append(json.loads(json.dumps(so_far))))
    assert [[case["phase"] for case in one["cases"]] for one in saved] == [["forward"], ["forward", "backward"]]
    assert all(one["settings"]["interrupted"] for one in saved) and not result["settings"]["interrupted"]
    assert parse_document(saved[-1]).cases


def test_document(benchmark):
    result = benchmark(phases=("forward",), dtypes=("float32", "bfloat16"))
    again = json.loads(json.dumps(result, allow_nan=False))
    document = parse_document(again)
    assert [case.key for case in document.cases] == [
        ("rms_norm", "scale", dtype, "forward") for dtype in ("float32", "bfloat16")
    ]
    assert all(case.ours.name == "slow" and case.best_peer.name == "quick" and case.ratio < 1 for case in document.cases)
    assert result["settings"] == {
        "rounds": 5,
        "input_sets": 2,
        "compile_rounds": 1,
        "size": "test",
        "clock": "wall",
        "no_device_clock": "there is no device clock for cpu",
        "interrupted": False,
    }
    assert result["peers"] == {
        "quick": None,
        "wrong": None,
        "raising": None,
        "choosy": None,
        "absent": "not installed: no_such_package",
        "elsewhere": None,
    }
    assert result["versions"]["ejkernel-core"] and result["device"]["backend"] == "cpu" and "cores" in result["device"]["host"]
    assert result["commit"] == provenance.commit()


def test_platforms_and_peers_by_name(benchmark):
    (case,) = benchmark(phases=("forward",), platforms=("slow",), peers=("quick",))["cases"]
    assert list(runs(case)) == ["slow", "quick"]
    (case,) = benchmark(phases=("forward",), platforms=("slow",), peers=())["cases"]
    assert list(runs(case)) == ["slow"]


def test_several_compilations(benchmark):
    (case,) = benchmark(phases=("forward",), platforms=("slow",), peers=("quick",), compile_rounds=3)["cases"]
    assert all(run["compile_s"] > 0 for run in case["runs"])


def test_mistakes(world):
    for settings, message in (
        ({"operations": ("rms_nrom",)}, "did you mean 'rms_norm'"),
        (
            {"case": "no-such", "size": "test"},
            "--case: got 'no-such', expected a case of rms_norm with size test: plain, scale",
        ),
        ({"size": "huge"}, "--size: got 'huge', expected one of auto, cpu, gpu, test"),
        ({"dtypes": ("int8",)}, "--dtype: got 'int8'"),
        ({"phases": ("sideways",)}, "--phase: got 'sideways'"),
        ({"rounds": 0}, "rounds: got 0"),
        ({"platforms": ("slwo",)}, "--platform: got 'slwo'"),
        ({"peers": ("quik",)}, "--peer: got 'quik', expected one of .*did you mean 'quick'"),
        ({"peers": ("absent",)}, r"--peer: got 'absent', expected a peer that is there \(not installed: no_such_package\)"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.run(bench.Settings(**{"operations": ("rms_norm",), "size": "test", **settings}), progress=False)


def test_every_operation_has_cases_of_both_sizes():
    for size in ("cpu", "gpu"):
        settings = bench.Settings(size=size).on("cpu")
        assert {one.operation for one in bench.select(settings)} == set(OPERATIONS)


def test_input_sets_differ_in_floats_alone():
    problem = BenchProblem.of(
        Selected("cross_entropy", next(case for case in LOSSES if case.name == "logits"), "float32"), "forward"
    )
    (first,), (second,) = problem.arguments(0), problem.arguments(1)
    assert np.array_equal(first.targets, second.targets)
    assert np.array_equal(np.roll(first.x, 1, -1), second.x, equal_nan=True)
    assert not np.array_equal(first.x, second.x, equal_nan=True)


def test_statistics_have_no_cotangent():
    selected = Selected("cross_entropy", next(case for case in LOSSES if case.name == "logits"), "float32")
    cotangents = BenchProblem.of(selected, "backward").first[2]
    assert np.any(cotangents.loss) and not np.any(cotangents.lse) and not np.any(cotangents.logit_sum)


def test_large_arrays_repeat_a_pool():
    case = next(case for case in CASES if case.name == "bench-2048x4096")
    x = prepare(Selected("rms_norm", case, "float32"))[1].x
    assert x.shape == (2048, 4096) and abs(float(x.mean())) < 1e-3 and float(x.std()) == pytest.approx(1, abs=1e-3)
    flat = np.asarray(x).ravel()
    assert np.array_equal(flat[2**22 + 7 :], flat[: flat.size - 2**22 - 7])
    assert not np.array_equal(x[0], x[1])
