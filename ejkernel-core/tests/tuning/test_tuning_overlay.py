"""`with ejkernel.overlay({...})`."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import ejkernel
from ejkernel import kernel_registry, tuning

pytestmark = pytest.mark.filterwarnings("error")


def test_nesting(world: Any) -> None:
    world.register("backward")
    with ejkernel.overlay({"rms_norm": world.Blocks(1), "rms_norm:backward": {"columns": 1}}):
        assert world.grad() == [world.Blocks(1), world.GradBlocks(1)]
        with ejkernel.overlay({"rms_norm/fixture:forward": {"rows": 2}}):
            assert world.grad() == [world.Blocks(2), world.GradBlocks(1)]
        assert world.grad() == [world.Blocks(1), world.GradBlocks(1)]


def test_the_more_specific_line_decides(world: Any) -> None:
    with ejkernel.overlay({"rms_norm": world.Blocks(1), "rms_norm/fixture": world.Blocks(2)}):
        assert world.run() == world.Blocks(2)


def test_a_line_for_an_implementation_waits_for_it(world: Any) -> None:
    world.register(platform="other", priority=1)
    with ejkernel.overlay({"rms_norm/other": world.Blocks(2)}):
        assert (world.run(), world.run(platform="other")) == (world.Blocks(8), world.Blocks(2))


def test_a_line_for_an_implementation_may_fit_its_other_phase_only(world: Any) -> None:
    world.register("backward")
    with ejkernel.overlay({"rms_norm/fixture": world.GradBlocks(1)}):
        assert world.grad() == [world.Blocks(8), world.GradBlocks(1)]


def test_a_mapping_reaches_both_phases(world: Any) -> None:
    world.register("backward")
    with ejkernel.overlay({"rms_norm": {"warps": 9}}):
        assert world.grad() == [world.Blocks(8, 9), world.GradBlocks(16, 9)]


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm/fixture", "rms_norm:forward"])
def test_a_line_that_does_not_fit(world: Any, name: str) -> None:
    with ejkernel.overlay({name: {"row": 1}}), pytest.raises(ValueError, match=r"overlay\['rms_norm.*unknown knob 'row'"):
        world.run()
    with ejkernel.overlay({name: world.Strange()}), pytest.raises(TypeError, match=r"overlay\['rms_norm.*got Strange"):
        world.run()


def test_implementation_without_knobs(world: Any) -> None:
    world.register(platform="plain", configs=None)
    with ejkernel.overlay({"rms_norm": {"rows": 1}}), pytest.raises(ValueError, match=r"'plain'.*without knobs"):
        ejkernel.rms_norm(world.x, platform="plain")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rmsnorm", "'rmsnorm', expected the name of an operation; did you mean 'rms_norm'"),
        ("rms_norm/fixtur", "'fixtur', expected an implementation of rms_norm.*did you mean 'fixture'"),
        ("rms_norm:sideways", "phase 'sideways'"),
    ],
)
def test_unknown_names(world: Any, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message), ejkernel.overlay({name: {"rows": 1}}):
        raise AssertionError("the block must not be entered")


@pytest.mark.parametrize("configs", [[("rms_norm", {"rows": 1})], {"rms_norm": 3}, {3: {"rows": 1}}])
def test_wrong_types(world: Any, configs: Any) -> None:
    with pytest.raises(TypeError, match="overlay"), ejkernel.overlay(configs):
        raise AssertionError("the block must not be entered")


def test_compiled_programs_are_traced_again(world: Any) -> None:
    program = jax.jit(ejkernel.rms_norm)
    program(world.x)
    for rows in (1, 2, 1, 2):
        with ejkernel.overlay({"rms_norm": {"rows": rows}}):
            program(world.x)
    program(world.x)
    assert [config.rows for config in world.seen] == [8, 1, 2]


def test_nothing_is_written(world: Any, snapshot: Any) -> None:
    before = snapshot(world.directory)
    with ejkernel.overlay({"rms_norm": {"rows": 1}}):
        world.run()
    assert snapshot(world.directory) == before
    assert tuning.remembered() == ()


def test_platform_setting_of_an_outer_use_stays(world: Any) -> None:
    world.register(platform="other", priority=1)
    with ejkernel.use("other"), ejkernel.overlay({"rms_norm": {"rows": 1}}):
        assert ejkernel.explain("rms_norm", world.x).chosen == "other"
        assert world.run() == world.Blocks(1)


def test_an_overlay_does_not_change_the_registry(world: Any) -> None:
    epoch = kernel_registry.epoch
    with ejkernel.overlay({"rms_norm": {"rows": 1}}):
        assert kernel_registry.epoch == epoch
