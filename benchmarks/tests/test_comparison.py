"""Verdicts on two recorded runs: noise alone gives none, real changes are found, and what cannot be compared says so."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from bench_documents import document, runs_of

from ejkernel_bench import Rule, compare, compare_files
from ejkernel_bench._statistics import LogRatio

TIMES = {"xla": 1.0, "jax.nn": 1.6, "torch": 0.9}


def slower(factor: float):
    """Times of which ours are longer by a factor."""
    return lambda operation, name: TIMES[name] * (factor if name == "xla" else 1)


def small(**more):
    return document(operations=("softmax",), lengths=(512,), **more)


def test_noise_alone_is_no_regression():
    """Two phases and three runs in each of 200 pairs of files: 1200 comparisons of equal speeds with 3 % of noise."""
    found = [compare(small(seed=2 * seed), small(seed=2 * seed + 1)) for seed in range(200)]
    verdicts = [change.verdict for comparison in found for change in comparison.changes]
    assert len(verdicts) == 1200
    assert sum(verdict in ("slower", "faster") for verdict in verdicts) <= 6
    assert sum(bool(comparison.regressions) for comparison in found) <= 4


@pytest.mark.parametrize("rounds", [9, 15])
def test_a_tenth_is_found(rounds):
    """10 % slower under 3 % of noise: found in nearly every case, and never called faster."""
    pairs = [(small(seed=2 * s, rounds=rounds), small(seed=2 * s + 1, rounds=rounds, times=slower(1.1))) for s in range(50)]
    ours = [change for old, new in pairs for change in compare(old, new).changes if change.run == "xla"]
    assert len(ours) == 100
    assert sum(change.verdict == "slower" for change in ours) >= 90
    assert not [change for change in ours if change.verdict == "faster"]


@pytest.mark.parametrize(("factor", "verdict"), [(1.3, "slower"), (1 / 1.3, "faster"), (1.02, "same")])
def test_verdict(factor, verdict):
    found = compare(small(noise=0.005), small(noise=0.005, seed=1, times=slower(factor)))
    ours = [change for change in found.changes if change.run == "xla"]
    assert [change.verdict for change in ours] == [verdict] * 2
    for change in ours:
        assert change.ratio == pytest.approx(factor, rel=0.01)
        assert change.interval[0] <= change.ratio <= change.interval[1]
    assert len(found.regressions) == (2 if verdict == "slower" else 0)
    assert {change.verdict for change in found.changes if change.kind == "peer"} == {"same"}


def test_a_slower_peer_is_no_regression():
    times = lambda operation, name: TIMES[name] * (1.5 if name == "torch" else 1)
    found = compare(small(), small(seed=1, times=times))
    assert [change.run for change in found.changes if change.verdict == "slower"] == ["torch", "torch"]
    assert found.regressions == []
    assert any("peers take 1.2" in text for text in found.remarks)  # sqrt(1.5) over two peers


@pytest.mark.parametrize("status", ["wrong", "failed", "refused"])
def test_newly_broken(status):
    old, new = small(), small(seed=1)
    runs_of(new, "xla")[0].update(status=status, reason="error of 3.0 in the gradient of x", wall_s=None)
    runs_of(new, "torch")[0].update(status=status, reason="no", wall_s=None)
    (change,) = compare(old, new).regressions
    assert (change.verdict, change.run, change.phase) == (f"newly {status}", "xla", "forward")
    assert change.note == "error of 3.0 in the gradient of x"
    assert compare(new, old).regressions == []
    assert compare(new, old).counts == {"fixed": 2, "same": 4}
    assert compare(new, new).counts == {"not compared": 2, "same": 4}


def test_new_and_gone():
    old, new = small(), small(seed=1)
    for case in new["cases"]:
        case["runs"] = [{**run, "name": "triton" if run["name"] == "xla" else run["name"]} for run in case["runs"]]
        case["runs"][1]["name"] = "another peer"
    found = compare(old, new)
    assert found.counts == {"gone": 4, "new": 4, "same": 4}  # two of them: what dispatch chooses is as fast under its new name
    assert {change.run for change in found.regressions} == {"xla"}  # a peer may go


def test_cases_of_one_file_only():
    old, new = document(lengths=(512, 2048), operations=("softmax",)), small(seed=1)
    assert compare(old, new).counts == {"not compared": 6, "same": 6}
    assert compare(new, old).counts == {"new": 6, "same": 6}
    assert compare(old, new).regressions == compare(new, old).regressions == []


def test_dispatch_chooses_something_slower():
    """No implementation became slower, and users still get less."""
    old = small(noise=0.005)
    new = small(noise=0.005, seed=1)
    for found in (old, new):
        for case in found["cases"]:
            case["runs"].append({**case["runs"][0], "name": "triton", "chosen": False})
            case["runs"][-1]["wall_s"] = [2 * seconds for seconds in case["runs"][0]["wall_s"]]
    for found in (runs_of(new, "xla"), runs_of(new, "triton")):
        for run in found:
            run["chosen"] = not run["chosen"]
    changes = compare(old, new).regressions
    assert [(change.run, change.verdict, change.note) for change in changes] == [
        ("chosen by dispatch", "slower", "xla before, triton now")
    ] * 2
    assert changes[0].ratio == pytest.approx(2, rel=0.02)


def test_too_few_samples_are_unclear():
    found = compare(small(rounds=4), small(rounds=4, times=slower(3)))
    assert found.counts == {"unclear": 6}
    assert compare(small(rounds=4), small(rounds=4, seed=1, times=slower(3)), Rule(samples=4)).counts["slower"] == 2


def test_wide_noise_is_unclear():
    """A change beyond the threshold that the samples cannot hold apart from none."""
    old, new = small(), small()
    for run, samples in ((runs_of(old, "xla")[0], [1, 1, 1, 3, 3]), (runs_of(new, "xla")[0], [1, 1, 3, 3, 3])):
        run["wall_s"] = samples
    change = next(change for change in compare(old, new).changes if change.run == "xla" and change.phase == "forward")
    assert (change.verdict, change.ratio) == ("unclear", pytest.approx(3))
    assert change.interval == (pytest.approx(1 / 3), pytest.approx(3))


def test_another_device_is_measured_by_peers():
    """Everything twice as fast, ours only by 1.25: against the peers ours lost a factor of 1.6."""
    times = lambda operation, name: TIMES[name] * (0.8 if name == "xla" else 0.5)
    old, new = small(noise=0.005), small(noise=0.005, seed=1, times=times)
    new["device"]["host"] = "another CPU"
    found = compare(old, new)
    assert found.basis == "peers"
    assert found.obstacles == ["host: A CPU, 2 cores, 8 GiB before, another CPU now"]
    assert [change.verdict for change in found.changes if change.kind == "peer"] == ["not compared"] * 4
    assert [change.ratio for change in found.regressions] == [pytest.approx(1.6, rel=0.02)] * 2
    for case in new["cases"]:
        case["runs"] = case["runs"][:1]
    alone = compare(old, new)
    assert {change.note for change in alone.changes if change.run == "xla"} == {"no peer that both files time"}
    assert alone.regressions == []


@pytest.mark.parametrize("change", ["kind", "clock", "limits"])
def test_obstacles(change):
    old, new = small(), small(seed=1)
    if change == "limits":
        new["limits"]["bytes_per_s"] *= 1.3
        expected = "largest bandwidth: 2e+10 before, 2.6e+10 now"
    elif change == "clock":
        new["settings"]["clock"] = "cupti"
        expected = "clock: wall before, cupti now"
    else:
        new["device"]["kind"] = "NVIDIA H200"
        expected = "kind: cpu before, NVIDIA H200 now"
    assert compare(old, new).obstacles == [expected]


def test_limits_that_nearly_agree_are_no_obstacle():
    old, new = small(), small(seed=1)
    new["limits"]["bytes_per_s"] *= 1.1
    new["versions"]["jax"] = "0.12.0.1"
    new["device"]["load"] = 1.9
    found = compare(old, new)
    assert (found.basis, list(found.obstacles)) == ("seconds", [])
    assert found.remarks == ["now, the machine had other work: load 1.9", "jax: 0.11.2 before, 0.12.0.1 now"]


def test_clocks_are_not_mixed():
    """Both have wall time, only one has device time: wall time is compared. Without a common clock, nothing is."""
    old, new = small(noise=0.005), small(noise=0.005, seed=1)
    for run in runs_of(new, "xla"):
        run["device_s"] = [seconds / 10 for seconds in run["wall_s"]]
    assert compare(old, new).counts == {"same": 6}
    for run in runs_of(new, "xla"):
        run["wall_s"] = None
    changes = [change for change in compare(old, new).changes if change.run == "xla"]
    assert [(change.verdict, change.note) for change in changes] == [("not compared", "wall time before, device time now")] * 2


def test_files_and_json(tmp_path):
    paths = []
    for name, found in (("old", small()), ("new", small(seed=1, times=slower(1.3)))):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(found))
    found = json.loads(json.dumps(compare_files(*paths).to_dict()))
    assert found["regressions"] == 2
    assert found["counts"] == {"slower": 2, "same": 4}
    assert found["rule"] == {"threshold": 0.05, "confidence": 0.99, "samples": 5}
    assert sum(change["regression"] for change in found["changes"]) == 2
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json: got a file that is not JSON"):
        compare_files(tmp_path / "bad.json", paths[0])


def test_table_and_summary():
    from io import StringIO

    from rich.console import Console

    found = compare(small(), small(seed=1, times=slower(1.3)))
    screen = Console(width=140, file=StringIO())
    screen.print(found.table())
    lines = screen.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["verdict", lines[1], "slower", "slower"]
    assert "softmax T512 float32 forward" in lines[2] + lines[3]
    screen.print(found.table(everything=True))
    assert screen.file.getvalue().count("same") == 4
    assert found.summary().splitlines() == [
        "2 slower, 4 same (a change counts from 5%, outside the 99% interval)",
        "regressions of ours: 2",
    ]


def test_interval_covers_as_it_says():
    """The 90 % interval of a ratio of equal medians leaves out 1 in about a tenth of the draws."""
    rng = np.random.default_rng(0)
    outside = 0
    for index in range(300):
        one, other = np.exp(0.05 * rng.standard_normal((2, 15)))
        low, high = LogRatio.of(one, other, str(index)).interval(0.9)
        outside += not low <= 1 <= high
    assert 10 <= outside <= 50
    same = LogRatio.of([1.0, 2.0, 3.0], [2.0, 4.0, 6.0], "x")
    assert same.ratio == pytest.approx(0.5)
    assert LogRatio.mean([same, LogRatio(math.log(2.0), -same.draws)]).ratio == pytest.approx(1)


def test_intervals_are_scipy_s():
    """Percentile bootstrap of the ratio of medians: the ends lie where scipy's do, but for the luck of resampling."""
    from scipy.stats import bootstrap

    def log_ratio(one, other, axis):
        return np.log(np.median(one, axis=axis) / np.median(other, axis=axis))

    rng, apart = np.random.default_rng(5), []
    for index in range(30):
        samples = np.exp(0.05 * rng.standard_normal(15)), 1.1 * np.exp(0.05 * rng.standard_normal(9))
        expected = bootstrap(samples, log_ratio, n_resamples=10_000, confidence_level=0.99, method="percentile", rng=rng)
        low, high = expected.confidence_interval
        ours = LogRatio.of(*samples, str(index))
        assert ours.point == pytest.approx(log_ratio(*samples, axis=0))
        apart.append((np.log(ours.interval(0.99)) - (low, high)) / (high - low))
    assert np.abs(apart).mean() < 0.05
    assert np.abs(np.mean(apart, axis=0)).max() < 0.03


@pytest.mark.parametrize(("name", "value"), [("threshold", -0.1), ("threshold", math.nan), ("confidence", 1.0), ("samples", 0)])
def test_rule_refuses(name, value):
    with pytest.raises(ValueError, match=f"{name}: got {value}, expected"):
        Rule(**{name: value})
