"""Reading a recorded run: what is derived from it, and what is not such a file."""

from __future__ import annotations

import math

import pytest
from bench_documents import document, runs_of

from ejkernel_bench._document import parse_document
from ejkernel_bench._standing import standing


def first(found):
    return parse_document(found).cases[0]


def small(**more):
    return document(operations=("softmax",), lengths=(512,), noise=0.005, **more)


def test_derived():
    case = first(small())
    assert case.label == "softmax T512 float32 forward"
    assert case.call == "query [1, 512, 8, 64], causal true"
    assert (case.ours.name, case.best_peer.name) == ("xla", "torch")
    found = standing(case)
    assert (found.word, found.peer, found.ratio) == ("loss", "torch", pytest.approx(0.9, rel=0.01))
    assert found.interval[0] < found.ratio < found.interval[1] < 1
    assert case.ours.largest_error == 2e-6


def test_device_time_counts_where_both_have_it():
    found = small()
    for name, seconds in (("xla", 1e-4), ("torch", 3e-4)):
        runs_of(found, name)[0]["device_s"] = [seconds] * 5
    case = first(found)
    assert case.ours.seconds == 1e-4
    assert (standing(case).word, standing(case).ratio) == ("win", pytest.approx(3))
    runs_of(found, "torch")[0]["device_s"] = None
    assert standing(first(found)).ratio == pytest.approx(0.9, rel=0.01)


def test_equal_times_are_even():
    assert standing(first(document(seed=5, times=lambda operation, name: 1.0))).word == "even"


@pytest.mark.parametrize("status", ["wrong", "failed", "refused"])
def test_no_result_of_what_dispatch_chose(status):
    found = small()
    runs_of(found, "xla")[0].update(status=status, wall_s=None, error={"out": {"norm": None, "element": None}})
    case = first(found)
    assert case.ours is None
    assert standing(case).word == "missing"
    assert case.runs[0].largest_error == math.inf
    assert math.isnan(case.runs[0].seconds)


def test_the_fastest_of_ours_speaks_where_the_chosen_one_was_left_out():
    found = small()
    for run in runs_of(found, "xla"):
        run["chosen"] = False
    assert first(found).ours.name == "xla"


def test_wrong_peers_are_no_peers():
    found = small()
    for name in ("torch", "jax.nn"):
        runs_of(found, name)[0]["status"] = "wrong"
    assert standing(first(found)).word == "alone"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.update(schema=2), "got schema 2, expected a benchmark result of schema 1"),
        (lambda found: found.pop("cases"), "no 'cases'"),
        (lambda found: found["cases"][0].pop("limit_s"), "no 'limit_s'"),
        (lambda found: found["cases"].append(found["cases"][0]), "softmax T512 float32 forward twice"),
        (lambda found: runs_of(found, "xla")[0].update(status="good"), "status 'good' of 'xla', expected one of ok, refused"),
        (lambda found: runs_of(found, "xla")[0].update(kind="own"), "kind 'own' of 'xla'"),
        (lambda found: runs_of(found, "xla")[0].update(name="torch"), "expected each name once"),
    ],
)
def test_refused(change, message):
    found = small()
    change(found)
    with pytest.raises(ValueError, match=message):
        parse_document(found, "results.json")


def test_not_an_object():
    with pytest.raises(ValueError, match="document: got list"):
        parse_document([])
