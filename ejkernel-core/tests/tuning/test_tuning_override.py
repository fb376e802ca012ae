"""`cfg=`: which phase it is for, what it refuses, and that nothing of it stays."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel import tuning

pytestmark = pytest.mark.filterwarnings("error")


def test_dataclass_goes_to_the_phase_of_its_type(world: Any) -> None:
    world.register("backward")
    assert world.grad(cfg=world.Blocks(2)) == [world.Blocks(2), world.GradBlocks()]
    assert world.grad(cfg=world.GradBlocks(64)) == [world.Blocks(), world.GradBlocks(64)]
    assert world.tier(cfg=world.GradBlocks(64)) == "heuristic"
    assert world.tier(phase="backward", cfg=world.GradBlocks(64)) == "override"


def test_mapping_goes_to_every_phase_that_has_the_knobs(world: Any) -> None:
    world.register("backward")
    assert world.grad(cfg={"warps": 1}) == [world.Blocks(8, 1), world.GradBlocks(16, 1)]
    assert world.grad(cfg={"columns": 1}) == [world.Blocks(8, 4), world.GradBlocks(1, 2)]


def test_forward_alone_accepts_the_config_of_backward(world: Any) -> None:
    world.register("backward")
    assert world.run(cfg=world.GradBlocks(64)) == world.Blocks()


def test_config_that_fits_no_phase(world: Any) -> None:
    world.register("backward")
    expected = r"cfg: got Strange.*expected Blocks\(rows, warps\) for 'fixture' \(forward\) or GradBlocks\(columns, warps\)"
    with pytest.raises(TypeError, match=expected):
        world.run(cfg=world.Strange())
    with pytest.raises(TypeError, match=expected):
        ejkernel.explain("rms_norm", world.x, cfg=world.Strange())


def test_unknown_knob(world: Any) -> None:
    with pytest.raises(ValueError, match=r"cfg: got unknown knob 'row'.*Blocks\(rows, warps\).*did you mean 'rows'"):
        world.run(cfg={"row": 4})


def test_mapping_spread_over_two_phases(world: Any) -> None:
    world.register("backward")
    with pytest.raises(ValueError, match="separate configs"):
        world.run(cfg={"rows": 4, "columns": 4})


def test_illegal_value(world: Any) -> None:
    with pytest.raises(ValueError, match=r"cfg: got rows=-1.*Blocks\(rows, warps\).*must be positive, not -1"):
        world.run(cfg={"rows": -1})


@pytest.mark.parametrize("value", ["8", 8.0, True, None])
def test_value_of_a_wrong_type(world: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=r"cfg: got rows=.*expected int there, in Blocks\(rows, warps\)"):
        world.run(cfg={"rows": value})


@pytest.mark.parametrize("value", [8, "fast", [("rows", 8)], dataclasses.dataclass(type("Loose", (), {}))()])
def test_neither_a_dataclass_nor_a_mapping(world: Any, value: Any) -> None:
    with pytest.raises(TypeError, match="cfg: got"):
        world.run(cfg=value)


def test_empty_mapping(world: Any) -> None:
    with pytest.raises(ValueError, match="cfg: got an empty mapping"):
        world.run(cfg={})


def test_implementation_without_knobs(world: Any) -> None:
    world.register(platform="plain", configs=None)
    with pytest.raises(ValueError, match=r"cfg: got rows=8.*'plain' \(forward\).*without knobs.*platform="):
        ejkernel.rms_norm(world.x, platform="plain", cfg={"rows": 8})


def test_override_is_never_kept(world: Any, snapshot: Any) -> None:
    before = snapshot(world.directory)
    world.run(cfg=world.Blocks(2))
    jax.jit(lambda x: ejkernel.rms_norm(x, cfg={"rows": 3}))(jnp.ones((5, 4)))
    assert snapshot(world.directory) == before
    assert not os.path.exists(os.environ["EJKERNEL_CACHE_DIR"])
    assert tuning.remembered() == ()
    assert world.run() == world.Blocks(8)
    assert world.run(jnp.ones((5, 4))) == world.Blocks(8)


def test_override_compiles_once_per_config(world: Any) -> None:
    for _ in range(3):
        ejkernel.rms_norm(world.x, cfg={"rows": 3, "warps": 1})
        ejkernel.rms_norm(world.x, cfg={"warps": 1, "rows": 3})
    assert world.seen == [world.Blocks(3, 1)]
