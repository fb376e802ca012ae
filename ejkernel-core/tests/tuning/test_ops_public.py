"""`ejkernel.ops` over the public functions: the same tiers that the dispatcher asks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import ejkernel
from ejkernel import ops, tuning
from ejkernel.errors import NoConfigError

pytestmark = pytest.mark.filterwarnings("error")


class FixedTuner:
    """Finds `rows=20` for every call, and notes what it was given."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.calls: list[tuning.RecordedCall] = []

    def tune(self, calls: Any) -> tuning.AutotuningResult:
        self.calls += calls
        keys = [tuning.Key.of(call.request, call.phase, call.chosen) for call in calls if call.phase == "forward"]
        return tuning.AutotuningResult(tuple(self.world.entry(20, key=key) for key in keys))


@pytest.fixture
def tuner(world: Any) -> FixedTuner:
    return FixedTuner(world)


@pytest.fixture
def installed(tuner: FixedTuner) -> Iterator[FixedTuner]:
    ops.install_tuner(tuner)
    yield tuner
    ops.install_tuner(None)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    yield
    tuning.forget()


def test_every_name_is_there_and_lazy(python: Any) -> None:
    assert all(getattr(ops, name) is not None for name in ops.__all__)
    assert {*ops.__all__} <= {*dir(ops)}
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = ops.Nothing
    assert python("import sys, ejkernel.ops; print('ejkernel.tuning' in sys.modules)").strip() == "False"


def test_choose_agrees_with_the_dispatcher(world: Any) -> None:
    chain, inv = ops.ConfigSelectorChain(), ops.Invocation.of(ejkernel.rms_norm, world.x)
    assert chain.select(inv) == tuning.Selected(world.Blocks(), "heuristic")
    assert inv.key() == world.key()
    ops.ConfigCache().put(world.entry(16))
    assert chain.choose(inv) == world.Blocks(16) == world.run()
    assert chain.choose(ops.Invocation.of("rms_norm", world.x, cfg={"rows": 3})) == world.Blocks(3)
    assert chain.choose(ops.Invocation.of(ejkernel.modules.RmsNorm(), world.x)) == world.Blocks(16)


def test_no_knobs_no_config(world: Any) -> None:
    assert ops.ConfigSelectorChain().choose(ops.Invocation.of("rms_norm", world.x, platform="xla")) is None


def test_config_cache_is_the_memory_tier(world: Any) -> None:
    cache, inv = ops.ConfigCache(), ops.Invocation.of("rms_norm", world.x)
    assert cache.get(inv) is None
    cache.put(world.entry(16))
    assert cache.get(inv) == cache.get(inv.key()) == world.entry(16)
    assert (cache.size(), cache.keys()) == (1, (inv.key(),))
    assert tuning.remembered() == (world.entry(16),)
    with pytest.raises(ValueError, match="a check against the reference that passed"):
        cache.put(world.entry(16, check=None))
    assert cache.clear("softmax") == 0
    assert cache.clear("rms_norm") == 1
    assert world.run() == world.Blocks()
    with pytest.raises(TypeError, match=r"call: got 'rms_norm', expected an Invocation, or its key\(\)"):
        cache.get("rms_norm")  # pyright: ignore[reportArgumentType]


def test_persistent_cache_is_the_users_cache(world: Any, tmp_path: Any) -> None:
    cache, inv = ops.PersistentCache(), ops.Invocation.of("rms_norm", world.x)
    assert cache.get(inv) is None
    assert cache.put(world.entry(16))
    assert cache.get(inv) == world.entry(16)
    assert (cache.size(), cache.keys()) == (1, (inv.key(),))
    assert [path.stem for path in cache.path.iterdir()] == [inv.key().digest]
    assert world.tier() == "user cache"
    assert cache.export(tmp_path / "all.json") == 1
    assert cache.clear() == 1
    assert world.tier() == "heuristic"
    assert cache.merge(tmp_path / "all.json") == 1
    assert world.run() == world.Blocks(16)


def test_overlay_of_an_exact_call(world: Any) -> None:
    inv = ops.Invocation.of("rms_norm", world.x)
    with ops.overlay_cache({inv: world.Blocks(5)}):
        assert world.run() == world.Blocks(5)
        assert world.tier() == "overlay"
        assert world.run(world.x[:1]) == world.Blocks()
        assert world.run(cfg={"rows": 6}) == world.Blocks(6)
        with ops.overlay_cache({"rms_norm": world.Blocks(7)}):
            assert world.run() == world.Blocks(7)
    with ops.overlay_cache({"rms_norm": world.Blocks(7), inv.key(): world.Blocks(5)}):
        assert world.run() == world.Blocks(5)
        assert world.run(world.x[:1]) == world.Blocks(7)
    assert world.run() == world.Blocks()
    assert tuning.remembered() == ()


def test_executor_without_heuristics(world: Any) -> None:
    chain = ops.ConfigSelectorChain(policy=ops.AutotunePolicy(allow_heuristics=False))
    executor = ops.Executor(chain)
    with pytest.raises(NoConfigError, match=r"'fixture'.*heuristics are not allowed here"):
        executor(ejkernel.modules.RmsNorm(), world.x)
    ops.ConfigCache().put(world.entry(16))
    np.testing.assert_allclose(executor(ejkernel.modules.RmsNorm(), world.x), ejkernel.rms_norm(world.x), rtol=1e-6)
    assert world.seen[-1] == world.Blocks(16)
    executor(ejkernel.rms_norm, world.x[:1], cfg={"rows": 3})
    assert world.seen[-1] == world.Blocks(3)
    with pytest.raises(TypeError, match="chooser: got 3"):
        ops.Executor(3)


def test_stores_left_out(world: Any) -> None:
    ops.ConfigCache().put(world.entry(16))
    ops.PersistentCache().put(world.entry(17))
    world.ship(world.entry(18))
    inv = ops.Invocation.of("rms_norm", world.x)
    tiers = [ops.ConfigSelectorChain(**left).select(inv).tier for left in ({}, {"cache": None}, {"persistent": None})]
    assert tiers == ["memory", "user cache", "memory"]
    assert ops.ConfigSelectorChain(None, persistent=None).select(inv) == tuning.Selected(world.Blocks(), "heuristic")


def test_miss_is_searched(world: Any) -> None:
    chain = ops.ConfigSelectorChain(policy=ops.AutotunePolicy(cache_miss_fallback="autotune"))
    with ops.policy_override(chain, allow_autotune=False):
        chain.call(ejkernel.rms_norm, world.x, platform="fixture")
    assert {*world.seen} == {world.Blocks()} and not tuning.remembered()
    chain.call(ejkernel.rms_norm, world.x, platform="fixture")
    assert {world.Blocks(rows) for rows in (1, 2, 4, 8)} <= {*world.seen}
    assert [entry.key.implementation for entry in tuning.remembered()] == ["fixture"]


@pytest.mark.parametrize("persist", [False, True])
def test_miss_is_tuned_once(world: Any, tuner: FixedTuner, persist: bool) -> None:
    policy = ops.AutotunePolicy(cache_miss_fallback="autotune", allow_heuristics=False)
    chain = ops.ConfigSelectorChain(policy=policy, tuner=tuner, persist_autotune=persist)
    for _ in range(2):
        chain.call(ejkernel.rms_norm, world.x)
        assert world.seen[-1] == world.Blocks(20)
    assert [(call.request.operation.name, call.phase) for call in tuner.calls] == [("rms_norm", "forward")]
    assert world.tier() == "memory"
    assert ops.PersistentCache().size() == int(persist)


def test_nothing_is_tuned_while_tracing(world: Any, installed: FixedTuner) -> None:
    chain = ops.ConfigSelectorChain(policy=ops.AutotunePolicy(cache_miss_fallback="autotune"))
    jax.jit(lambda x: chain.call(ejkernel.rms_norm, x))(world.x)
    assert installed.calls == []
    assert world.seen == [world.Blocks()]


def test_forward_autotune_only(world: Any, installed: FixedTuner) -> None:
    gradient = jax.grad(lambda x: ejkernel.rms_norm(x, platform=("fixture", "xla")).sum())
    world.register("backward")
    ops.autotune(gradient, world.x)
    assert [call.phase for call in installed.calls] == ["forward", "backward"]
    installed.calls.clear()
    assert not inspect.signature(ops.forward_autotune_only).parameters
    with ops.forward_autotune_only():
        found = ops.autotune(gradient, world.x)
        np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(world.x), world.x + 1)
    assert [call.phase for call in installed.calls] == ["forward"]
    assert [entry.key.phase for entry in found.entries] == ["forward"]
    ops.autotune(gradient, world.x)
    assert len(installed.calls) == 3
