"""The tuner: what is wrong or fails is set aside, the rest is timed, and what it finds comes back through the tiers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import tuning
from ejkernel._plugins.catalog import OPERATIONS
from ejkernel.operations import get_operation
from ejkernel.operations.rms_norm.interface import RmsNormOutputs
from ejkernel.plugin import ConfigSpace
from ejkernel.testing.problem import cases_of
from ejkernel.testing.shapes import bound_shapes
from ejkernel.tuning import Search


@dataclasses.dataclass(frozen=True)
class Work:
    """A knob that costs time, and values of it that are wrong or fail."""

    loops: int = 0


WRONG, FAILS, SLOW, QUICK = Work(-1), Work(-2), Work(300), Work(0)


def busy(call: Any, inputs: Any, config: Work) -> RmsNormOutputs:
    if config == FAILS:
        raise RuntimeError("out of registers")
    x = inputs.x
    # Work that the compiler cannot leave out: its result is 0 and is added.
    zero = 0.0
    if config.loops > 0:
        zero = jax.lax.fori_loop(0, config.loops, lambda i, a: jnp.cos(a @ a.T @ a) * 0, jnp.ones((64, 64)))[0, 0]
    rstd = jax.lax.rsqrt(jnp.mean(x**2, axis=-1) + call.epsilon)
    factor = 1.1 if config == WRONG else 1.0
    return RmsNormOutputs(x * rstd[..., None] * factor + zero * 0, rstd if call.save_residuals else None)


def register(world: Any, configs: list[Work], heuristic: Work = SLOW, platform: str = "busy") -> None:
    space = ConfigSpace(Work, lambda call, target: heuristic, lambda call, target: configs)
    ejkernel.kernel_registry.register("rms_norm", platform, phase="forward", configs=space, priority=2000)(busy)
    world.undo.append(lambda: ejkernel.kernel_registry.unregister("rms_norm", platform, phase="forward"))


def tuned(world: Any, platform: str = "busy", **settings: Any) -> dict[str, tuning.Entry]:
    tuning.install_tuner(Search(progress=False, **settings))
    result = ejkernel.autotune(lambda x: ejkernel.rms_norm(x, platform=platform), world.x)
    return {entry.key.implementation: entry for entry in result.entries}


def test_wrong_and_failing_configs_are_set_aside(world: Any) -> None:
    register(world, [WRONG, FAILS, QUICK])
    entry = tuned(world)["busy"]
    assert entry.config == {"loops": QUICK.loops}
    assert entry.check.passed and entry.check.error < 1 and entry.check.reference == "NumPy float64"
    timings = {timing.config["loops"]: timing for timing in entry.timings}
    assert timings[-1].failure.startswith("wrong numbers: error ") and not timings[-1].seconds
    assert timings[-2].failure == "RuntimeError: out of registers"
    assert timings[300].median > 2 * timings[0].median


def test_the_heuristic_stays_where_nothing_is_faster(world: Any) -> None:
    register(world, [SLOW, Work(301)], heuristic=QUICK)
    assert tuned(world)["busy"].config == {"loops": 0}


def test_no_config_is_right(world: Any) -> None:
    register(world, [FAILS], heuristic=WRONG)
    with pytest.warns(ejkernel.errors.EjkernelWarning, match="no config of busy is right for rms_norm forward: wrong numbers"):
        assert tuned(world) == {}


def test_the_fastest_platform_is_named_and_chosen(world: Any) -> None:
    register(world, [], heuristic=SLOW, platform="slow")
    tuning.install_tuner(Search(progress=False))
    assert ejkernel.explain("rms_norm", world.x).chosen == "slow"
    result = ejkernel.autotune(ejkernel.rms_norm, world.x)
    found = {entry.key.implementation: entry for entry in result.entries}
    assert {"slow", "fixture", "xla"} <= found.keys()
    assert len({entry.best for entry in result.entries}) == 1
    with result:
        explanation = ejkernel.explain("rms_norm", world.x)
    assert explanation.chosen == found["slow"].best != "slow"
    assert explanation.forward.setting == "tuning table"


def test_what_was_tuned_under_grad_serves_the_plain_call(world: Any) -> None:
    world.register("backward")
    tuning.install_tuner(Search(progress=False))
    result = ejkernel.autotune(jax.grad(lambda x: ejkernel.rms_norm(x, platform="fixture").sum()), world.x)
    assert [entry.key.phase for entry in result.entries] == ["forward", "backward"]
    with result:
        assert world.tier(platform="fixture") == "overlay (autotuning result)"
        assert world.tier(platform="fixture", phase="backward") == "overlay (autotuning result)"


def test_entries_can_be_stored_as_they_are_found(world: Any) -> None:
    register(world, [QUICK])
    tuned(world, store=True)
    assert world.tier(platform="busy") == "user cache"


def test_a_public_function_tunes_itself(world: Any) -> None:
    """With its options as they stand in the call: they are no arrays."""
    register(world, [QUICK], heuristic=QUICK)
    tuning.install_tuner(Search(rounds=1, progress=False))
    for options in ({"epsilon": 1e-3}, {"platform": "busy"}, {"axis": (0, 1)}):
        assert ejkernel.autotune(ejkernel.rms_norm, world.x, **options).entries, options
    q = jax.ShapeDtypeStruct((1, 8, 2, 16), "float32")
    found = ejkernel.autotune(ejkernel.flash_attention, q, q, q, causal=True, sliding_window=(4, 0)).entries
    assert found
    assert all('"causal":true' in entry.key.call and '"window":[4,null]' in entry.key.call for entry in found)


def test_refused_while_tracing(world: Any) -> None:
    with pytest.raises(ejkernel.TracingError, match="call it outside of jit"):
        jax.jit(lambda x: ejkernel.autotune(ejkernel.rms_norm, x))(world.x)


def test_a_device_that_is_not_here(world: Any) -> None:
    with (
        ejkernel.use(target="gpu:9.0"),
        pytest.raises(ValueError, match=r"target: got gpu \(sm_90\), expected a device of this process"),
    ):
        ejkernel.autotune(lambda x: ejkernel.rms_norm(x, platform="xla"), world.x)


def test_calls_inside_transforms_are_found(world: Any) -> None:
    register(world, [QUICK], heuristic=QUICK)
    tuning.install_tuner(Search(progress=False, rounds=1))

    def program(x: Any) -> Any:
        step = lambda carry, row: (carry + ejkernel.rms_norm(row, platform="busy").sum(), None)
        return jax.lax.scan(step, 0.0, jax.vmap(lambda row: ejkernel.rms_norm(row, platform="busy"))(x))[0]

    shapes = [tuple(entry.key.sizes) for entry in ejkernel.autotune(program, world.x).entries]
    assert sorted(shapes) == [(1, 4), (3, 4)]


def test_the_luckiest_must_win_again(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that was fast in the first rounds only does not replace the heuristic's."""
    from ejkernel.tuning import _search
    from ejkernel.utils import timing as _timing

    lucky, steady = Work(1), Work(2)
    measured: list[Any] = []

    def clock(times: dict[Work, list[float]]) -> Any:
        def seconds(program: Any, *arguments: Any) -> float:
            config = program.config
            measured.append(config)
            return times[config][min(measured.count(config) - 2, 3)] if measured.count(config) > 1 else 1.0

        return seconds

    def use(seconds: Any) -> None:
        """In the rounds, and where the repeats of a round are counted."""
        for module in (_timing, _search):
            monkeypatch.setattr(module, "seconds", seconds)

    class Labelled:
        def __init__(self, program: Any, config: Any) -> None:
            self.program, self.config = program, config

        def lower(self, *arguments: Any) -> Any:
            return Labelled(self.program.lower(*arguments), self.config)

        def compile(self) -> Any:
            return Labelled(self.program.compile(), self.config)

        def __call__(self, *arguments: Any) -> Any:
            return self.program(*arguments)

    program = _search.TuningProblem.program
    monkeypatch.setattr(_search.TuningProblem, "program", lambda self, c, config: Labelled(program(self, c, config), config))
    register(world, [lucky], heuristic=QUICK)
    use(clock({QUICK: [1.0, 1.0, 1.0, 1.0], lucky: [0.5, 0.5, 1.0, 1.0]}))
    entry = tuned(world, rounds=2)["busy"]
    assert entry.config == {"loops": 0}
    assert [timing.seconds for timing in entry.timings] == [(1.0,) * 6, (0.5, 0.5, *(1.0,) * 4)]
    measured.clear()
    register(world, [steady], heuristic=QUICK, platform="other")
    use(clock({QUICK: [1.0, 1.0, 1.0, 1.0], steady: [0.5, 0.5, 0.9, 0.9]}))
    assert tuned(world, "other", rounds=2)["other"].config == {"loops": 2}


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_compile_no_more_at_once_than_asked(world: Any, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    import threading
    import time

    from ejkernel.tuning import _search

    lock, running, most = threading.Lock(), [0], [0]
    program = _search.TuningProblem.program

    def counted(self: Any, candidate: Any, config: Any) -> Any:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.1)
        with lock:
            running[0] -= 1
        return program(self, candidate, config)

    monkeypatch.setattr(_search.TuningProblem, "program", counted)
    register(world, [Work(n) for n in range(1, 6)], heuristic=QUICK)
    assert len(tuned(world, workers=workers, rounds=1)["busy"].timings) == 6
    assert most == [workers]


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"input_sets": 0}, {"workers": 0}, {"keep_within": 0.5}])
def test_settings_are_checked(settings: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Search(**settings)


@pytest.mark.parametrize("name", OPERATIONS)
def test_random_inputs_are_what_the_call_says(name: str) -> None:
    """Of every named case: shapes and dtypes."""
    for case in cases_of(name):
        _, call = bound_shapes(name, case, "float32")
        inputs = get_operation(name).random_inputs(call, np.random.default_rng(0))
        for field, value in inputs._asdict().items():
            spec = getattr(call, field)
            assert (value is None) == (spec is None), (case.name, field)
            if value is not None:
                assert (value.shape, str(value.dtype)) == (spec.shape, spec.dtype), (case.name, field)
