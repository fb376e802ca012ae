"""Configs that failed here, or that a plugin warns of: no tier but override and overlay chooses them, and `explain` says why."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from tuning.test_search import FAILS, QUICK, SLOW, WRONG, Work, register, tuned

import ejkernel
from ejkernel import tuning
from ejkernel.configs import quarantine as _quarantine
from ejkernel.errors import CacheWarning, EjkernelWarning
from ejkernel.plugin import ConfigSpace, Quarantine
from ejkernel.tuning import Quarantined

OUT_OF_REGISTERS = "RuntimeError: out of registers"
SPACE = (1, 2, 4, 8)


@pytest.fixture(autouse=True)
def small_space(world: Any) -> None:
    """So few configs that all of them can be quarantined."""
    world.rows = SPACE


def block(world: Any, *rows: int, reason: str = "boom", x: Any = None) -> None:
    """Quarantine configs of the fixture for a call."""
    key = world.key(x)
    versions = _quarantine.compiling_versions(ejkernel.explain("rms_norm", world.x, platform="fixture").forward.chosen)
    _quarantine.add(Quarantined(key, tuning.to_plain(world.Blocks(r)), reason, dict(versions)) for r in rows)


def said(world: Any, x: Any = None, **options: Any) -> tuple[int, str, tuple[str, ...]]:
    """Rows of the config chosen, its tier, and what was passed over."""
    decision = ejkernel.explain("rms_norm", world.x if x is None else x, **options).forward
    return decision.config.rows, decision.tier, decision.quarantined


def line(world: Any, rows: int, reason: str = "boom") -> str:
    return f"{world.Blocks(rows)}: {reason}"


class TestTuner:
    def test_what_fails_is_not_chosen_afterwards(self, world: Any) -> None:
        register(world, [WRONG, QUICK], heuristic=FAILS)
        assert tuned(world)["busy"].config == {"loops": 0}
        decision = ejkernel.explain("rms_norm", world.x).forward
        assert (decision.chosen.id, decision.config, decision.tier) == ("busy", QUICK, "heuristic")
        assert decision.quarantined[0] == f"{FAILS}: {OUT_OF_REGISTERS}"
        # The nearest to -2 by the space alone is -1, which was tried and gave wrong numbers.
        assert decision.quarantined[1].startswith(f"{WRONG}: wrong numbers: error ")
        assert f"  quarantined: {FAILS}: {OUT_OF_REGISTERS}\n" in str(decision)
        assert decision.to_dict()["quarantined"] == list(decision.quarantined)
        assert jnp.isfinite(ejkernel.rms_norm(world.x)).all()
        # Another call of the same implementation is not concerned.
        assert ejkernel.explain("rms_norm", jnp.ones((5, 4))).forward.config == FAILS

    def test_is_found_again_by_another_process(self, world: Any) -> None:
        register(world, [FAILS, QUICK], heuristic=QUICK)
        tuned(world)
        code = (
            "from ejkernel import tuning\n"
            "files = [file for file in tuning.cache_entries() if file.quarantined]\n"
            "print([(file.quarantined.config, file.quarantined.reason) for file in files])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
        assert done.stdout.strip() == str([({"loops": -2}, OUT_OF_REGISTERS)])

    def test_is_not_tried_again(self, world: Any) -> None:
        register(world, [FAILS, QUICK], heuristic=QUICK)
        tuned(world)
        timings = {timing.config["loops"]: timing for timing in tuned(world)["busy"].timings}
        assert timings[-2].failure == f"quarantined: {OUT_OF_REGISTERS}"
        assert timings[0].seconds

    def test_retry_lifts_what_passes_now(self, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        register(world, [FAILS, WRONG, QUICK], heuristic=QUICK)
        tuned(world)
        assert tuning.cache_info().quarantined == 2
        monkeypatch.setattr("tuning.test_search.FAILS", Work(-9))
        timings = {timing.config["loops"]: timing for timing in tuned(world, retry=True)["busy"].timings}
        assert timings[-2].seconds
        assert timings[-1].failure.startswith("wrong numbers")
        assert [file.quarantined.config for file in tuning.cache_entries() if file.quarantined] == [{"loops": -1}]

    def test_where_nothing_is_right_no_config_is_to_blame(self, world: Any) -> None:
        register(world, [FAILS], heuristic=WRONG)
        with pytest.warns(EjkernelWarning, match="no config of busy is right"):
            assert tuned(world) == {}
        assert tuning.cache_entries() == []
        assert ejkernel.explain("rms_norm", world.x).forward.config == WRONG

    def test_no_memory_may_be_another_process_doing(self, world: Any) -> None:
        def hungry(call: Any, inputs: Any, config: Work) -> Any:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes")

        space = ConfigSpace(Work, lambda call, target: QUICK, lambda call, target: [QUICK])
        ejkernel.kernel_registry.register("rms_norm", "hungry", configs=space, priority=2000)(hungry)
        world.undo.append(lambda: ejkernel.kernel_registry.unregister("rms_norm", "hungry"))
        with pytest.warns(EjkernelWarning, match="no config of hungry is right"):
            tuned(world, platform=("hungry", "fixture"))
        assert tuning.cache_entries() == []

    def test_an_implementation_that_always_fails_leaves_the_call_to_the_next(self, world: Any) -> None:
        register(world, [WRONG], heuristic=FAILS)
        assert ejkernel.explain("rms_norm", world.x).chosen == "busy"
        with pytest.warns(EjkernelWarning, match="no config of busy is right"):
            assert "busy" not in tuned(world, platform=("busy", "fixture"))
        decision = ejkernel.explain("rms_norm", world.x).forward
        assert decision.chosen.id == "fixture"
        busy = next(verdict for verdict in decision.verdicts if verdict.candidate.id == "busy")
        assert busy.verdict == "refused"
        assert busy.reasons[0].startswith(
            f"'busy' (rms_norm, forward): every config is quarantined: {FAILS}: {OUT_OF_REGISTERS}; "
        )
        with pytest.raises(ejkernel.NoKernelError, match=r"every config is quarantined.*ejkernel cache clear --quarantine"):
            ejkernel.rms_norm(world.x, platform="busy")
        # Who insists may.
        assert ejkernel.explain("rms_norm", world.x, platform="busy", cfg=SLOW).forward.tier == "override"

    def test_an_implementation_without_knobs(self, world: Any) -> None:
        def broken(call: Any, inputs: Any, config: None) -> Any:
            raise RuntimeError("no such instruction")

        ejkernel.kernel_registry.register("rms_norm", "plain", priority=3000)(broken)
        world.undo.append(lambda: ejkernel.kernel_registry.unregister("rms_norm", "plain"))
        with pytest.warns(EjkernelWarning, match="no config of plain is right"):
            tuned(world, platform=("plain", "fixture"))
        assert ejkernel.explain("rms_norm", world.x).chosen == "fixture"
        (file,) = tuning.cache_entries()
        assert (file.quarantined.config, file.quarantined.reason) == (None, "RuntimeError: no such instruction")


class TestTiers:
    def test_heuristic_steps_to_the_nearest(self, world: Any) -> None:
        block(world, 8)
        assert said(world) == (4, "heuristic", (line(world, 8),))
        block(world, 4, reason="wrong numbers")
        assert said(world) == (2, "heuristic", (line(world, 8), line(world, 4, "wrong numbers")))
        assert world.run().rows == 2

    def test_memory_takes_the_next_of_its_timings(self, world: Any) -> None:
        timings = tuple(tuning.Timing({"rows": r, "warps": 4}, (s,)) for r, s in ((1, 3.0), (2, 1.0), (4, 2.0)))
        failed = tuning.Timing({"rows": 16, "warps": 4}, (0.1,), "failed")
        tuning.remember(world.entry(2, timings=(*timings, failed)))
        assert said(world) == (2, "memory", ())
        block(world, 2)
        assert said(world) == (4, "memory", (line(world, 2),))
        block(world, 4)
        assert said(world) == (1, "memory", (line(world, 2), line(world, 4)))
        block(world, 1)
        assert said(world)[:2] == (8, "heuristic")

    def test_user_cache_and_shipped_table(self, world: Any) -> None:
        world.ship(world.entry(1))
        tuning.store(world.entry(2))
        assert said(world) == (2, "user cache", ())
        block(world, 2)
        assert said(world) == (1, "shipped table", (line(world, 2),))
        block(world, 1)
        assert said(world) == (8, "heuristic", (line(world, 2), line(world, 1)))

    def test_nearest_bucket_takes_the_next_nearest(self, world: Any) -> None:
        world.ship(world.entry(1, jnp.ones((64, 16))), world.entry(2, jnp.ones((160, 16))))
        x = jnp.ones((100, 16))
        assert said(world, x) == (1, "shipped table (nearest bucket: x float32[64,16])", ())
        block(world, 1, x=x)
        assert said(world, x) == (2, "shipped table (nearest bucket: x float32[160,16])", (line(world, 1),))

    def test_override_and_overlay_are_the_users_own(self, world: Any) -> None:
        result = tuning.AutotuningResult((world.entry(2),))
        block(world, *SPACE)
        assert said(world, platform="fixture", cfg=world.Blocks(8)) == (8, "override", ())
        with ejkernel.overlay({"rms_norm/fixture": world.Blocks(4)}):
            assert said(world, platform="fixture") == (4, "overlay", ())
        with result:
            assert said(world, platform="fixture") == (2, "overlay (autotuning result)", ())

    def test_compiled_programs_are_traced_again(self, world: Any) -> None:
        import jax

        program = jax.jit(ejkernel.rms_norm)
        program(world.x)
        block(world, 8)
        program(world.x)
        assert (world.seen[0].rows, world.seen[-1].rows) == (8, 4)
        seen = len(world.seen)
        program(world.x)
        assert len(world.seen) == seen


class TestRecords:
    def test_come_back_whole(self, world: Any) -> None:
        block(world, 8, reason="wrong\nnumbers é")
        (file,) = tuning.cache_entries()
        assert (file.state, file.entry, file.quarantined.reason) == ("ok", None, "wrong\nnumbers é")
        assert file.quarantined.key == file.key == world.key()
        assert Quarantined.from_dict(json.loads(json.dumps(file.quarantined.to_dict()))) == file.quarantined
        assert tuning.cache_info().quarantined == 1

    def test_of_one_call_from_several_writers_are_all_kept(self, world: Any) -> None:
        for rows in SPACE:
            block(world, rows)
        assert len(tuning.cache_entries()) == len(SPACE)

    @pytest.mark.parametrize("change", [{"jaxlib": "0.0.1"}, {"triton": "3.6.0"}])
    def test_of_other_versions_are_not_in_force(self, world: Any, change: dict[str, str]) -> None:
        block(world, 8)
        (file,) = tuning.cache_entries()
        tuning.clear_cache()
        record = dataclasses.replace(file.quarantined, versions={**file.quarantined.versions, **change})
        _quarantine.add([record])
        assert said(world) == (8, "heuristic", ())
        assert tuning.cache_info().states == {"other version": 1}

    @pytest.mark.parametrize("field", ["jax", "version", "device_kind"])
    def test_of_another_key_are_not_in_force(self, world: Any, field: str) -> None:
        block(world, 8)
        (file,) = tuning.cache_entries()
        tuning.clear_cache()
        key = dataclasses.replace(file.key, **{field: 99 if field == "version" else "another"})
        _quarantine.add([dataclasses.replace(file.quarantined, key=key)])
        assert said(world) == (8, "heuristic", ())

    @pytest.mark.filterwarnings("default")
    @pytest.mark.parametrize(
        "damage", [lambda text: text[:50], lambda text: "[" * 100_000, lambda text: text.replace("boom", "x").replace("8", "3")]
    )
    def test_damaged_file_is_ignored_with_one_warning(self, world: Any, damage: Callable[[str], str]) -> None:
        block(world, 8)
        (file,) = tuning.cache_entries()
        file.path.write_text(damage(file.path.read_text()))
        with pytest.warns(CacheWarning, match="ejkernel cache clear --quarantine") as caught:
            assert (world.run().rows, world.run().rows) == (8, 8)
        assert len(caught) == 1
        assert tuning.cache_info().states == {"unreadable": 1}
        assert tuning.clear_cache(quarantine=True) == 1

    @pytest.mark.filterwarnings("default")
    def test_hold_for_the_process_where_they_cannot_be_written(self, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        blocker = world.directory / "blocker"
        blocker.write_text("mine")
        monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(blocker / "cache"))
        with pytest.warns(CacheWarning) as caught:
            block(world, 8, 4)
        (said_once,) = [str(warning.message) for warning in caught if "written" in str(warning.message)]
        assert said_once.startswith(f"{blocker}/cache (writing): the tuning cache cannot be written (Not a directory)")
        assert said_once.endswith("EJKERNEL_CACHE_DIR name another folder")
        assert said(world) == (2, "heuristic", (line(world, 8), line(world, 4)))
        tuning.clear_cache()
        assert said(world) == (8, "heuristic", ())

    def test_are_cleared_by_themselves(self, world: Any) -> None:
        tuning.store(world.entry(2))
        block(world, 2)
        assert tuning.cache_info().count == 2
        assert tuning.clear_cache(quarantine=False) == 1
        assert said(world) == (8, "heuristic", ())
        tuning.store(world.entry(2))
        assert tuning.clear_cache("softmax", quarantine=True) == 0
        assert said(world)[1] == "heuristic"
        assert tuning.clear_cache("rms_norm", quarantine=True) == 1
        assert said(world) == (2, "user cache", ())
        block(world, 2)
        (leftover,) = [folder / f".{'0' * 64}.abc.tmp" for folder in _quarantine.folders()]
        leftover.write_text("half a rec")
        assert tuning.clear_cache() == 2
        assert [path for path in (world.directory / "cache").rglob("*") if path.is_file()] == []
        assert _quarantine.folders() == []


def ship(world: Any, *records: Quarantine, platform: str = "fixture") -> None:
    """Install a plugin that warns of configs."""
    from ejkernel import kernel_registry
    from ejkernel._plugins.records import PluginRecord

    record = PluginRecord(platform, "ejkernel-fixture", "1.0", "fixture_plugin", "ok", quarantine=records)
    kernel_registry.load([*kernel_registry.records, record])


class TestShipped:
    @pytest.mark.parametrize(
        ("fields", "rows"),
        [
            ({"config": {"rows": 8}}, 4),
            ({"config": {"rows": (8, 4)}}, 2),
            ({"config": {"rows": ">=4"}}, 2),
            ({"config": {"rows": ">2,<=8"}}, 2),
            ({"config": {"rows": "!=1"}}, 1),
            ({"config": {"rows": 8, "warps": 4}}, 4),
            ({"config": {"rows": 8, "warps": 2}}, 8),
            ({"config": {"rows": 8, "stages": 2}}, 8),
            ({"config": {"rows": 8}, "phase": "forward"}, 4),
            ({"config": {"rows": 8}, "phase": "backward"}, 8),
            ({"config": {"rows": 8}, "versions": {"jax": ">=0.4"}}, 4),
            ({"config": {"rows": 8}, "versions": {"jax": ">=0.4", "numpy": "<1"}}, 8),
            ({"config": {"rows": 8}, "versions": {"not-installed": ">=0"}}, 8),
            ({"config": {"rows": 8}, "capability": ">=9.0"}, 8),
            ({"config": {"rows": 8}, "call": {"x": "float32"}}, 4),
            ({"config": {"rows": 8}, "call": {"x": ("bfloat16", "float16")}}, 8),
            ({"config": {"rows": 8}, "call": {"epsilon": "<1"}}, 4),
            ({"config": {"rows": 8}, "variant": "other"}, 8),
        ],
    )
    def test_conditions(self, world: Any, fields: dict[str, Any], rows: int) -> None:
        ship(world, Quarantine("rms_norm", "miscompiled", **fields))
        assert said(world)[:2] == (rows, "heuristic")
        assert all(text.endswith(": miscompiled") for text in said(world)[2])
        assert len(said(world)[2]) == {8: 0, 4: 1, 2: 2, 1: 3}[rows]

    def test_capability(self, world: Any) -> None:
        ship(world, Quarantine("rms_norm", "miscompiled", {"rows": 8}, capability=">=9.0,<10"))
        for target, rows in (("gpu:9.0", 4), ("gpu:8.9", 8), ("gpu:10.0", 8), ("gpu", 8)):
            with ejkernel.use(target=target):
                assert said(world, platform="fixture")[0] == rows

    def test_stored_entries_give_way(self, world: Any) -> None:
        tuning.store(world.entry(8))
        ship(world, Quarantine("rms_norm", "miscompiled", {"rows": 8}))
        assert said(world) == (4, "heuristic", (line(world, 8, "miscompiled"),))

    def test_are_not_even_tried(self, world: Any) -> None:
        register(world, [SLOW], heuristic=QUICK)
        ship(world, Quarantine("rms_norm", "hangs", {"loops": 0}), platform="busy")
        entry = tuned(world, retry=True)["busy"]
        assert entry.config == {"loops": SLOW.loops}
        assert entry.timings[0].failure == "quarantined: hangs"
        assert tuning.cache_entries() == []

    def test_speak_of_their_own_platform_only(self, world: Any) -> None:
        ship(world, Quarantine("rms_norm", "slander"), platform="acme")
        assert said(world) == (8, "heuristic", ())

    def test_every_config(self, world: Any) -> None:
        world.register(platform="slow", priority=1)
        ship(world, Quarantine("rms_norm", "crashes the driver"))
        decision = ejkernel.explain("rms_norm", world.x).forward
        assert decision.chosen.id == "slow"
        refused = next(verdict for verdict in decision.verdicts if verdict.candidate.id == "fixture")
        assert "and 1 more" in refused.reasons[0]


_BOTH = """
import sys
from ejkernel import tuning
from ejkernel.configs import quarantine as _quarantine
worker = int(sys.argv[1])
key = tuning.Key("rms_norm", "forward", "fixture", 1, "{}", "cpu", "cpu", "", "0.0.0", "0.1")
for number in range(30):
    for rows in (100 * worker + number, number):
        _quarantine.add([tuning.Quarantined(key, {"rows": rows}, "x" * 5000)])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts eight processes, which takes too long elsewhere")
def test_eight_processes_lose_none(world: Any) -> None:
    workers = [subprocess.Popen([sys.executable, "-W", "error", "-c", _BOTH, str(worker)]) for worker in range(1, 9)]
    assert [worker.wait(timeout=300) for worker in workers] == [0] * 8
    found = tuning.cache_entries()
    assert {file.quarantined.config["rows"] for file in found} == {
        *range(30),
        *(100 * worker + number for worker in range(1, 9) for number in range(30)),
    }
    assert {file.state for file in found} == {"other version"}
