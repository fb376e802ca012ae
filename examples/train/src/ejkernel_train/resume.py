"""A run that goes on from a checkpoint of another mesh, or of layers that were kept in another form."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax

from ejkernel_train.checkpoint import SIZES, Checkpoints
from ejkernel_train.config import ModelConfig, TrainConfig
from ejkernel_train.model import Model, restacked
from ejkernel_train.sharding import Layout
from ejkernel_train.step import State, initialise


def resume(config: TrainConfig, state: State, checkpoints: Checkpoints) -> State:
    """The newest checkpoint, lying where `state` lies and in its form; `state` if there is none.

    Raises:
        ValueError: as `Checkpoints.restore`.
    """
    other = dataclasses.replace(config, layers="unroll" if state.model.stacked else "scan")
    shapes = jax.eval_shape(lambda: initialise(other))
    shardings = Layout.parse(config.mesh).shardings(shapes)
    if shardings is not None:
        shapes = jax.tree.map(lambda leaf, where: leaf.update(sharding=where), shapes, shardings)
    found = checkpoints.restore(state, shapes)
    if found.model.stacked == state.model.stacked:
        return found
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(partial(_restacked, stacked=state.model.stacked), out_shardings=where)(found)


def model_of(folder: Path) -> Model:
    """That of the newest checkpoint of a folder, in float32, its blocks stacked.

    Raises:
        ValueError: as `Checkpoints.restore`, or there is none that says of which sizes it is.
    """
    if not folder.is_dir():
        raise ValueError(f"--checkpoint {folder} is no folder; give what ejkernel_train got as --checkpoints")
    with Checkpoints(folder) as checkpoints:
        sizes: dict[str, Any] | None = checkpoints.saved_settings().get(SIZES)
        if sizes is None:
            raise ValueError(f"--checkpoint {folder} has no checkpoint that says of which sizes it is")
        sizes["pattern"] = tuple(sizes["pattern"])
        config = TrainConfig(given=ModelConfig(**sizes), float8=sizes["float8"])
        return resume(config, initialise(config), checkpoints).model


def _restacked(state: State, stacked: bool) -> State:
    """With its moments, which have the form of the model."""

    def change(part: Any) -> Any:
        return restacked(part, stacked) if isinstance(part, Model) else part

    return jax.tree.map(change, state, is_leaf=lambda part: isinstance(part, Model))
