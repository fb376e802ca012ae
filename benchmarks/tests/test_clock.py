"""Device time, with a profiler whose traces are made up."""

from __future__ import annotations

import pathlib

import jax
import pytest
from jax.profiler import ProfileData

from ejkernel_bench._clock import DeviceClock
from ejkernel_bench._program import Program


def line(name, events):
    """Of events (metadata, begin, duration), times in microseconds."""
    found = "".join(f"events {{ metadata_id: {m} offset_ps: {b}000000 duration_ps: {d}000000 }}" for m, b, d in events)
    return f'lines {{ name: "{name}" timestamp_ns: 5000 {found} }}'


def plane(name, *lines):
    named = {1: "kernel 1", 2: "kernel 2", 3: "kernel 3", 4: "MemcpyD2D"}
    names = "".join(f'event_metadata {{ key: {m} value {{ id: {m} name: "{text}" }} }}' for m, text in named.items())
    return f'planes {{ name: "{name}" {" ".join(lines)} {names} }}'


@pytest.fixture
def traces(monkeypatch):
    """What the profiler sees, one text for each time it is started; an exception is raised."""
    seen, folders = [], []

    def start(folder, profiler_options):
        assert profiler_options.host_tracer_level == 0
        if isinstance(seen[0], Exception):
            raise seen.pop(0)
        folders.append(folder)

    def stop():
        folder = pathlib.Path(folders.pop(), "plugins", "profile", "now")
        folder.mkdir(parents=True)
        folder.joinpath("host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(seen.pop(0)))

    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", stop)
    return seen


def program(count):
    ran = []
    return ran, Program(ran.append, [(i,) for i in range(count)], dict)


def test_what_runs_beside_another_counts_once_and_pauses_do_not(traces):
    first, second = [(1, 0, 10), (2, 4, 4), (3, 9, 3), (1, 40, 2)], [(1, 100, 10), (2, 110, 5), (3, 120, 1), (1, 130, 2)]
    host = plane("/host:CPU", line("Stream of thoughts", [(1, 0, 900)]))
    device = plane("/device:GPU:0", line("Stream #7(Compute)", first[::2] + second), line("Stream #8(Compute)", first[1::2]))
    traces.append(host + device)
    ran, made = program(2)
    clock = DeviceClock("gpu")
    assert clock.samples(made, 1) == pytest.approx([14e-6, 18e-6], rel=1e-9)
    assert ran == [1, 0, 1]
    assert clock.reason == ""


def test_a_run_that_begins_beside_the_one_before_counts_from_its_end(traces):
    traces.append(plane("/device:GPU:0", line("Stream #7(Compute)", [(1, 0, 10), (2, 8, 4), (1, 11, 20), (2, 30, 4)])))
    assert DeviceClock("gpu").samples(program(2)[1], 0) == pytest.approx([12e-6, 22e-6])


def test_derived_lines_and_copies_are_no_kernels(traces):
    stream = line("Stream #7(Compute,MemcpyD2D)", [(1, 0, 10), (4, 10, 30)])
    traces.append(plane("/device:GPU:0", line("XLA Modules", [(1, 0, 50)]), stream))
    assert DeviceClock("gpu").samples(program(1)[1], 0) == pytest.approx([10e-6])


def test_every_run_is_waited_for(traces):
    traces.append(plane("/device:GPU:0", line("Stream #7(Compute)", [(1, 0, 10), (1, 20, 10)])))
    waited = []
    assert len(DeviceClock("gpu").samples(Program(lambda i: -i, [(1,), (2,)], dict, waited.append), 0)) == 2
    assert waited == [-1, -2, -1]


def test_a_profiler_that_fails_is_asked_once(traces):
    traces.append(RuntimeError("Only one profile may be run at a time.\nmore"))
    clock = DeviceClock("gpu")
    assert clock.samples(program(2)[1], 0) == [] and clock.reason == "RuntimeError: Only one profile may be run at a time."
    assert clock.samples(program(2)[1], 0) == [] and traces == []


@pytest.mark.parametrize("events", [[(1, 0, 10), (1, 20, 5), (2, 30, 5)], [(1, 0, 10), (2, 20, 5)], []], ids=str)
def test_runs_that_differ_concern_one_program(traces, events):
    traces.append(plane("/device:GPU:0", line("Stream #7(Compute)", events)))
    clock = DeviceClock("gpu")
    assert clock.samples(program(2)[1], 0) == [] and clock.reason == ""


def test_no_clock_elsewhere():
    clock = DeviceClock("cpu")
    assert clock.samples(program(1)[1], 0) == [] and clock.reason == "there is no device clock for cpu"
