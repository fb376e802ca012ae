"""The loss on what is not learnt, between the steps of a run, which it changes nothing of."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_train import data
from ejkernel_train.config import TrainConfig
from ejkernel_train.data import IGNORED, Packed
from ejkernel_train.model import Model
from ejkernel_train.operations import choose
from ejkernel_train.sharding import placed
from ejkernel_train.step import layout_of


class Evaluated(NamedTuple):
    """After a step: the mean cross entropy in nats per label, `exp` of that, and how many labels there are."""

    step: int
    loss: float
    perplexity: float
    labels: int


class Evaluation:
    """The held-out rows of a run, and the program that runs so many of them at once as a part of a step has."""

    def __init__(self, config: TrainConfig, held_out: data.Source) -> None:
        rows = held_out if isinstance(held_out, Packed) else data.windows(held_out, config.length)
        size = config.batch // config.accumulate
        missing = -len(rows.tokens) % size
        filled = [
            None if each is None else np.pad(each, ((0, missing), (0, 0)), constant_values=value)
            for each, value in zip(rows, (0, IGNORED, -1), strict=True)
        ]
        batches = range(0, len(rows.tokens), size)
        self._batches = [
            Packed(*(None if each is None else each[first : first + size] for each in filled)) for first in batches
        ]
        operations, layout = choose(config.kernels, config.plain), layout_of(config)

        def cross_entropy(model: Model, rows: Packed) -> tuple[jax.Array, jax.Array]:
            return model.losses(rows, operations, config.dtype, layout)[0], jnp.sum(rows.labels != IGNORED)

        self._batch = layout.batch()
        self._run = jax.jit(cross_entropy)

    def __call__(self, model: Model, step: int) -> Evaluated:
        total, number = 0.0, 0
        for batch in self._batches:
            loss, labels = self._run(model, placed(batch, self._batch))
            total, number = total + float(loss) * int(labels), number + int(labels)
        loss = total / number
        return Evaluated(step, loss, math.exp(min(loss, 700.0)), number)


def as_record(each: Evaluated) -> dict[str, Any]:
    """JSON has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in each._asdict().items()}
