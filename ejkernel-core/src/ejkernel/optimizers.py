"""Muon for optax: matrices move along their orthogonalised momentum, other parameters by AdamW.

Arguments are named and mean what they do in `optax.contrib.muon`, and so do the numbers. Here `newton_schulz` orthogonalises, all
matrices of one shape in one call, and leading axes are a batch, as of layers in one array. This module needs optax.

Sources: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is scalable for LLM
training, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ejkernel import typing as t
from ejkernel.errors import invalid
from ejkernel.modules.matmuls import newton_schulz

__all__ = ["MuonState", "muon", "orthogonalize", "scale_by_muon", "scale_by_shape"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """State of `scale_by_muon`: steps so far, and the momentum."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] - optax's name
    mu: Any


def orthogonalize(tree: Any, **options: Any) -> Any:
    """`newton_schulz` of every leaf `[..., M, N]`, in one call for all of one shape and dtype; options are its own."""
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf.ndim < 2:
            raise invalid("updates", f"a leaf of shape {leaf.shape}", "[..., M, N]", remedy="leave it to another optimizer")
        alike.setdefault((leaf.shape[-2:], leaf.dtype), []).append(index)
    for (shape, _), places in alike.items():
        parts = [leaves[place].reshape(-1, *shape) for place in places]
        found = newton_schulz(jnp.concatenate(parts) if len(parts) > 1 else parts[0], **options)
        first = 0
        for place, part in zip(places, parts, strict=True):
            leaves[place] = found[first : first + len(part)].reshape(leaves[place].shape)
            first += len(part)
    return jax.tree.unflatten(structure, leaves)


def scale_by_muon(
    ns_coeffs: t.Coefficients = _COEFFICIENTS,
    ns_steps: int | None = None,
    beta: float = 0.95,
    eps: float = 1e-8,
    mu_dtype: t.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    dtype: t.DTypeLike = "bfloat16",
    platform: t.Platforms = None,
) -> optax.GradientTransformation:
    """The orthogonalised momentum of updates, all of them `[..., M, N]`.

    Args:
        ns_coeffs, ns_steps, eps, dtype, platform: `coefficients`, `steps` and the rest of `newton_schulz`.
        beta: decay of the momentum, whose bias is corrected.
        mu_dtype: of the momentum; None: of the parameters.
        nesterov: look one step ahead.
    """

    def init(params: Any) -> Any:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=mu_dtype), params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count: Any = optax.safe_increment(state.count)
        seen, ahead = (1 - beta ** (count + more).astype(jnp.float32) for more in (0, 1))  # weights of the momentum in all

        def moved(m: Any, g: Any) -> Any:
            if not nesterov:
                return m / seen.astype(m.dtype)
            return beta * m / ahead.astype(m.dtype) + (1 - beta) * g / seen.astype(g.dtype)

        mu = jax.tree.map(lambda m, g: beta * m.astype(g.dtype) + (1 - beta) * g, state.mu, updates)
        moved_all = jax.tree.map(moved, mu, updates)
        found = orthogonalize(moved_all, steps=ns_steps, coefficients=ns_coeffs, eps=eps, dtype=dtype, platform=platform)
        return found, MuonState(count, jax.tree.map(lambda m, before: m.astype(before.dtype), mu, state.mu))

    return optax.GradientTransformation(init, update)


def scale_by_shape(consistent_rms: float | None = None) -> optax.GradientTransformation:
    """Matrices `[..., M, N]` of layers `x W` times `sqrt(max(1, N / M))` (Jordan), or `consistent_rms * sqrt(max(M, N))` (Liu)."""

    def factor(rows: int, columns: int) -> float:
        return math.sqrt(max(1, columns / rows)) if consistent_rms is None else consistent_rms * math.sqrt(max(rows, columns))

    def scale(updates: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda leaf: leaf * factor(*leaf.shape[-2:]), updates)

    return optax.stateless(scale)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: t.Coefficients = _COEFFICIENTS,
    ns_steps: int | None = None,
    beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: t.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps_root: float = 0.0,
    adam_weight_decay: float = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    consistent_rms: float | None = None,
    matrices: Callable[[Any], Any] | None = None,
    dtype: t.DTypeLike = "bfloat16",
    platform: t.Platforms = None,
) -> optax.GradientTransformation:
    """Muon for matrices, AdamW for all else.

    Args:
        learning_rate: of both, a number or a schedule.
        ns_coeffs, ns_steps, beta, eps, mu_dtype, nesterov, dtype, platform: as in `scale_by_muon`; eps, mu_dtype and nesterov are
            AdamW's too.
        weight_decay, weight_decay_mask: of matrices, times the learning rate.
        adam_*: of AdamW; its learning rate is Muon's if None.
        consistent_rms: 0.2 gives updates the size of AdamW's, whose learning rate and weight decay then fit (Liu et al.); None:
            `sqrt(max(1, N / M))`.
        matrices: of the parameters a tree (or a prefix of one) of booleans: which leaves `[..., M, N]` are Muon's. None: those of
            two axes. Leave embeddings and the head to AdamW.
    """

    def labels(params: Any) -> Any:
        chosen = jax.tree.map(lambda leaf: leaf.ndim == 2, params) if matrices is None else matrices(params)
        return jax.tree.map(lambda one: "muon" if one else "adam", chosen)

    by_muon = optax.chain(
        scale_by_muon(ns_coeffs, ns_steps, beta, eps, mu_dtype, nesterov=nesterov, dtype=dtype, platform=platform),
        scale_by_shape(consistent_rms),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    by_adam = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        adam_b1,
        adam_b2,
        eps,
        adam_eps_root,
        weight_decay=adam_weight_decay,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
    )
    return optax.partition({"muon": by_muon, "adam": by_adam}, labels)
