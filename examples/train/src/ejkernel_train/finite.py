"""What happens when a run diverges: it ends with an error, and what it saved before stays.

Loss and norm of the gradient are two scalars of the step that the host reads anyway. Parameters that are not finite give a loss
that is not, one step later; so the state is looked at where it is saved, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_train.checkpoint import Checkpoints
from ejkernel_train.config import TrainConfig

MOST_SKIPPED = 10
"""Steps one after the other that `on_nonfinite="skip"` leaves out. A run that goes on like this learns nothing any more."""


class NotFiniteError(ArithmeticError):
    """A loss, a gradient or a parameter is NaN or infinite."""


def check(
    config: TrainConfig, step: int, losses: Sequence[float], norms: Sequence[float], checkpoints: Checkpoints | None
) -> None:
    """Of the step that was just taken; the last of `losses` and `norms` are its.

    Raises:
        NotFiniteError: one of them is not finite, and the step may not be skipped.
    """
    if _are_finite(losses[-1], norms[-1]):
        return
    found = f"step {step} by {config.kernels}: the loss is {losses[-1]}, and the norm of its gradient {norms[-1]}"
    if config.on_nonfinite == "stop":
        raise NotFiniteError(f"{found}. {_advice(checkpoints)}")
    recent = [*zip(losses, norms, strict=True)][-MOST_SKIPPED:]
    if len(recent) == MOST_SKIPPED and not any(_are_finite(*each) for each in recent):
        raise NotFiniteError(f"{found}, as of {MOST_SKIPPED} steps that were skipped before. {_advice(checkpoints)}")


def check_state(state: Any, step: int, checkpoints: Checkpoints | None) -> None:
    """Of a state that is to be saved.

    Raises:
        NotFiniteError: a parameter or a moment is not finite.
    """
    if not bool(_ALL_FINITE(state)):
        raise NotFiniteError(f"step {step}: parameters after it are not finite, so they are not saved. {_advice(checkpoints)}")


def _state_is_finite(state: Any) -> jax.Array:
    arrays = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in arrays]))


_ALL_FINITE = jax.jit(_state_is_finite)


def _are_finite(loss: float, norm: float) -> bool:
    return math.isfinite(loss) and math.isfinite(norm)


def _advice(checkpoints: Checkpoints | None) -> str:
    kept = ", ".join(str(step) for step in checkpoints.steps()) if checkpoints else ""
    saved = f"Checkpoints of steps {kept} are kept; if the newest diverges again, remove its folder. " if kept else ""
    return f"{saved}Try a lower --learning-rate, a longer --warmup, or --on-nonfinite skip"
