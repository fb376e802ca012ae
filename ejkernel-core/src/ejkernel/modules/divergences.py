"""Divergences over a vocabulary, for distillation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.call.arrays import statistics_dtype
from ejkernel.compositions import mesh as _mesh
from ejkernel.compositions.axes import Axes
from ejkernel.compositions.vocabulary_parallel import (
    as_temperature,
    check_reduction,
    counted,
    per_result,
    reduced,
    several,
    specs_of,
    split_axes,
    summed,
)
from ejkernel.errors import argument_names, invalid, wrong_type
from ejkernel.modules._class_api import class_api
from ejkernel.operations.kl_divergence.interface import OPERATION as _KL_DIVERGENCE

__all__ = ["FusedKLDivergence", "KLDivergenceOutput", "fused_kl_divergence"]


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
        mesh: make the `jax.shard_map` here; tokens may be split, the vocabulary may not; sums then run over all tokens.
        in_specs: one PartitionSpec or None for each of student_logits, teacher_logits, weights, student_hidden, student_head,
            teacher_hidden, teacher_head, attention_mask; the last may be left out.
        out_specs: PartitionSpec of the loss, or a `KLDivergenceOutput` of them.

    Returns:
        `KLDivergenceOutput(loss, weight_sum)` in float32: scalars, or `[...]` loss with reduction "none".

    Source: Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015; Agarwal et al., On-Policy Distillation
        of Language Models, 2024 (reverse and jsd).
    """
    arrays, options, run = split(
        locals(), "student_logits teacher_logits weights student_hidden student_head teacher_hidden teacher_head attention_mask"
    )
    for side in ("student", "teacher"):
        _check_side(side, arrays)
    check_reduction(reduction)
    row_axes: Axes = ()
    specs = specs_of(arrays, tuple(arrays), mesh, in_specs, out_specs)
    if mesh is not None:
        for name, array in arrays.items():
            if array is not None and name not in ("weights", "attention_mask"):
                rows, last = split_axes(specs.get(name), len(array.shape))
                whole = (*rows, *last) if name.endswith("head") else last
                if several(whole, mesh):
                    raise invalid("in_specs", f"{name} split over {whole}", "tokens split, vocabulary and channels whole")
                row_axes = several(rows, mesh) if name in ("student_logits", "student_hidden") else row_axes
        run["out_specs"] = KLDivergenceOutput(*per_result(out_specs, 2))
    return _mesh.over_mesh(_kl_divergence, arrays, {**options, "row_axes": row_axes}, **run)


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
    platform: Any,
    cfg: Any,
    **options: Any,
) -> KLDivergenceOutput:
    """On one device."""
    student = student_logits if student_hidden is None else student_hidden
    options["temperature"] = temperature = as_temperature(options["temperature"], student.dtype)
    kept, scale = counted(tuple(student.shape[:-1]), weights, attention_mask, statistics_dtype(jnp.dtype(student.dtype).name))
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


FusedKLDivergence = class_api("FusedKLDivergence", fused_kl_divergence)
