"""Losses over a vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public
from ejkernel.call.arrays import statistics_dtype
from ejkernel.compositions import mesh as _mesh
from ejkernel.compositions.axes import Axes, as_axes, axis_size
from ejkernel.compositions.vocabulary_parallel import (
    Entries,
    check_reduction,
    counted,
    forms_gradients_early,
    mesh_axes,
    over_vocabulary,
    reduced,
    several,
    specs_of,
    split_axes,
    summed,
)
from ejkernel.errors import argument_names, invalid, wrong_type
from ejkernel.modules._class_api import class_form
from ejkernel.operations.cross_entropy.interface import IGNORED
from ejkernel.operations.cross_entropy.interface import OPERATION as _CROSS_ENTROPY
from ejkernel.operations.flash_attention.bind import as_count, as_flag, as_precision, as_soft_cap
from ejkernel.operations.flash_attention.interface import is_concrete
from ejkernel.operations.kl_divergence.interface import OPERATION as _KL_DIVERGENCE
from ejkernel.operations.linear_cross_entropy.interface import OPERATION as _LINEAR_CROSS_ENTROPY
from ejkernel.utils.checks import check_array, check_compute, check_shape, finite_number
from ejkernel.utils.dtypes import common_dtype
from ejkernel.utils.tracing import is_traced, traced_number, without_gradient

_KL_ARRAYS = (
    "student_logits",
    "teacher_logits",
    "weights",
    "student_hidden",
    "student_head",
    "teacher_hidden",
    "teacher_head",
    "attention_mask",
)
_ARRAYS = ("logits", "targets", "weights", "hidden", "lm_head_weight", "lm_head_bias", "attention_mask", "class_weights")


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
        logit_softcap: c > 0 turns logits into `c * tanh(l / c)`.
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
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.
        mesh: make the `jax.shard_map` here; sums then run over all tokens. Inside a `shard_map` of one's own, reductions are
            over this device's tokens.
        in_specs: one PartitionSpec or None for each of logits, targets, weights, hidden, lm_head_weight, lm_head_bias,
            attention_mask, class_weights; the last two may be left out.
        out_specs: PartitionSpec of the loss, or a `CrossEntropyOutput` of them.

    Returns:
        `CrossEntropyOutput(loss, z_loss, weight_sum)` in float32: scalars, or `[...]` loss and z_loss with reduction "none".

    Raises:
        ValueError: shapes, values or settings that do not fit; a known label outside of the vocabulary.
        TypeError: a wrong type or dtype.
        NoKernelError: no admitted platform supports the call.

    Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024; z-loss: Chowdhery et al., PaLM, 2022.
    """
    arrays: dict[str, Any] = dict(
        zip(
            _ARRAYS,
            (logits, targets, weights, hidden, lm_head_weight, lm_head_bias, attention_mask, class_weights),
            strict=True,
        )
    )
    _check_sources(arrays)
    check_reduction(reduction)
    transpose_head = as_flag("transpose_head", transpose_head)
    smoothing = _weight("label_smoothing", label_smoothing)
    if not is_traced(smoothing) and smoothing > 1:
        raise invalid("label_smoothing", smoothing, "a value in [0, 1]")
    as_count("chunk_size", chunk_size, 0)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, np.integer)):
        raise wrong_type("ignore_index", repr(ignore_index), "an int")
    _check_soft(arrays, int(ignore_index), logit_softcap, is_traced(smoothing) or smoothing > 0)
    axes, row_axes = as_axes(vocab_parallel_axis), ()
    specs = specs_of(arrays, _ARRAYS, mesh, in_specs, out_specs)
    result_specs: Any = out_specs
    if mesh is not None:
        axes, row_axes = mesh_axes(axes, arrays, specs, mesh, transpose_head)
        result_specs = CrossEntropyOutput(*_per_result(out_specs, 3))
    if mesh is not None or not axes:
        _check_labels(arrays, int(ignore_index), transpose_head)
    options = {
        "transpose_head": transpose_head,
        "logit_softcap": logit_softcap,
        "ignore_index": int(ignore_index),
        "smoothing": smoothing,
        "z_loss": _weight("z_loss", z_loss),
        "reduction": reduction,
        "axes": axes,
        "row_axes": row_axes,
        "precision": precision,
        "platform": platform,
        "cfg": cfg,
    }
    return _mesh.over_mesh(
        _cross_entropy, arrays, options, positional=_ARRAYS, mesh=mesh, in_specs=in_specs, out_specs=result_specs
    )


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
    smoothing, z_loss = (
        traced_number(name, number, statistics_dtype(jnp.dtype(x.dtype).name)) if is_traced(number) else number
        for name, number in (("label_smoothing", smoothing), ("z_loss", z_loss))
    )
    head = None if hidden is None else lm_head_weight
    held = x.shape[-1] if head is None else head.shape[0 if transpose_head else 1]
    size = held * (axis_size(axes) if axes else 1)
    soft = jnp.issubdtype(targets.dtype, jnp.floating)
    _check_classes(targets if soft else None, class_weights, tuple(x.shape[:-1]), held)
    kept, scale = counted(tuple(targets.shape[:-1] if soft else targets.shape), weights, attention_mask)
    here, labels = kept & False, jnp.full(kept.shape, held, jnp.int32)
    if not soft:
        # A number of the vocabulary's size, or ignore_index, may not fit into the labels' own type.
        labels = jnp.asarray(targets).astype(common_dtype(targets.dtype, jnp.int32))
        kept = kept & (labels != ignore_index) & (labels >= 0) & (labels < size)
        labels = labels.astype(jnp.int32) - (jax.lax.axis_index(axes) * held if axes else 0)
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


def _check_classes(soft: Any, class_weights: Any, rows: tuple[int, ...], held: int) -> None:
    """Soft targets and class weights are floating, and have one number for each entry that this device holds."""
    if soft is not None:
        check_compute("targets", soft)
        check_shape("targets", soft, (*rows, held), "[..., V], or integer labels [...]")
    if class_weights is not None:
        check_compute("class_weights", class_weights)
        check_shape("class_weights", class_weights, (held,), "[V]")


def _check_sources(arrays: dict[str, Any]) -> None:
    if arrays["targets"] is None:
        raise invalid("targets", None, "integer labels, or soft targets [..., V]")
    for name, array in arrays.items():
        if array is not None and not hasattr(array, "dtype"):
            raise wrong_type(name, type(array).__name__, "an array")
    if not any(jnp.issubdtype(arrays["targets"].dtype, kind) for kind in (jnp.integer, jnp.floating)):
        raise wrong_type("targets", f"dtype {arrays['targets'].dtype}", "integers, or a floating type for soft targets")
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


def _per_result(out_specs: Any, results: int) -> tuple[Any, ...]:
    """One spec stands for all results but the last, the sum of the weights, which is whole."""
    if isinstance(out_specs, jax.sharding.PartitionSpec) or not isinstance(out_specs, (tuple, list)):
        return (*[out_specs] * (results - 1), jax.sharding.PartitionSpec())
    return tuple(cast("tuple[Any, ...]", out_specs))


class KLDivergenceOutput(NamedTuple):
    """loss, differentiable; weight_sum, the sum of the weights of the tokens that count."""

    loss: t.Loss
    weight_sum: t.Loss


@public()
def fused_kl_divergence(
    student_logits: t.Logits | None = None,
    teacher_logits: t.Logits | None = None,
    weights: t.TokenWeights | None = None,
    *,
    student_hidden: t.Hidden | None = None,
    student_head: t.Head | None = None,
    teacher_hidden: t.TeacherHidden | None = None,
    teacher_head: t.Head | None = None,
    transpose_heads: t.Flag = False,
    attention_mask: t.TokenWeights | None = None,
    reduction: t.Reduction = "mean",
    direction: t.Divergence = "forward",
    temperature: t.Scalar = 1.0,
    beta: t.Number | None = None,
    precision: t.PrecisionLike | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> KLDivergenceOutput:
    """Divergence of a student from a teacher, for distillation; from logits, or from hidden states without storing all logits.

    With `s, t = softmax(student / T), softmax(teacher / T)` of each token and T = temperature, the loss is T^2 times

    - "forward": `KL(t || s) = sum_v t_v log(t_v / s_v)`;
    - "reverse": `KL(s || t)`;
    - "jsd": `beta KL(t || m) + (1 - beta) KL(s || m)` with `m = beta t + (1 - beta) s`.

    The teacher is a constant: it has no gradient. Tokens do not count, and what their rows hold has no effect, where
    attention_mask or the weight is 0.

    Args:
        student_logits: `[..., V]`, float32, bfloat16 or float16; inside in float32. Or None beside student_hidden.
        teacher_logits: `[..., V]`, or None beside teacher_hidden.
        weights: `[...]`, factor on each token's loss; constants under differentiation.
        student_hidden: `[..., D]`, with student_head `[D, V]`.
        student_head: `[D, V]`, or `[V, D]` with transpose_heads; has a gradient.
        teacher_hidden: `[..., D']`, with teacher_head `[D', V]`; another width than the student's will do.
        teacher_head: `[D', V]`, or `[V, D']`.
        transpose_heads: both heads are `[V, D]`, as embeddings are.
        attention_mask: `[...]`, bool or 0 and 1: which tokens count.
        reduction: "none", "sum" (of weighted losses) or "mean" (by the sum of weights; 0 where no token counts).
        direction: "forward", "reverse" or "jsd".
        temperature: T > 0; may be traced: logits are then divided by it in float32, hidden states in their own dtype. It has no
            gradient, and differentiating by it is refused.
        beta: weight of the teacher in the mixture, in [0, 1]; for "jsd" alone, None means 0.5. By convention 0 is "forward" and
            1 is "reverse": the limits of the divergence divided by beta and by 1 - beta, where its own limit is 0.
        precision: of the products with the heads; None = full precision of the dtype.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.
        mesh: make the `jax.shard_map` here; tokens may be split, the vocabulary may not; sums then run over all tokens.
        in_specs: one PartitionSpec or None for each of student_logits, teacher_logits, weights, student_hidden, student_head,
            teacher_hidden, teacher_head, attention_mask; the last may be left out.
        out_specs: PartitionSpec of the loss, or a `KLDivergenceOutput` of them.

    Returns:
        `KLDivergenceOutput(loss, weight_sum)` in float32: scalars, or `[...]` loss with reduction "none".

    Raises:
        ValueError: shapes, values or settings that do not fit.
        TypeError: a wrong type or dtype.
        NoKernelError: no admitted platform supports the call.

    Source: Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015; Agarwal et al., On-Policy Distillation
        of Language Models, 2024 (reverse and jsd).
    """
    given = (
        student_logits,
        teacher_logits,
        weights,
        student_hidden,
        student_head,
        teacher_hidden,
        teacher_head,
        attention_mask,
    )
    arrays: dict[str, Any] = dict(zip(_KL_ARRAYS, given, strict=True))
    for side in ("student", "teacher"):
        _check_side(side, arrays)
    check_reduction(reduction)
    row_axes: Axes = ()
    whole_axes: Axes = ()
    specs = specs_of(arrays, _KL_ARRAYS, mesh, in_specs, out_specs)
    result_specs: Any = out_specs
    if mesh is not None:
        for name, array in arrays.items():
            if array is not None and name not in ("weights", "attention_mask"):
                rows, last = split_axes(specs.get(name), len(array.shape))
                whole = (*rows, *last) if name.endswith("head") else last
                if several(whole, mesh):
                    raise invalid("in_specs", f"{name} split over {whole}", "tokens split, vocabulary and channels whole")
                whole_axes = tuple(dict.fromkeys((*whole_axes, *whole)))
                row_axes = rows if name in ("student_logits", "student_hidden") else row_axes
        result_specs = KLDivergenceOutput(*_per_result(out_specs, 2))
    options = {
        "transpose_heads": transpose_heads,
        "reduction": reduction,
        "direction": direction,
        "temperature": temperature,
        "beta": beta,
        "row_axes": row_axes,
        "whole_axes": whole_axes,
        "precision": precision,
        "platform": platform,
        "cfg": cfg,
    }
    return _mesh.over_mesh(
        _kl_divergence, arrays, options, positional=_KL_ARRAYS, mesh=mesh, in_specs=in_specs, out_specs=result_specs
    )


def _kl_divergence(
    *,
    student_logits: Any,
    teacher_logits: Any,
    weights: Any,
    student_hidden: Any,
    student_head: Any,
    teacher_hidden: Any,
    teacher_head: Any,
    attention_mask: Any,
    reduction: str,
    row_axes: Axes,
    whole_axes: Axes,
    platform: Any,
    cfg: Any,
    **options: Any,
) -> KLDivergenceOutput:
    """On one device. `whole_axes` have one device each."""
    student = student_logits if student_hidden is None else student_hidden
    temperature: Any = options["temperature"]
    if is_traced(temperature):
        number = traced_number("temperature", temperature, statistics_dtype(jnp.dtype(student.dtype).name))
        options["temperature"] = temperature = without_gradient("temperature", number)
    else:
        temperature = finite_number("temperature", temperature)
    kept, scale = counted(tuple(student.shape[:-1]), weights, attention_mask)
    arrays = {
        "student": student,
        "teacher": teacher_logits if teacher_hidden is None else teacher_hidden,
        "student_head": student_head,
        "teacher_head": teacher_head,
        "valid": None if weights is None and attention_mask is None else kept,
    }
    student_name = "student_logits" if student_hidden is None else "student_hidden"
    teacher_name = "teacher_logits" if teacher_hidden is None else "teacher_hidden"
    with argument_names(student=student_name, teacher=teacher_name):
        loss = _KL_DIVERGENCE.invoke(arrays, options, platform=platform, cfg=cfg)
    loss = loss * scale * temperature**2
    loss = jax.lax.psum(loss, whole_axes) if whole_axes else loss
    weight_sum = summed(scale, row_axes)
    return KLDivergenceOutput(reduced(loss, weight_sum, reduction, row_axes), weight_sum)


def _check_side(side: str, arrays: dict[str, Any]) -> None:
    logits, hidden, head = (arrays[f"{side}_{name}"] for name in ("logits", "hidden", "head"))
    for name in (f"{side}_logits", f"{side}_hidden", f"{side}_head", "weights", "attention_mask"):
        if arrays[name] is not None and not hasattr(arrays[name], "dtype"):
            raise wrong_type(name, type(arrays[name]).__name__, "an array")
    if (logits is None) == (hidden is None):
        got = "neither logits nor hidden states" if logits is None else "both logits and hidden states"
        raise invalid(f"{side}_logits", got, f"{side}_logits, or {side}_hidden with {side}_head")
    if (hidden is None) != (head is None):
        got = "None" if head is None else "an array"
        raise invalid(f"{side}_head", got, f"a head with {side}_hidden, and None with {side}_logits")


FusedKLDivergence = class_form("FusedKLDivergence", fused_kl_divergence)
FusedCrossEntropy = class_form("FusedCrossEntropy", fused_cross_entropy)
