"""Losses over a vocabulary, and the log-probabilities of its entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
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
from ejkernel.modules._class_api import class_api
from ejkernel.operations.common.options import as_count, as_flag, as_precision, as_soft_cap
from ejkernel.operations.cross_entropy.interface import IGNORED, OPERATION as _CROSS_ENTROPY
from ejkernel.operations.flash_attention.interface import is_concrete
from ejkernel.operations.linear_cross_entropy.interface import OPERATION as _LINEAR_CROSS_ENTROPY
from ejkernel.utils.checks import check_array, check_compute, check_shape, finite_number
from ejkernel.utils.dtypes import common_dtype, multiplied
from ejkernel.utils.integers import as_int32
from ejkernel.utils.tracing import is_traced, refuse_traced, traced_number

__all__ = ["CrossEntropyOutput", "FusedCrossEntropy", "TokenLogprobs", "fused_cross_entropy", "token_logprobs"]


class CrossEntropyOutput(NamedTuple):
    """loss, differentiable; z_loss, its part from the z-loss; weight_sum, the sum of the weights of the tokens that count."""

    loss: t.Loss
    z_loss: t.Loss
    weight_sum: t.Loss


@public()
def fused_cross_entropy(
    logits: t.Logits | None = None,
    targets: t.Targets | t.SoftTargets | None = None,
    weights: t.TokenWeights | None = None,
    *,
    hidden: t.Hidden | None = None,
    lm_head_weight: t.Head | None = None,
    lm_head_bias: t.HeadBias | None = None,
    transpose_head: t.Flag = False,
    logit_softcap: t.Number | None = None,
    attention_mask: t.TokenWeights | None = None,
    class_weights: t.HeadBias | None = None,
    ignore_index: int | np.integer = -100,
    label_smoothing: t.Scalar = 0.0,
    z_loss: t.Scalar = 0.0,
    reduction: t.Reduction = "mean",
    chunk_size: t.Count = 0,
    vocab_parallel_axis: t.AxisNames | None = None,
    precision: t.PrecisionLike | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> CrossEntropyOutput:
    """Cross entropy from logits, or from hidden states and the head without ever storing all logits.

    For a token with label y, and l its logits after the soft cap, `lse = log sum_v exp(l_v)`:
    `loss = (1 - s) (lse - l_y) + s (lse - mean_v l_v) + z_loss lse^2` with s = label_smoothing (PyTorch's definition). With soft
    targets p, `sum_v p_v (lse - l_v)` stands in the place of `lse - l_y`; class_weights c multiply every `lse - l_v` by c_v.

    Tokens do not count, and what their rows hold has no effect, where the label is ignore_index or (if only the running program
    knows it) outside of the vocabulary, where attention_mask is 0, and where the weight is 0.

    Args:
        logits: `[..., V]`, float32, bfloat16 or float16; inside in float32. Or None beside hidden.
        targets: integer labels `[...]`; global ids, also where the vocabulary is split. Or soft targets `[..., V]`, floating:
            probabilities of each entry, split as the vocabulary is; they have a gradient.
        weights: `[...]`, factor on each token's loss; constants under differentiation.
        hidden: `[..., D]`, in the place of logits.
        lm_head_weight: `[D, V]`, or `[V, D]` with transpose_head.
        lm_head_bias: `[V]`.
        transpose_head: lm_head_weight is `[V, D]`, as an embedding is.
        logit_softcap: c > 0 turns logits into `c * tanh(l / c)`; -inf, an entry that cannot be chosen, stays -inf.
        attention_mask: `[...]`, bool or 0 and 1: which tokens count.
        class_weights: `[V]`, factor on each entry's part of a loss, but of the z-loss; constants under differentiation. With
            labels, "mean" divides by the sum of the weights times those of the labels. Split as the vocabulary is.
        ignore_index: label of tokens that do not count; not with soft targets.
        label_smoothing: s in [0, 1]; may be traced, and then has a gradient.
        z_loss: weight of the square of lse, >= 0; may be traced, and then has a gradient.
        reduction: "none", "sum" (of weighted losses) or "mean" (by the sum of weights; 0 where no token counts).
        chunk_size: hint: the tokens that a platform may take at a time, 0 for its own choice; it does not change the result.
        vocab_parallel_axis: mesh axis, or axes, over which the vocabulary of logits, or of head and bias, is split. With `mesh`
            it is read off in_specs where it is not given.
        precision: of the products with the head; None = full precision of the dtype.
        mesh: make the `jax.shard_map` here; sums then run over all tokens. Inside a `shard_map` of one's own, reductions are
            over this device's tokens.
        in_specs: one PartitionSpec or None for each of logits, targets, weights, hidden, lm_head_weight, lm_head_bias,
            attention_mask, class_weights; the last two may be left out.
        out_specs: PartitionSpec of the loss, or a `CrossEntropyOutput` of them.

    Returns:
        `CrossEntropyOutput(loss, z_loss, weight_sum)` in float32: scalars, or `[...]` loss and z_loss with reduction "none".

    Raises:
        ValueError: shapes, values or settings that do not fit; a known label outside of the vocabulary.

    Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024; z-loss: Chowdhery et al., PaLM, 2022.
    """
    arrays, options, run = split(
        locals(),
        "logits targets weights hidden lm_head_weight lm_head_bias attention_mask class_weights",
        "smoothing=label_smoothing",
        own="chunk_size",
    )
    _check_sources(arrays)
    check_reduction(reduction)
    options["transpose_head"] = as_flag("transpose_head", transpose_head)
    options["smoothing"] = smoothing = _weight("label_smoothing", label_smoothing)
    if not is_traced(smoothing) and smoothing > 1:
        raise invalid("label_smoothing", smoothing, "a value in [0, 1]")
    as_count("chunk_size", chunk_size, 0)
    options["ignore_index"] = ignored = _as_index(ignore_index)
    _check_soft(arrays, ignored, logit_softcap, is_traced(smoothing) or smoothing > 0)
    options["z_loss"] = _weight("z_loss", z_loss)
    if mesh is not None:
        run["out_specs"] = CrossEntropyOutput(*per_result(out_specs, 3))
    return _over_mesh(_cross_entropy, arrays, options, tuple(arrays), **run)


@public()
def token_logprobs(
    hidden: t.Hidden | None = None,
    lm_head_weight: t.Head | None = None,
    targets: t.Targets | None = None,
    *,
    logits: t.Logits | None = None,
    lm_head_bias: t.HeadBias | None = None,
    transpose_head: t.Flag = False,
    logit_softcap: t.Number | None = None,
    temperature: t.Scalar = 1.0,
    attention_mask: t.TokenWeights | None = None,
    ignore_index: int | np.integer = -100,
    vocab_parallel_axis: t.AxisNames | None = None,
    precision: t.PrecisionLike | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.TokenLogprobs:
    """Log-probability of each target, from hidden states and the head without ever storing all logits; for DPO, GRPO and PPO.

    For a token with target y, and l its logits after the soft cap: `l_y / T - log sum_v exp(l_v / T)` with T = temperature.
    This is minus the loss of `fused_cross_entropy` with reduction "none". Each token's may have a cotangent of its own.

    The result is 0, has no gradient, and does not depend on what the row holds, where the target is ignore_index or (if only
    the running program knows it) outside of the vocabulary, and where attention_mask is 0.

    Args:
        hidden: `[..., D]`, float32, bfloat16 or float16; inside in float32. Or None beside logits.
        lm_head_weight: `[D, V]`, or `[V, D]` with transpose_head.
        targets: integers `[...]`; global ids, also where the vocabulary is split. Nothing is shifted: `targets[t]` is the token
            that `hidden[t]` predicts.
        logits: `[..., V]`, in the place of hidden.
        lm_head_bias: `[V]`.
        transpose_head: lm_head_weight is `[V, D]`, as an embedding is.
        logit_softcap: c > 0 turns logits into `c * tanh(l / c)`, before the temperature.
        temperature: T > 0; may be traced, but not beside logit_softcap. Unless it is 1, logits are divided by it in float32,
            which copies narrower ones, and hidden states in their own dtype. It has no gradient, and differentiating by it is
            refused.
        attention_mask: `[...]`, bool or 0 and 1: which tokens count.
        ignore_index: target of tokens that do not count.
        vocab_parallel_axis: mesh axis, or axes, over which the vocabulary of logits, or of head and bias, is split. With `mesh`
            it is read off in_specs where it is not given.
        precision: of the products with the head; None = full precision of the dtype.
        mesh: make the `jax.shard_map` here.
        in_specs: one PartitionSpec or None for each of hidden, lm_head_weight, targets, logits, lm_head_bias, attention_mask;
            the last may be left out.
        out_specs: PartitionSpec of the result.

    Returns:
        `[...]` in float32, natural logarithms.

    Raises:
        ValueError: shapes, values or settings that do not fit; a known target outside of the vocabulary.
        TypeError: a wrong type or dtype, or a gradient by temperature.

    Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024; uses: Rafailov et al., Direct Preference
        Optimization, 2023; Shao et al., DeepSeekMath (GRPO), 2024.
    """
    arrays, options, run = split(locals(), "hidden lm_head_weight targets logits lm_head_bias attention_mask")
    positional = tuple(arrays)
    arrays |= {"weights": None, "class_weights": None}
    _check_sources(arrays, soft=False)
    if logit_softcap is not None:
        refuse_traced("temperature", temperature, "a number known when the program is built, beside logit_softcap")
    options |= {"transpose_head": as_flag("transpose_head", transpose_head), "ignore_index": _as_index(ignore_index)}
    return _over_mesh(_token_logprobs, arrays, options, positional, **run)


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


_OPERATION_NAMES = {
    "head": "lm_head_weight",
    "head_bias": "lm_head_bias",
    "logits_soft_cap": "logit_softcap",
    "axis_name": "vocab_parallel_axis",
}


@argument_names(**_OPERATION_NAMES)
def _cross_entropy(
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
    smoothing: Any,
    z_loss: Any,
    reduction: str,
    axes: Axes,
    row_axes: Axes,
    **settings: Any,
) -> CrossEntropyOutput:
    """On one device."""
    x = logits if hidden is None else hidden
    smoothed = is_traced(smoothing) or smoothing > 0
    wide = statistics_dtype(jnp.dtype(x.dtype).name)
    smoothing, z_loss = (
        traced_number(name, number, wide) if is_traced(number) else number
        for name, number in (("label_smoothing", smoothing), ("z_loss", z_loss))
    )
    head = None if hidden is None else lm_head_weight
    held = x.shape[-1] if head is None else head.shape[0 if transpose_head else 1]
    size = held * (axis_size(axes) if axes else 1)
    soft = jnp.issubdtype(targets.dtype, jnp.floating)
    _check_classes(targets if soft else None, class_weights, tuple(x.shape[:-1]), held)
    kept, scale = counted(tuple(targets.shape[:-1] if soft else targets.shape), weights, attention_mask, wide)
    here, labels = kept & False, jnp.full(kept.shape, held, jnp.int32)
    if not soft:
        # A number of the vocabulary's size, or ignore_index, may not fit into the labels' own type.
        labels = jnp.asarray(targets).astype(common_dtype(targets.dtype, jnp.int32))
        kept = kept & (labels != ignore_index) & (labels >= 0) & (labels < size)
        labels = as_int32(labels) - (jax.lax.axis_index(axes) * held if axes else 0)
        here = kept & (labels >= 0) & (labels < held)
    arrays = {
        "x": x,
        "targets": jnp.where(kept, jnp.where(here, labels, held), IGNORED),
        "head": head,
        "head_bias": lm_head_bias,
    }
    precision = settings.pop("precision")
    options = {"transpose_head": transpose_head, "logit_softcap": logit_softcap, "precision": precision}
    plain = not soft and class_weights is None and not axes and reduction != "none"
    plain = plain and not is_traced(smoothing) and not is_traced(z_loss)
    if plain and head is not None and forms_gradients_early(x, settings["platform"]):
        weight_sum = summed(jnp.where(kept, scale, 0), row_axes)
        arrays["weights"] = scale if reduction == "sum" else scale / jnp.where(weight_sum == 0, 1, weight_sum)
        options |= {"label_smoothing": smoothing, "z_loss": z_loss}
        with argument_names(x="hidden"):
            total, penalty = _LINEAR_CROSS_ENTROPY.invoke(arrays, options, **settings)
        if row_axes:
            total, penalty = jax.lax.psum((total, penalty), row_axes)
        return CrossEntropyOutput(total, jax.lax.stop_gradient(penalty), weight_sum)
    options["sum_logits"] = smoothed and class_weights is None
    with argument_names(x="logits" if hidden is None else "hidden"):
        loss, lse, total = _CROSS_ENTROPY.invoke(arrays, options, **settings)
    if axes:
        loss, lse, total = over_vocabulary(loss, lse, total, here, axes)
    entries = Entries(x, head, lm_head_bias, transpose_head, as_soft_cap(logit_softcap), as_precision(precision))
    if class_weights is not None:
        class_weights = jax.lax.stop_gradient(jnp.asarray(class_weights)).astype(lse.dtype)
    importance: Any = 1.0  # of the label's class
    if soft:
        chosen = (
            targets if class_weights is None else targets.astype(lse.dtype) * jnp.broadcast_to(class_weights, targets.shape)
        )
        mass, mean = entries.mean_under(chosen, kept, axes)
        loss = mass * lse - mean
    elif class_weights is not None:
        importance = jnp.where(here, class_weights[jnp.where(here, labels, 0)], 0)
        importance = jax.lax.psum(importance, axes) if axes else importance
        loss = importance * loss
    if smoothed:
        mass, mean = (size, total) if class_weights is None else entries.mean_under(class_weights, kept, axes)
        loss = (1 - smoothing) * loss + smoothing * (mass * lse - mean) / size
    scale = jnp.where(kept, scale, 0)
    penalty = jnp.where(kept, z_loss * lse * lse, 0) * scale
    loss = jnp.where(kept, loss, 0) * scale + penalty
    weight_sum = summed(scale * importance, row_axes)
    penalty = reduced(jax.lax.stop_gradient(penalty), weight_sum, reduction, row_axes)
    return CrossEntropyOutput(reduced(loss, weight_sum, reduction, row_axes), penalty, weight_sum)


@argument_names(**_OPERATION_NAMES)
def _token_logprobs(*, temperature: Any, **given: Any) -> Any:
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
        cap = as_soft_cap(given["logit_softcap"])
        given["logit_softcap"] = None if cap is None else cap / temperature
    return 0 - _cross_entropy(**given, smoothing=0.0, z_loss=0.0, reduction="none").loss


def _check_classes(soft: Any, class_weights: Any, rows: tuple[int, ...], held: int) -> None:
    """Soft targets and class weights are floating, and have one number for each entry that this device holds."""
    if soft is not None:
        check_compute("targets", soft)
        check_shape("targets", soft, (*rows, held), "[..., V], or integer labels [...]")
    if class_weights is not None:
        check_compute("class_weights", class_weights)
        check_shape("class_weights", class_weights, (held,), "[V]")


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
    elif arrays["logits"].ndim == 0:
        raise invalid("logits", "shape ()", "[..., V]")
    for name in ("lm_head_weight", "lm_head_bias"):
        if arrays["logits"] is not None and arrays[name] is not None:
            raise invalid(name, "an array", "None beside logits", remedy="pass hidden= for hidden states")


def _as_index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise wrong_type("ignore_index", repr(value), "an int")
    return int(value)


def _weight(name: str, value: Any) -> Any:
    """A number of at least 0, or a traced one, whose value nobody can check."""
    return value if is_traced(value) else finite_number(name, value, at_least=0)


def _check_soft(arrays: dict[str, Any], ignore_index: int, soft_cap: Any, smoothed: bool) -> None:
    """What soft targets and class weights exclude."""
    soft = jnp.issubdtype(arrays["targets"].dtype, jnp.floating)
    if soft and ignore_index != -100:
        raise invalid("ignore_index", ignore_index, "its default with soft targets", remedy="mask tokens with attention_mask=")
    sums = soft or (arrays["class_weights"] is not None and smoothed)
    if sums and arrays["hidden"] is not None and soft_cap is not None:
        given = "soft targets" if soft else "class_weights with label_smoothing"
        raise invalid("logit_softcap", soft_cap, f"None beside hidden states and {given}", remedy="pass logits=")


def _check_labels(arrays: dict[str, Any], ignore_index: int, transpose_head: bool) -> None:
    """Labels that are known must be in the vocabulary."""
    targets, head = arrays["targets"], arrays["lm_head_weight"]
    if not is_concrete(targets) or jnp.issubdtype(targets.dtype, jnp.floating):
        return
    vocabulary = arrays["logits"].shape[-1] if head is None else head.shape[0 if transpose_head else 1]
    values = np.asarray(targets)
    wrong = values[(values != ignore_index) & ((values < 0) | (values >= vocabulary))]
    if wrong.size:
        expected = f"values in [0, {vocabulary - 1}] or ignore_index = {ignore_index}"
        raise invalid("targets", wrong.ravel()[0], expected)


FusedCrossEntropy = class_api("FusedCrossEntropy", fused_cross_entropy)
TokenLogprobs = class_api("TokenLogprobs", token_logprobs)
