"""One training step: loss and all gradients of a mechanism against the plain reference in vanilla's place."""

from __future__ import annotations

from typing import Any

import families
import jax
import jax.numpy as jnp
import numpy as np
import oracle

LOSS_TOLERANCE = 1e-5
"""Relative error of the loss."""

GRADIENT_TOLERANCE = 1e-4
"""Largest difference in a gradient, relative to the largest entry of the same parameter's gradient in the reference."""

_reference: dict[Any, Any] = {}


def step(name: str, mechanism: str, axes: Any = None, remat: bool = False, **fields: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients by parameter.

    Args:
        name, mechanism, axes, fields: see `families.build`.
        remat: compute the forward pass again in the backward pass.
    """
    from flax import nnx

    model = families.build(name, mechanism, axes, **fields)
    ids, mask = families.batch()
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def loss(parameters: Any) -> Any:
        logits = nnx.merge(graph, parameters, rest)(input_ids=ids, attention_mask=mask).logits.astype(jnp.float32)
        log_probability = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], -1)[..., 0]
        return -(log_probability * mask[:, 1:]).sum() / mask[:, 1:].sum()

    with families.on_mesh(model.config.mesh):
        value, gradients = jax.jit(jax.value_and_grad(jax.checkpoint(loss) if remat else loss))(parameters)
    flat = jax.tree_util.tree_flatten_with_path(gradients)[0]
    return float(value), {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in flat}


def reference(name: str) -> tuple[float, dict[str, Any]]:
    """Of the plain operations."""
    if name not in _reference:
        with oracle.in_place():
            _reference[name] = step(name, "vanilla")
    return _reference[name]


def compare(name: str, mechanism: str, **options: Any) -> dict[str, Any]:
    """The errors of one mechanism; the options are those of `step`."""
    loss, gradients = step(name, mechanism, **options)
    expected_loss, expected = reference(name)
    if gradients.keys() != expected.keys():
        return {"ok": False, "problem": "other parameters than the reference"}
    worst, where = 0.0, ""
    for parameter, wanted in expected.items():
        scale = max(float(np.abs(wanted).max(initial=0.0)), 1e-6)
        error = float(np.abs(gradients[parameter] - wanted).max(initial=0.0)) / scale
        if not error <= worst:
            worst, where = error, parameter
    loss_error = abs(loss - expected_loss) / abs(expected_loss)
    moving = sum(bool(np.abs(gradient).max(initial=0.0) > 0) for gradient in gradients.values())
    ok = loss_error <= LOSS_TOLERANCE and worst <= GRADIENT_TOLERANCE
    return {
        "ok": ok,
        "loss": loss,
        "loss_error": loss_error,
        "gradient_error": worst,
        "worst_parameter": where,
        "parameters": len(gradients),
        "parameters_with_gradient": moving,
    }
