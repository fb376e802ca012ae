"""Muon in the trainer: it learns, on devices and in layers of either form, and goes on from a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from ejkernel_train import data, report
from ejkernel_train.checkpoint import Checkpoints
from ejkernel_train.config import MODELS, TrainConfig
from ejkernel_train.step import initialise, orthogonalized, split

TINY = TrainConfig(optimizer="muon", dtype="float32", steps=16, length=64)


@functools.cache
def losses(config: TrainConfig) -> np.ndarray:
    return np.asarray(report.run([config], data.load())["builds"][0]["losses"])


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_falls(model: str):
    found = losses(dataclasses.replace(TINY, model=model))
    assert found[-4:].mean() < found[0] - 0.5  # those of single batches differ by 0.1


MESH = "data=2,fsdp=2,tensor=2"


@pytest.mark.parametrize(
    ("model", "changed"), [("llama", {"layers": "unroll"}), ("llama", {"mesh": MESH}), ("moe", {"mesh": MESH})], ids=str
)
def test_layers_and_devices_change_little(model: str, changed: dict[str, str]):
    """Steps of the iteration round to bfloat16, and magnify that."""
    config = dataclasses.replace(TINY, model=model)
    np.testing.assert_allclose(losses(dataclasses.replace(config, **changed)), losses(config), atol=0.03, rtol=0)


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_resuming(layers: str, tmp_path: Path):
    """Exact, and close with layers in the other form."""
    config = dataclasses.replace(TINY, steps=8)
    with Checkpoints(tmp_path) as checkpoints:
        build = report.Build(config)
        for step in range(4):
            build.advance(data.batch(data.load(), config.seed, step, config.batch, config.length))
        checkpoints.save(4, build.state)
    with Checkpoints(tmp_path) as checkpoints:
        then = report.run([dataclasses.replace(config, layers=layers)], data.load(), checkpoints=checkpoints, save_every=4)
    found = [*build.losses, *then["builds"][0]["losses"]]
    np.testing.assert_allclose(found, losses(config), rtol=0, atol=0 if layers == "scan" else 0.01)


def test_which_leaves_are_orthogonalised():
    """Matrices of blocks have one moment, all else the two of AdamW."""
    weights = split(jax.eval_shape(lambda: initialise(dataclasses.replace(TINY, model="mamba2"))).model)[0]
    chosen = jax.tree_util.tree_leaves_with_path(orthogonalized(weights))
    names = {jax.tree_util.keystr(path).rpartition(".blocks[0].")[2] for path, one in chosen if one}
    assert names == {f"mixer.{name}.weight" for name in ("mixed", "z", "step", "output")}
    moments = jax.eval_shape(lambda: initialise(dataclasses.replace(TINY, model="mamba2"))).moments
    held = [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(moments) if leaf.ndim]
    assert sum("'muon'" in name for name in held) == len(names)
    assert sum("'adam'" in name for name in held) == 2 * (len(chosen) - len(names))
