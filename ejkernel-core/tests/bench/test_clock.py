"""Device time, with a made-up profiler that treats functions as JAX's does."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import jax
import pytest

from ejkernel.bench import _clock
from ejkernel.bench._clock import DeviceClock
from ejkernel.bench._program import Program


class Cupti:
    """Runs a function once to warm up, then `iterations` times; "measures" 1 ms more each time."""

    raises = ""

    def __init__(self, finalize: bool) -> None:
        assert finalize

    def measure(self, function, *, aggregate=True, iterations=1):
        assert isinstance(function, (jax.stages.Wrapped, jax.stages.Compiled)), "it would be jitted"

        def run(*arguments):
            if self.raises:
                raise RuntimeError(self.raises)
            for _ in range(1 + iterations):
                found = function(*arguments)
            times = [1.0 + i for i in range(iterations)]
            return found, times[0] if iterations == 1 else times

        return run


@pytest.fixture
def clock(monkeypatch):
    module = types.ModuleType(_clock._PROFILER)
    module.__spec__ = importlib.machinery.ModuleSpec(_clock._PROFILER, None)
    module.Cupti = Cupti
    monkeypatch.setitem(sys.modules, _clock._PROFILER, module)
    return DeviceClock("gpu")


def program(count):
    seen = []
    return seen, Program(seen.append, [(i,) for i in range(count)], dict)


def test_sets_rotate_and_the_first_run_does_not_count(clock):
    seen, made = program(3)
    assert clock.samples(made, 1) == [1e-3, 2e-3, 3e-3]
    assert seen == [1, 2, 0, 1]
    assert clock.samples(program(1)[1], 5) == [1e-3]
    assert clock.reason == ""


def test_what_the_profiler_does_not_wait_for(clock):
    waited = []
    clock.samples(Program(lambda i: -i, [(1,), (2,)], dict, waited.append), 0)
    assert waited == [-1, -2, -1]


def test_a_profiler_that_fails_is_asked_once(clock, monkeypatch):
    monkeypatch.setattr(Cupti, "raises", "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS\nmore")
    seen, made = program(2)
    assert clock.samples(made, 0) == [] and clock.reason == "RuntimeError: CUPTI_ERROR_MULTIPLE_SUBSCRIBERS"
    monkeypatch.setattr(Cupti, "raises", "")
    assert clock.samples(made, 0) == [] and seen == []


def test_kernels_that_differ_between_runs_concern_one_program(clock, monkeypatch):
    monkeypatch.setattr(Cupti, "raises", "Kernel names are not consistent across iterations")
    assert clock.samples(program(2)[1], 0) == [] and clock.reason == ""


def test_no_clock_elsewhere():
    clock = DeviceClock("cpu")
    assert clock.samples(program(1)[1], 0) == [] and clock.reason == "there is no device clock for cpu"
