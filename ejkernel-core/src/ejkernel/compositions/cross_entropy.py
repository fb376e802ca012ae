"""Cross entropy of labels or soft targets, from logits or hidden states, over a vocabulary that may be split over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import typing as t
from ejkernel.call.arrays import statistics_dtype
from ejkernel.compositions import mesh as _mesh
from ejkernel.compositions.axes import Axes, as_axes, axis_size
from ejkernel.compositions.vocabulary_parallel import (
    Entries,
    as_temperature,
    check_reduction,
    counted,
    forms_gradients_early,
    mesh_axes,
    over_vocabulary,
    per_result,
    reduced,
    specs_of,
    summed,
)
from ejkernel.errors import argument_names, invalid, wrong_type
from ejkernel.operations.common.options import as_count, as_flag, as_precision, as_soft_cap
from ejkernel.operations.cross_entropy.interface import IGNORED, OPERATION as _CROSS_ENTROPY
from ejkernel.operations.flash_attention.interface import is_concrete
from ejkernel.operations.linear_cross_entropy.interface import OPERATION as _LINEAR_CROSS_ENTROPY
from ejkernel.utils.checks import check_array, check_compute, check_shape, finite_number
from ejkernel.utils.dtypes import common_dtype, multiplied
from ejkernel.utils.integers import as_int32
from ejkernel.utils.tracing import is_traced, refuse_traced, traced_number


class CrossEntropyOutput(NamedTuple):
    """loss, differentiable; z_loss, its part from the z-loss; weight_sum, the sum of the weights of the tokens that count."""

    loss: t.Loss
    z_loss: t.Loss
    weight_sum: t.Loss


def cross_entropy(arrays: dict[str, Any], options: dict[str, Any], **run: Any) -> CrossEntropyOutput:
    """`fused_cross_entropy` with its arguments as `split` gives them."""
    _check_sources(arrays)
    check_reduction(options["reduction"])
    options["transpose_head"] = as_flag("transpose_head", options["transpose_head"])
    options["label_smoothing"] = smoothing = _weight("label_smoothing", options["label_smoothing"])
    if not is_traced(smoothing) and smoothing > 1:
        raise invalid("label_smoothing", smoothing, "a value in [0, 1]")
    as_count("chunk_size", options.pop("chunk_size"), 0)
    options["ignore_index"] = _as_index(options["ignore_index"])
    _check_soft(arrays, options)
    options["z_loss"] = _weight("z_loss", options["z_loss"])
    if run["mesh"] is not None:
        run["out_specs"] = CrossEntropyOutput(*per_result(run["out_specs"], 3))
    return _over_mesh(_of_tokens, arrays, options, tuple(arrays), **run)


def logprobs(arrays: dict[str, Any], options: dict[str, Any], **run: Any) -> Any:
    """`token_logprobs` with its arguments as `split` gives them."""
    positional = tuple(arrays)
    arrays |= {"weights": None, "class_weights": None}
    _check_sources(arrays, soft=False)
    if options["logit_softcap"] is not None:
        temperature = options["temperature"]
        refuse_traced("temperature", temperature, "a number known when the program is built, beside logit_softcap")
    options["transpose_head"] = as_flag("transpose_head", options["transpose_head"])
    options["ignore_index"] = _as_index(options["ignore_index"])
    return _over_mesh(_logprobs_of_tokens, arrays, options, positional, **run)


def _check_sources(arrays: dict[str, Any], soft: bool = True) -> None:
    """Refuse what is missing or too much, and what is no array; soft targets unless they are meant."""
    if arrays["targets"] is None:
        raise invalid("targets", None, "integer labels, or soft targets [..., V]" if soft else "integers [...]")
    for name, array in arrays.items():
        if array is not None and not hasattr(array, "dtype"):
            raise wrong_type(name, type(array).__name__, "an array")
    if not any(jnp.issubdtype(arrays["targets"].dtype, kind) for kind in (jnp.integer, *[jnp.floating] * soft)):
        wanted = "integers, or a floating type for soft targets" if soft else "integers"
        raise wrong_type("targets", f"dtype {arrays['targets'].dtype}", wanted)
    if (arrays["logits"] is None) == (arrays["hidden"] is None):
        got = "neither logits nor hidden" if arrays["logits"] is None else "both logits and hidden"
        raise invalid("logits", got, "logits, or hidden with lm_head_weight")
    if arrays["hidden"] is not None:
        if arrays["lm_head_weight"] is None:
            raise invalid("lm_head_weight", None, "the head that makes logits of hidden")
        check_array("lm_head_weight", arrays["lm_head_weight"], ndim=2)
        return
    if arrays["logits"].ndim == 0:
        raise invalid("logits", "shape ()", "[..., V]")
    for name in ("lm_head_weight", "lm_head_bias"):
        if arrays[name] is not None:
            raise invalid(name, "an array", "None beside logits", remedy="pass hidden= for hidden states")


def _as_index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise wrong_type("ignore_index", repr(value), "an int")
    return int(value)


def _weight(name: str, value: Any) -> Any:
    """A number of at least 0, or a traced one, whose value nobody can check."""
    return value if is_traced(value) else finite_number(name, value, at_least=0)


def _is_soft(targets: Any) -> bool:
    return jnp.issubdtype(targets.dtype, jnp.floating)


def _is_smoothed(smoothing: Any) -> bool:
    return is_traced(smoothing) or smoothing > 0


def _check_soft(arrays: dict[str, Any], options: dict[str, Any]) -> None:
    """What soft targets and class weights exclude."""
    soft, ignore_index, soft_cap = _is_soft(arrays["targets"]), options["ignore_index"], options["logit_softcap"]
    if soft and ignore_index != -100:
        raise invalid("ignore_index", ignore_index, "its default with soft targets", remedy="mask tokens with attention_mask=")
    sums = soft or (arrays["class_weights"] is not None and _is_smoothed(options["label_smoothing"]))
    if sums and arrays["hidden"] is not None and soft_cap is not None:
        given = "soft targets" if soft else "class_weights with label_smoothing"
        raise invalid("logit_softcap", soft_cap, f"None beside hidden states and {given}", remedy="pass logits=")


def _check_labels(arrays: dict[str, Any], ignore_index: int, transpose_head: bool) -> None:
    """Labels that are known must be in the vocabulary."""
    targets = arrays["targets"]
    if not is_concrete(targets) or _is_soft(targets):
        return
    vocabulary = _entries_held(arrays["logits"], arrays["lm_head_weight"], transpose_head)
    values = np.asarray(targets)
    wrong = values[(values != ignore_index) & ((values < 0) | (values >= vocabulary))]
    if wrong.size:
        expected = f"values in [0, {vocabulary - 1}] or ignore_index = {ignore_index}"
        raise invalid("targets", wrong.ravel()[0], expected)


def _check_classes(soft: Any, class_weights: Any, rows: tuple[int, ...], held: int) -> None:
    """Soft targets and class weights are floating, and have one number for each entry that this device holds."""
    if soft is not None:
        check_compute("targets", soft)
        check_shape("targets", soft, (*rows, held), "[..., V], or integer labels [...]")
    if class_weights is not None:
        check_compute("class_weights", class_weights)
        check_shape("class_weights", class_weights, (held,), "[V]")


def _entries_held(logits: Any, head: Any, transpose_head: bool) -> int:
    """Entries of the vocabulary, or of this device's part of it."""
    return logits.shape[-1] if head is None else head.shape[0 if transpose_head else 1]


def _over_mesh(
    function: Callable[..., Any],
    arrays: dict[str, Any],
    options: dict[str, Any],
    positional: tuple[str, ...],
    *,
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    **settings: Any,
) -> Any:
    """The function of one device, over the devices of a mesh if there is one. `in_specs` are those of `positional`."""
    axes, row_axes = as_axes(options.pop("vocab_parallel_axis")), ()
    transpose_head = options["transpose_head"]
    specs = specs_of(arrays, positional, mesh, in_specs, out_specs)
    if mesh is not None:
        axes, row_axes = mesh_axes(axes, arrays, specs, mesh, transpose_head)
    if mesh is not None or not axes:
        _check_labels(arrays, options["ignore_index"], transpose_head)
    options |= {"axes": axes, "row_axes": row_axes}
    specified = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    return _mesh.over_mesh(function, arrays, options, positional=positional, **specified, **settings)


_OPERATION_NAMES = {"head": "lm_head_weight", "head_bias": "lm_head_bias", "axis_name": "vocab_parallel_axis"}


@argument_names(**_OPERATION_NAMES)
def _of_tokens(
    *,
    logits: Any,
    targets: Any,
    weights: Any,
    hidden: Any,
    lm_head_weight: Any,
    lm_head_bias: Any,
    attention_mask: Any,
    class_weights: Any,
    transpose_head: bool,
    logit_softcap: Any,
    ignore_index: int,
    label_smoothing: Any,
    z_loss: Any,
    reduction: str,
    axes: Axes,
    row_axes: Axes,
    precision: Any,
    **settings: Any,
) -> CrossEntropyOutput:
    """The loss of this device's tokens; along `axes` other devices have other parts of the vocabulary, along `row_axes` tokens."""
    x, head, x_name = (logits, None, "logits") if hidden is None else (hidden, lm_head_weight, "hidden")
    soft, smoothed = _is_soft(targets), _is_smoothed(label_smoothing)
    plain = not (soft or class_weights is not None or axes or is_traced(label_smoothing) or is_traced(z_loss))
    wide = statistics_dtype(jnp.dtype(x.dtype).name)
    label_smoothing, z_loss = (
        traced_number(name, number, wide) if is_traced(number) else number
        for name, number in (("label_smoothing", label_smoothing), ("z_loss", z_loss))
    )
    held = _entries_held(x, head, transpose_head)
    _check_classes(targets if soft else None, class_weights, tuple(x.shape[:-1]), held)
    kept, scale = counted(tuple(targets.shape[:-1] if soft else targets.shape), weights, attention_mask, wide)
    here, labels = kept & False, jnp.full(kept.shape, held, jnp.int32)
    if not soft:
        kept, here, labels = _own_labels(targets, kept, ignore_index, held, axes)
    arrays = {
        "x": x,
        "targets": jnp.where(kept, jnp.where(here, labels, held), IGNORED),
        "head": head,
        "head_bias": lm_head_bias,
    }
    options = {"transpose_head": transpose_head, "logit_softcap": logit_softcap, "precision": precision}
    if plain and reduction != "none" and head is not None and forms_gradients_early(x, settings["platform"]):
        options |= {"label_smoothing": label_smoothing, "z_loss": z_loss}
        return _with_gradients(arrays, options, kept, scale, reduction, row_axes, **settings)
    options["sum_logits"] = smoothed and class_weights is None
    with argument_names(x=x_name):
        loss, lse, total = _CROSS_ENTROPY.invoke(arrays, options, **settings)
    if axes:
        loss, lse, total = over_vocabulary(loss, lse, total, here, axes)
    entries = Entries(
        x, head, lm_head_bias, transpose_head, as_soft_cap(logit_softcap, "logit_softcap"), as_precision(precision)
    )
    if class_weights is not None:
        class_weights = jax.lax.stop_gradient(jnp.asarray(class_weights)).astype(lse.dtype)
    importance: Any = 1.0  # of the label's class
    if soft:
        loss = entries.loss_under(_times_classes(targets, class_weights, lse.dtype), lse, kept, axes)
    elif class_weights is not None:
        importance = jnp.where(here, class_weights[jnp.where(here, labels, 0)], 0)
        importance = jax.lax.psum(importance, axes) if axes else importance
        loss = importance * loss
    if smoothed:
        size = held * axis_size(axes) if axes else held
        uniform = size * lse - total if class_weights is None else entries.loss_under(class_weights, lse, kept, axes)
        loss = (1 - label_smoothing) * loss + label_smoothing * uniform / size
    scale = jnp.where(kept, scale, 0)
    penalty = jnp.where(kept, z_loss * lse * lse, 0) * scale
    loss = jnp.where(kept, loss, 0) * scale + penalty
    weight_sum = summed(scale * importance, row_axes)
    penalty = reduced(jax.lax.stop_gradient(penalty), weight_sum, reduction, row_axes)
    return CrossEntropyOutput(reduced(loss, weight_sum, reduction, row_axes), penalty, weight_sum)


def _with_gradients(
    arrays: dict[str, Any], options: dict[str, Any], kept: Any, scale: Any, reduction: str, row_axes: Axes, **settings: Any
) -> CrossEntropyOutput:
    """The sum or mean of hidden states' losses from the kernel whose forward forms the gradients."""
    weight_sum = summed(jnp.where(kept, scale, 0), row_axes)
    weights = scale if reduction == "sum" else scale / jnp.where(weight_sum == 0, 1, weight_sum)
    with argument_names(x="hidden"):
        total, penalty = _LINEAR_CROSS_ENTROPY.invoke({**arrays, "weights": weights}, options, **settings)
    if row_axes:
        total, penalty = jax.lax.psum((total, penalty), row_axes)
    return CrossEntropyOutput(total, jax.lax.stop_gradient(penalty), weight_sum)


def _own_labels(targets: Any, kept: Any, ignore_index: int, held: int, axes: Axes) -> tuple[Any, Any, Any]:
    """Which tokens count, which of their labels are in this device's part of the vocabulary, and labels counted from its start."""
    # A number of the vocabulary's size, or ignore_index, may not fit into the labels' own type.
    labels = jnp.asarray(targets).astype(common_dtype(targets.dtype, jnp.int32))
    size = held * axis_size(axes) if axes else held
    kept = kept & (labels != ignore_index) & (labels >= 0) & (labels < size)
    labels = as_int32(labels) - (jax.lax.axis_index(axes) * held if axes else 0)
    return kept, kept & (labels >= 0) & (labels < held), labels


def _times_classes(targets: Any, class_weights: Any, dtype: Any) -> Any:
    """Soft targets times the weights of their classes."""
    if class_weights is None:
        return targets
    return targets.astype(dtype) * jnp.broadcast_to(class_weights, targets.shape)


@argument_names(**_OPERATION_NAMES)
def _logprobs_of_tokens(*, temperature: Any, **given: Any) -> Any:
    """On one device. `c tanh(l / c) / T` is the soft cap c / T of l / T, so nothing but the operands is divided."""
    x = "logits" if given["hidden"] is None else "hidden"
    temperature = as_temperature(temperature, given[x].dtype)
    if is_traced(temperature) or temperature != 1:
        wide = statistics_dtype(jnp.dtype(given[x].dtype).name)
        factor = jnp.asarray(1 / temperature, wide)
        if x == "logits":
            given[x] = jnp.asarray(given[x]).astype(wide)
        for name in (x, "lm_head_bias"):
            given[name] = None if given[name] is None else multiplied(given[name], factor)
        cap = as_soft_cap(given["logit_softcap"], "logit_softcap")
        given["logit_softcap"] = None if cap is None else cap / temperature
    return 0 - _of_tokens(**given, label_smoothing=0.0, z_loss=0.0, reduction="none").loss
