"""Each tier by itself, their order, and what `explain` says of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import kernel_registry, tuning
from ejkernel._plugins.records import PluginRecord
from ejkernel.errors import CacheWarning
from ejkernel.plugin import ConfigSpace, Implementation, Plugin

pytestmark = pytest.mark.filterwarnings("error")


TIERS = ("overlay (autotuning result)", "memory", "user cache", "shipped table")
"""Those that hold entries which may come from a file."""


@contextlib.contextmanager
def put(world: Any, tier: str, *entries: tuning.Entry) -> Iterator[None]:
    """Have a tier answer with these entries, which went through JSON."""
    result = tuning.AutotuningResult.loads(tuning.AutotuningResult(entries).dumps())
    if tier == "shipped table":
        world.ship(*result.entries, name="xla", distribution="ejkernel-xla")
    elif tier == "user cache":
        assert result.store() == len(entries)
    elif tier == "memory":
        result.remember()
    with result if tier == "overlay (autotuning result)" else contextlib.nullcontext():
        yield


def test_heuristic(world: Any) -> None:
    assert world.run() == world.Blocks(8, 4)
    assert world.tier() == "heuristic"


def test_override_dataclass(world: Any) -> None:
    assert world.run(cfg=world.Blocks(2, 1)) == world.Blocks(2, 1)
    assert world.tier(cfg=world.Blocks(2, 1)) == "override"


def test_override_mapping_takes_the_rest_from_the_heuristic(world: Any) -> None:
    tuning.remember(world.entry(1))
    assert world.run(cfg={"warps": 7}) == world.Blocks(8, 7)
    assert world.tier(cfg={"warps": 7}) == "override"


def test_overlay(world: Any) -> None:
    with ejkernel.overlay({"rms_norm": world.Blocks(3)}):
        assert world.run() == world.Blocks(3)
        assert world.tier() == "overlay"
    assert world.run() == world.Blocks(8)


def test_autotuning_result(world: Any) -> None:
    with tuning.AutotuningResult((world.entry(5),)):
        assert world.run() == world.Blocks(5)
        assert world.tier() == "overlay (autotuning result)"
        assert world.run(jnp.ones((7, 4))) == world.Blocks(8)
    assert world.run() == world.Blocks(8)


def test_memory(world: Any) -> None:
    tuning.remember(world.entry(6))
    assert world.run() == world.Blocks(6)
    assert world.tier() == "memory"
    assert world.tier(jnp.ones((7, 4))) == "heuristic"
    tuning.forget()
    assert world.run() == world.Blocks(8)


def test_user_cache(world: Any) -> None:
    assert tuning.store(world.entry(9)) is True
    assert world.run() == world.Blocks(9)
    assert world.tier() == "user cache"
    assert world.tier(jnp.ones((7, 4))) == "heuristic"


def test_shipped_table_exact(world: Any) -> None:
    world.ship(world.entry(10))
    assert world.run() == world.Blocks(10)
    assert world.tier() == "shipped table"


def test_shipped_table_of_another_jax_and_core(world: Any) -> None:
    entry = world.entry(10)
    world.ship(dataclasses.replace(entry, key=dataclasses.replace(entry.key, jax="0.0.1", core="0.0")))
    assert world.tier() == "shipped table"


def test_shipped_table_nearest_in_log_space(world: Any) -> None:
    world.ship(world.entry(1, jnp.ones((60, 16))), world.entry(2, jnp.ones((120, 16))))
    # 88 is 28 away from 60 and 32 from 120, but log2 puts it nearer to 120 (0.45 against 0.55).
    assert world.run(jnp.ones((88, 16))) == world.Blocks(2)
    assert world.run(jnp.ones((80, 16))) == world.Blocks(1)
    assert world.tier(jnp.ones((80, 16))) == "shipped table (nearest bucket: x float32[60,16])"


def test_half_and_twice_the_size_are_not_near(world: Any) -> None:
    world.ship(world.entry(1, jnp.ones((64, 16))))
    for shape in ((33, 16), (127, 16), (64, 9), (64, 31)):
        assert world.run(jnp.ones(shape)) == world.Blocks(1)
    for shape in ((32, 16), (128, 16), (64, 8), (64, 32), (0, 16)):
        assert world.tier(jnp.ones(shape)) == "heuristic"


def test_nearest_is_of_the_same_dtype_rank_and_flags(world: Any) -> None:
    world.ship(world.entry(1, jnp.ones((64, 16))))
    assert world.tier(jnp.ones((65, 16), jnp.bfloat16)) == "heuristic"
    assert world.tier(jnp.ones((65, 2, 16))) == "heuristic"
    assert world.tier(jnp.ones((65, 16)), epsilon=1e-3) == "heuristic"
    assert world.tier(jnp.ones((65, 16))).startswith("shipped table (nearest")


def test_nearest_config_outside_the_search_space_is_passed_over(world: Any) -> None:
    world.ship(world.entry(7, jnp.ones((64, 16))), world.entry(2, jnp.ones((120, 16))))
    assert world.run(jnp.ones((65, 16))) == world.Blocks(2)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("tier", TIERS)
def test_a_stored_config_outside_the_search_space_is_ignored(world: Any, tier: str) -> None:
    with (
        put(world, tier, world.entry(7)),
        pytest.warns(CacheWarning, match=r"'fixture'.*Blocks\(rows=7.*not in the search space"),
    ):
        assert (world.run(), world.tier()) == (world.Blocks(8), "heuristic")


@pytest.mark.parametrize("tier", TIERS)
def test_a_stored_config_that_the_heuristic_would_choose_is_legal(world: Any, tier: str) -> None:
    world.rows = ()
    with put(world, tier, world.entry(8)):
        assert (world.run(), world.tier()) == (world.Blocks(8), tier)


def test_order_of_tiers(world: Any) -> None:
    world.ship(world.entry(15), world.entry(4, jnp.ones((6, 4))))
    tuning.store(world.entry(14))
    tuning.remember(world.entry(13))
    with ejkernel.overlay({"rms_norm": {"rows": 12}}):
        assert (world.run(cfg={"rows": 11}).rows, world.tier(cfg={"rows": 11})) == (11, "override")
        assert (world.run().rows, world.tier()) == (12, "overlay")
    assert (world.run().rows, world.tier()) == (13, "memory")
    tuning.forget()
    assert (world.run().rows, world.tier()) == (14, "user cache")
    tuning.clear_cache()
    assert (world.run().rows, world.tier()) == (15, "shipped table")
    assert world.run(jnp.ones((5, 4))).rows == 4
    assert world.tier(jnp.ones((5, 4, 4))) == "heuristic"


def test_compiled_programs_see_changes_of_memory_and_cache(world: Any) -> None:
    program = jax.jit(ejkernel.rms_norm)
    program(world.x)
    program(world.x)
    assert [config.rows for config in world.seen] == [8]
    tuning.remember(world.entry(6))
    program(world.x)
    program(world.x)
    assert world.seen[-1].rows == 6
    tuning.forget()
    tuning.store(world.entry(9))
    program(world.x)
    assert world.seen[-1].rows == 9


def test_nothing_is_tuned_unless_asked(world: Any) -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def tune(self, calls: Any) -> tuning.AutotuningResult:
            self.calls += calls
            return tuning.AutotuningResult((world.entry(2, key=key),))

    key, tuner = world.key(), Counting()
    tuning.install_tuner(tuner)
    world.run()
    world.grad()
    jax.jit(ejkernel.rms_norm)(world.x)
    assert (world.tier(), tuner.calls) == ("heuristic", [])
    result = ejkernel.autotune(ejkernel.rms_norm, world.x)
    assert [call.tier for call in tuner.calls] == ["heuristic"]
    assert (world.run(), world.tier()) == (world.Blocks(8), "heuristic")
    result.remember()
    assert (world.run(), world.tier()) == (world.Blocks(2), "memory")


def test_error_where_no_tier_may_answer(world: Any) -> None:
    from ejkernel.call import policy as _policy

    with (
        _policy.closing_tiers(["heuristic"]),
        pytest.raises(ejkernel.NoConfigError, match=r"'fixture'.*heuristics are not allowed"),
    ):
        ejkernel.explain("rms_norm", world.x)
    tuning.remember(world.entry(2))
    with _policy.closing_tiers(["heuristic"]):
        assert world.tier() == "memory"


def test_results_do_not_depend_on_the_config(world: Any) -> None:
    expected = np.asarray(ejkernel.rms_norm(world.x, platform="fixture"))
    np.testing.assert_array_equal(np.asarray(ejkernel.rms_norm(world.x, cfg={"rows": 1})), expected)


def test_explanation_shows_config_and_tier(world: Any) -> None:
    tuning.remember(world.entry(6))
    decision = ejkernel.explain("rms_norm", world.x).to_dict()["forward"]
    assert (decision["chosen"], decision["config"], decision["tier"]) == ("fixture", {"rows": 6, "warps": 4}, "memory")
    assert "config Blocks(rows=6, warps=4) from memory" in str(ejkernel.explain("rms_norm", world.x))


def test_a_raising_heuristic_is_named(world: Any) -> None:
    def broken(call: Any, target: Any) -> Any:
        return 1 // 0

    world.register(platform="acme", configs=ConfigSpace(world.Blocks, broken, lambda call, target: []))
    with pytest.raises(ejkernel.NoConfigError, match=r"'acme' \(rms_norm, forward\).*heuristic raised ZeroDivisionError"):
        ejkernel.rms_norm(world.x, platform="acme")
    world.seen.clear()
    ejkernel.rms_norm(world.x, platform="acme", cfg=world.Blocks(1))
    assert world.seen == [world.Blocks(1)]


def test_a_heuristic_that_returns_something_else_is_the_end(world: Any) -> None:
    space = ConfigSpace(world.Blocks, lambda call, target: {"rows": 1}, lambda call, target: [])
    world.register(platform="acme", configs=space)
    with pytest.raises(ejkernel.NoConfigError, match=r"'acme'.*returned \{'rows': 1\}, expected Blocks"):
        ejkernel.rms_norm(world.x, platform="acme")


def test_a_raising_search_space_is_named(world: Any) -> None:
    def broken(call: Any, target: Any) -> Any:
        raise RuntimeError("no space")

    world.register(platform="acme", configs=ConfigSpace(world.Blocks, lambda call, target: world.Blocks(), broken))
    key = world.key(jnp.ones((64, 16)), "acme")
    world.ship(world.entry(1, key=key), name="acme")
    with pytest.raises(ejkernel.NoConfigError, match="search space raised RuntimeError: no space"):
        ejkernel.rms_norm(jnp.ones((65, 16)), platform="acme")


@pytest.mark.parametrize("tier", ["memory", "user cache"])
def test_platform_choice(world: Any, tier: str) -> None:
    world.register(platform="slow", priority=1)
    key = world.key(implementation="slow")
    put = tuning.remember if tier == "memory" else tuning.store
    assert ejkernel.explain("rms_norm", world.x).chosen == "fixture"
    put(world.entry(3, key=key, best="slow", seconds=1e-6))
    explanation = ejkernel.explain("rms_norm", world.x)
    assert (explanation.chosen, explanation.forward.setting, explanation.forward.tier) == ("slow", "tuning table", tier)
    assert ejkernel.explain("rms_norm", jnp.ones((9, 9))).chosen == "fixture"
    with ejkernel.use("fixture"):
        assert ejkernel.explain("rms_norm", world.x).chosen == "fixture"


@pytest.fixture
def strangers(world: Any) -> Iterator[dict[str, Any]]:
    """What third parties' implementations of rms_norm were asked and ran; `named` is theirs and fastest by its entry."""
    asked: dict[str, Any] = {"supports": 0, "forward": 0}

    def supports(call: Any, target: Any) -> None:
        asked["supports"] += 1

    def forward(call: Any, inputs: Any, config: Any) -> Any:
        asked["forward"] += 1
        return world._forward(call, inputs, config)

    implementation = Implementation(operation="rms_norm", target=forward, supports=supports)
    records = kernel_registry.records
    acme = Plugin("acme", 2, "made up", implementations=(implementation,))
    kernel_registry.load([*records, PluginRecord("acme", "acme-kernels", "1.0", "acme", "ok", plugin=acme)])
    key = world.key(implementation="acme")
    asked.update(supports=0, forward=0, entry=world.entry(None, key=key, best="acme", seconds=1e-9))
    yield asked
    kernel_registry.load(records)


@pytest.mark.parametrize("tier", TIERS)
def test_no_store_brings_in_a_third_party_that_nobody_named(world: Any, strangers: dict[str, Any], tier: str) -> None:
    with put(world, tier, strangers["entry"]):
        explanation = ejkernel.explain("rms_norm", world.x)
        assert (explanation.chosen, explanation.forward.setting) == ("fixture", "priority")
        assert {v.candidate.id: v.verdict for v in explanation.forward.verdicts}["acme"] == "opt-in"
        world.run()
        assert (strangers["supports"], strangers["forward"]) == (0, 0)
        assert ejkernel.explain("rms_norm", world.x, platform="acme").chosen == "acme"
        with ejkernel.use("acme"):
            ejkernel.rms_norm(world.x)
    assert strangers["forward"] == 1


@pytest.mark.parametrize("tier", TIERS)
def test_what_may_not_run_hides_no_choice_among_what_may(world: Any, strangers: dict[str, Any], tier: str) -> None:
    world.register(platform="slow", priority=1)
    slow = world.entry(3, key=world.key(implementation="slow"), best="slow", seconds=1e-3)
    fixture = world.entry(3, best="fixture", seconds=1e-4)
    with put(world, tier, strangers["entry"], slow, fixture):
        explanation = ejkernel.explain("rms_norm", world.x)
        assert (explanation.chosen, explanation.forward.setting) == ("fixture", "tuning table")
        with ejkernel.use(forbid={"fixture"}):
            explanation = ejkernel.explain("rms_norm", world.x)
        assert (explanation.chosen, explanation.forward.setting) == ("slow", "tuning table")


def test_a_table_names_an_implementation_and_not_its_platform(world: Any) -> None:
    world.register(platform="two", priority=1)
    world.register(platform="two", priority=2, variant="other")
    with ejkernel.use(forbid={"two.other"}):
        key = world.key(implementation="two")
    tuning.remember(world.entry(3, key=key, best="two"))
    explanation = ejkernel.explain("rms_norm", world.x)
    assert (explanation.chosen, explanation.forward.setting) == ("two", "tuning table")


def test_platform_choice_needs_no_knobs(world: Any) -> None:
    world.register(platform="plain", priority=1, configs=None)
    tuning.remember(world.entry(None, key=world.key(implementation="plain"), best="plain"))
    assert ejkernel.explain("rms_norm", world.x).chosen == "plain"


def test_two_that_claim_to_be_best(world: Any) -> None:
    world.register(platform="slow", priority=1)
    tuning.remember(world.entry(3, best="fixture", seconds=2e-3))
    tuning.remember(world.entry(3, key=world.key(implementation="slow"), best="slow", seconds=1e-3))
    assert ejkernel.explain("rms_norm", world.x).chosen == "slow"


def test_platform_choice_of_another_version_does_not_count(world: Any) -> None:
    world.register(platform="slow", priority=1, version=2)
    key = dataclasses.replace(world.key(implementation="slow"), version=1)
    tuning.remember(world.entry(3, key=key, best="slow"))
    assert ejkernel.explain("rms_norm", world.x).chosen == "fixture"


def test_only_first_party_tables_choose_the_platform(world: Any) -> None:
    world.register(platform="slow", priority=1)
    entry = world.entry(3, key=world.key(implementation="slow"), best="slow")
    world.ship(entry, name="slow")
    assert ejkernel.explain("rms_norm", world.x).chosen == "fixture"
    assert world.tier(platform="slow") == "shipped table"
    world.ship(entry, name="xla", distribution="ejkernel-xla")
    assert ejkernel.explain("rms_norm", world.x).chosen == "slow"


def test_a_third_partys_table_speaks_only_of_itself(world: Any) -> None:
    world.ship(world.entry(10), name="acme")
    assert world.tier() == "heuristic"


@pytest.mark.filterwarnings("default")
def test_corrupt_table_is_ignored_with_one_warning(world: Any) -> None:
    path = world.ship(text="{ not json")
    with pytest.warns(ejkernel.errors.CacheWarning, match=path.name) as caught:
        assert world.tier() == "heuristic"
        world.ship(world.entry(10))
        assert world.tier() == "shipped table"
    assert len(caught) == 1


def test_table_with_an_unchecked_entry_is_refused(world: Any) -> None:
    world.ship(world.entry(10, check=None))
    with pytest.warns(ejkernel.errors.CacheWarning, match="no check for rms_norm/fixture:forward"):
        assert world.tier() == "heuristic"


@pytest.mark.filterwarnings("default")
def test_call_without_a_key_goes_on_with_the_heuristic(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise TypeError("x: got a thing")

    monkeypatch.setattr(tuning.Key, "of", refuse)
    with pytest.warns(
        ejkernel.errors.CacheWarning, match="RmsNormCall: calls of it cannot be looked up.*x: got a thing"
    ) as caught:
        assert (world.run(), world.run()) == (world.Blocks(8), world.Blocks(8))
    assert len(caught) == 1
