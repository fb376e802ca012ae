"""Recording the calls of a program, autotuning results and installing a tuner."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel import tuning

pytestmark = pytest.mark.filterwarnings("error")


def _calls(function: Any, *args: Any) -> list[tuple[str, tuple[int, ...], bool]]:
    return [(c.phase, c.request.call.x.shape, c.request.call.save_residuals) for c in tuning.record_calls(function, *args)]


def _loss(x: Any) -> Any:
    return ejkernel.rms_norm(x).sum()


X = jnp.ones((2, 3, 4))


def test_plain_call(world: Any) -> None:
    (call,) = tuning.record_calls(ejkernel.rms_norm, world.x)
    assert (call.request.operation.name, call.phase, call.chosen.id) == ("rms_norm", "forward", "fixture")
    assert (call.config, call.tier, call.request.call.x.shape) == (world.Blocks(), "heuristic", (3, 4))


def test_gradient_records_both_phases_and_not_the_plain_forward(world: Any) -> None:
    world.register("backward")
    assert _calls(jax.grad(_loss), X) == [("forward", (2, 3, 4), True), ("backward", (2, 3, 4), True)]


def test_mapped_call_records_the_folded_batch_only(world: Any) -> None:
    world.register("backward")
    assert _calls(jax.vmap(_loss), X) == [("forward", (6, 4), False)]
    assert _calls(jax.vmap(jax.grad(_loss)), X) == [("forward", (6, 4), True), ("backward", (6, 4), True)]


def test_scan_jit_checkpoint_and_cond(world: Any) -> None:
    world.register("backward")

    def program(x: Any) -> Any:
        x = jax.lax.scan(lambda carry, _: (jax.jit(ejkernel.rms_norm)(carry), None), x, None, length=3)[0]
        return jax.lax.cond(x[0, 0, 0] > 0, lambda x: ejkernel.rms_norm(x[0]), lambda x: x[0], x).sum()

    assert _calls(program, X) == [("forward", (2, 3, 4), False), ("forward", (3, 4), False)]
    expected = [("forward", (2, 3, 4), True), ("backward", (2, 3, 4), True)]
    assert sorted(_calls(jax.grad(jax.checkpoint(_loss)), X)) == sorted(expected)


def test_what_was_compiled_before_is_recorded_again(world: Any) -> None:
    program = jax.jit(ejkernel.rms_norm)
    program(world.x)
    assert _calls(program, world.x) == _calls(program, world.x) == [("forward", (3, 4), False)]


def test_recording_computes_nothing_and_leaves_no_mark(world: Any) -> None:
    tuning.record_calls(ejkernel.rms_norm, jax.ShapeDtypeStruct((3, 4), "float32"))
    program = str(jax.make_jaxpr(ejkernel.rms_norm)(world.x).jaxpr.pretty_print(name_stack=True))
    assert "ejkernel.rms_norm[fixture]" in program
    assert "ejkernel.rms_norm[fixture]#" not in program


def test_program_without_calls() -> None:
    assert tuning.record_calls(jnp.sin, 1.0) == ()


def _variant(entry: tuning.Entry, version: int) -> tuning.Entry:
    return dataclasses.replace(entry, key=dataclasses.replace(entry.key, version=version))


def test_merge(world: Any) -> None:
    one, two, newer = world.entry(1), _variant(world.entry(2), 2), world.entry(3)
    merged = tuning.AutotuningResult((one, two)) | tuning.AutotuningResult((newer,))
    assert merged.entries == (newer, two)
    with pytest.raises(ValueError, match="two entries of one key"):
        tuning.AutotuningResult((one, newer))


def test_json(world: Any) -> None:
    result = tuning.AutotuningResult((world.entry(1), _variant(world.entry(2), 2)))
    again = tuning.AutotuningResult.loads(result.dumps())
    assert (again, hash(again)) == (result, hash(result))
    path = world.directory / "result.json"
    result.save(path)
    assert tuning.AutotuningResult.load(path) == result
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"result\.json: not 'ejkernel tuned configs'"):
        tuning.AutotuningResult.load(path)


def test_blocks_nest_and_compiled_programs_follow(world: Any) -> None:
    one, two = (tuning.AutotuningResult((world.entry(rows),)) for rows in (1, 2))
    world.seen.clear()
    program = jax.jit(ejkernel.rms_norm)
    with one:
        program(world.x)
        with two:
            program(world.x)
            with one:
                program(world.x)
        program(world.x)
    program(world.x)
    assert [config.rows for config in world.seen] == [1, 2, 1, 8]
    assert ejkernel.explain("rms_norm", world.x).forward.tier == "heuristic"


def test_block_is_left_by_an_error(world: Any) -> None:
    with pytest.raises(KeyError), tuning.AutotuningResult((world.entry(1),)):
        raise KeyError("inside")
    assert world.tier() == "heuristic"


def test_result_chooses_the_platform(world: Any) -> None:
    world.register(platform="slow", priority=1)
    with tuning.AutotuningResult((world.entry(3, key=world.key(implementation="slow"), best="slow"),)):
        assert ejkernel.explain("rms_norm", world.x).chosen == "slow"
    assert ejkernel.explain("rms_norm", world.x).chosen == "fixture"


def test_remember_and_store(world: Any) -> None:
    result = tuning.AutotuningResult((world.entry(5),))
    assert result.store() == 1
    assert world.tier() == "user cache"
    result.remember()
    assert world.tier() == "memory"


def test_autotune_hands_the_calls_to_the_tuner(world: Any) -> None:
    class Fixed:
        def tune(self, calls: Sequence[tuning.RecordedCall]) -> tuning.AutotuningResult:
            keys = [tuning.Key.of(call.request, call.phase, call.chosen) for call in calls]
            return tuning.AutotuningResult(tuple(world.entry(4, key=key) for key in keys))

    tuning.install_tuner(Fixed())
    result = ejkernel.autotune(ejkernel.rms_norm, world.x)
    assert [entry.key for entry in result.entries] == [world.key()]
    assert world.tier() == "heuristic"
    with result:
        assert world.run() == world.Blocks(4)
