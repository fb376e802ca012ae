"""What a run must not lose: its last finite state, and the bits of its checkpoints. And what it refuses before it starts."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_train import __main__ as command, checkpoint, data, finite, report
from ejkernel_train.checkpoint import SEAL, Checkpoints, DamagedError
from ejkernel_train.config import TrainConfig
from ejkernel_train.model import Model

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Orbax leaves coroutines that it never awaits where a checkpoint cannot be read."""

SMALL = ["--batch", "1", "--length", "16", "--dtype", "float32", "--kernels", "plain"]
STATE = {"a": jnp.arange(1000.0), "step": jnp.zeros((), jnp.int32)}


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise AssertionError("a step was compiled")

    monkeypatch.setattr(report, "run", run)


@pytest.fixture(autouse=True, scope="module")
def _leave_no_coroutines() -> Iterator[None]:
    yield
    gc.collect()  # here, where they are expected


def steps_of(folder: Path) -> list[int]:
    return sorted(int(each.name) for each in folder.iterdir() if each.name.isdecimal())


def test_a_run_that_diverges_keeps_its_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved = [*SMALL, "--checkpoints", str(tmp_path / "run"), "--save-every", "2"]
    assert command.main([*saved, "--steps", "4"]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "4").rglob("*") if path.is_file()}
    out = tmp_path / "record.json"
    assert command.main([*saved, "--steps", "12", "--learning-rate", "1e30", "--out", str(out)]) == 3
    said = capsys.readouterr().err
    assert (
        "error: step 6 by plain: the loss is" in said and "the norm of its gradient nan. Checkpoints of steps 4, 2 are" in said
    )
    assert "of a run with --learning-rate 0.003, and this one has 1e+30" in said
    assert steps_of(tmp_path / "run") == [2, 4] and not out.exists()
    assert {path: path.read_bytes() for path in before} == before
    assert command.main([*saved, "--steps", "6"]) == 0
    assert steps_of(tmp_path / "run") == [4, 6]


@pytest.fixture
def sometimes_nan(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A model whose loss is NaN if the batch begins with the token 7. Returns a text without any."""
    loss = Model.loss

    def nan_of_seven(self: Model, window: jax.Array, *arguments: Any, **named: Any) -> jax.Array:
        return jnp.where(window[0, 0] == 7, jnp.nan, loss(self, window, *arguments, **named))

    monkeypatch.setattr(Model, "loss", nan_of_seven)
    return np.arange(8, 200, dtype=np.int32)


def test_a_step_is_skipped(sometimes_nan: np.ndarray):
    """It changes nothing but the number of the step; too many in a row end the run."""
    config = TrainConfig(batch=1, length=16, dtype="float32", kernels="plain", on_nonfinite="skip", steps=40)
    build = report.Build(config)
    good = data.batch(sometimes_nan, 0, 0, 1, 16)
    bad = np.where(np.arange(17) == 0, 7, good).astype(np.int32)
    build.advance(good)
    before = jax.tree.map(np.asarray, build.state)
    build.advance(bad)
    for old, new in zip(jax.tree.leaves((before.model, before.moments)), jax.tree.leaves(build.state[:2]), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(build.state.step) == 2
    build.advance(good)
    assert np.isfinite(build.losses).tolist() == [True, False, True]
    finite.check(config, 3, build.losses, build.norms, None)
    finite.check(config, 2, build.losses[:2], build.norms[:2], None)
    assert build.record(None, 0, [1.0])["losses"] == [build.losses[0], None, build.losses[2]]
    nan, one = float("nan"), 1.0
    finite.check(config, 10, [one, *[nan] * 9], [one] * 10, None)
    with pytest.raises(finite.NotFiniteError, match=r"step 11 by plain: the loss is nan, .* as of 10 steps"):
        finite.check(config, 11, [one, *[nan] * 10], [one] * 11, None)
    with pytest.raises(finite.NotFiniteError, match="norm of its gradient inf"):
        finite.check(dataclasses.replace(config, on_nonfinite="stop"), 1, [one], [float("inf")], None)


def test_the_norm_is_that_of_the_gradient():
    config = TrainConfig(batch=1, length=16, dtype="float32", kernels="plain")
    build = report.Build(config)
    window, model = data.batch(data.load(), 0, 0, 1, 16), build.state.model
    from ejkernel_train.operations import choose
    from ejkernel_train.sharding import Layout

    gradient = jax.grad(lambda model: model.loss(window, choose("plain"), "float32", Layout()))(model)
    wanted = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradient)))
    build.advance(window)
    assert build.norms == pytest.approx([wanted], rel=1e-5)


def test_a_state_that_is_not_finite_is_not_saved():
    finite.check_state(STATE, 3, None)
    with pytest.raises(finite.NotFiniteError, match="step 3: parameters after it are not finite"):
        finite.check_state({**STATE, "a": STATE["a"].at[7].set(jnp.inf)}, 3, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With checkpoints of steps 2 and 4."""
    with Checkpoints(tmp_path) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, {**STATE, "step": jnp.int32(step)})
    assert all((tmp_path / str(step) / SEAL).is_file() for step in (2, 4))
    return tmp_path


def restored(folder: Path) -> int:
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(STATE)
    np.testing.assert_array_equal(found["a"], STATE["a"])
    return int(found["step"])


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a flipped bit": lambda step: flip(largest(step)),
    "half a file": lambda step: os.truncate(largest(step), 100),
    "no file": lambda step: largest(step).unlink(),
    "a damaged seal": lambda step: (step / SEAL).write_text("{"),
    "a seal of something else": lambda step: (step / SEAL).write_text("[]"),
    "damaged metadata": lambda step: flip(step / "_CHECKPOINT_METADATA"),
    "half a file, and no seal": lambda step: (os.truncate(largest(step), 100), (step / SEAL).unlink()),
}


@pytest.mark.unsampled
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_newest_is_damaged(folder: Path, damage: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]):
    """It is named, and the one before is read; a later run's checkpoint of that step takes its place."""
    assert restored(folder) == 4
    damage(folder / "4")
    assert restored(folder) == 2
    said = capsys.readouterr().err
    assert f"warning: the checkpoint {folder / '4'} is damaged" in said and "going on from step 2" in said
    with Checkpoints(folder) as checkpoints:
        checkpoints.restore(STATE)
        checkpoints.save(4, {**STATE, "step": jnp.int32(44)})
    assert restored(folder) == 44 and (folder / "damaged-4").is_dir()


def test_all_are_damaged(folder: Path):
    for step in ("2", "4"):
        flip(largest(folder / step))
    with Checkpoints(folder) as checkpoints, pytest.raises(DamagedError) as error:
        checkpoints.restore(STATE)
    assert all(str(folder / step) in str(error.value) for step in ("2", "4"))
    assert steps_of(folder) == [2, 4]


def test_a_checkpoint_without_a_seal(folder: Path, capsys: pytest.CaptureFixture[str]):
    """As a run leaves it that is killed while it writes one."""
    (folder / "4" / SEAL).unlink()
    assert restored(folder) == 4
    assert f"the checkpoint of step 4 has no {SEAL}" in capsys.readouterr().err


def test_settings_of_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = {"--model": "llama", "--seed": 0, "--text": "9 tokens"}
    with Checkpoints(tmp_path, settings=settings) as checkpoints:
        checkpoints.save(1, STATE)
    for other, said in [({}, ""), ({"--seed": 1}, "--seed 0, and this one has 1"), ({"--text": "8 tokens"}, "--text 9 tokens")]:
        with Checkpoints(tmp_path, settings={**settings, **other}) as checkpoints:
            checkpoints.restore(STATE)
        found = capsys.readouterr().err
        assert said in found and bool(found) == bool(said)
    with (
        Checkpoints(tmp_path, settings={**settings, "--model": "moe"}) as checkpoints,
        pytest.raises(ValueError, match="with --model llama, and this one has moe; give the same, or another folder"),
    ):
        checkpoints.restore(STATE)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="is of another model"):
        checkpoints.restore({"a": jnp.zeros(3), "step": STATE["step"]})
    with pytest.raises(ValueError, match="keep is 1; give at least 2"):
        Checkpoints(tmp_path, keep=1)


BAD = [
    ("--steps 0", "--steps is 0"),
    ("--steps -3", "--steps is -3"),
    ("--batch 4 --accumulate 3", "--batch is 4; make it a multiple of --accumulate, 3"),
    ("--batch 0", "--batch is 0"),
    ("--length 0", "--length is 0"),
    ("--length 9999999", "--length is 9999999, and a window needs a token more"),
    ("--seed -1", "--seed is -1"),
    ("--seed 99999999999", "--seed is 99999999999"),
    ("--warmup -1", "--warmup is -1"),
    ("--learning-rate nan", "--learning-rate is nan"),
    ("--learning-rate inf", "--learning-rate is inf"),
    ("--learning-rate 0", "--learning-rate is 0"),
    ("--learning-rate -0.1", "--learning-rate is -0.1"),
    ("--save-every 0", "--save-every is 0"),
    ("--save-every -1", "--save-every is -1"),
    ("--peak nan", "--peak is nan"),
    ("--peak 0", "--peak is 0"),
    ("--plain rop", "no operation is called rop"),
    ("--text nowhere", "--text nowhere is no file"),
    ("--text FOLDER", "is no file that can be read"),
    ("--out FOLDER", "is no file that can be written"),
    ("--out FOLDER/nowhere/record.json", "--out: FOLDER/nowhere is no folder"),
    ("--out FILE/record.json", "--out: FILE is no folder"),
    ("--checkpoints FILE", "--checkpoints FILE is a file; give a folder"),
    ("--checkpoints FILE/run", "--checkpoints: FILE is no folder"),
    ("--checkpoints FOLDER/run --compare", "--checkpoints are of one build"),
    ("--mesh data=0", "--mesh has 'data=0'"),
    ("--mesh data", "--mesh has 'data'"),
    ("--mesh rows=2", "--mesh has 'rows=2'"),
    ("--mesh data=64", "needs 64 devices"),
    ("--mesh data=8", "--batch is 4; make it a multiple of the 8 devices"),
    ("--mesh tensor=3", "--mesh has tensor=3; make it a divisor of 64"),
    ("--mesh fsdp=3 --batch 3", "--mesh has fsdp=3; make it a divisor of 64"),
    ("--model moe --mesh expert=8 --batch 8", "--mesh has expert=8; make it a divisor of the model's 4 experts"),
    ("--coordinator nowhere", "--coordinator is 'nowhere'; write HOST:PORT"),
    ("--coordinator localhost:1 --processes 2", "--processes and --process are given together"),
    ("--coordinator localhost:1 --processes 2 --process 2", "--process is 2; give a number in [0, 2)"),
    ("--coordinator localhost:1 --processes 0 --process 0", "--processes is 0"),
    ("--processes 2", "--processes is given without --coordinator"),
]


@pytest.mark.unsampled
@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(("asked", "said"), BAD)
def test_what_is_refused_before_training(asked: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()

    def placed(text: str) -> str:
        return text.replace("FOLDER", str(tmp_path)).replace("FILE", str(tmp_path / "file"))

    assert command.main(placed(asked).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and placed(said) in error
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_words_of_a_config():
    for field in ("model", "size", "kernels", "dtype", "remat", "layers", "on_nonfinite"):
        with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} is 'other'; give one of"):
            TrainConfig(**{field: "other"})
    for field in ("clip", "weight_decay"):
        with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} is -1.0"):
            TrainConfig(**{field: -1.0})


def test_without_orbax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("No module named 'orbax'")

    monkeypatch.setattr(checkpoint.Checkpoints, "__init__", missing)
    assert command.main([*SMALL, "--checkpoints", str(tmp_path / "run")]) == 2
    assert "pip install ejkernel-train[checkpoints]" in capsys.readouterr().err


def test_the_record_is_json_of_everybody(tmp_path: Path):
    out = tmp_path / "record.json"
    assert command.main([*SMALL, "--steps", "1", "--out", str(out)]) == 0
    json.loads(out.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
