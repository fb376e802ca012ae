"""Divergence of a student from a teacher over a vocabulary, tokens split over a mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel import typing as t
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
from ejkernel.operations.kl_divergence.interface import OPERATION as _KL_DIVERGENCE


class KLDivergenceOutput(NamedTuple):
    """loss, differentiable; weight_sum, the sum of the weights of the tokens that count."""

    loss: t.Loss
    weight_sum: t.Loss


def kl_divergence(arrays: dict[str, Any], options: dict[str, Any], **run: Any) -> KLDivergenceOutput:
    """`fused_kl_divergence` with its arguments as `split` gives them."""
    for side in ("student", "teacher"):
        _check_side(side, arrays)
    check_reduction(options["reduction"])
    specs = specs_of(arrays, tuple(arrays), run["mesh"], run["in_specs"], run["out_specs"])
    options["row_axes"] = ()
    if run["mesh"] is not None:
        options["row_axes"] = _row_axes(arrays, specs, run["mesh"])
        run["out_specs"] = KLDivergenceOutput(*per_result(run["out_specs"], 2))
    return _mesh.over_mesh(_of_tokens, arrays, options, **run)


def _row_axes(arrays: dict[str, Any], specs: dict[str, Any], mesh: Any) -> Axes:
    """The axes with several devices over which the student's tokens are split; vocabulary and channels may not be."""
    row_axes: Axes = ()
    for name, array in arrays.items():
        if array is None or name in ("weights", "attention_mask"):
            continue
        rows, last = split_axes(specs.get(name), len(array.shape))
        whole = (*rows, *last) if name.endswith("head") else last
        if several(whole, mesh):
            raise invalid("in_specs", f"{name} split over {whole}", "tokens split, vocabulary and channels whole")
        row_axes = several(rows, mesh) if name in ("student_logits", "student_hidden") else row_axes
    return row_axes


def _check_side(side: str, arrays: dict[str, Any]) -> None:
    """Refuse a side without logits or hidden states, or with both, and a head without hidden states."""
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


def _of_tokens(
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
    """The loss of this device's tokens; along `row_axes` other devices have others."""
    student, student_name = (student_logits, "student_logits") if student_hidden is None else (student_hidden, "student_hidden")
    teacher, teacher_name = (teacher_logits, "teacher_logits") if teacher_hidden is None else (teacher_hidden, "teacher_hidden")
    options["temperature"] = temperature = as_temperature(options["temperature"], student.dtype)
    kept, scale = counted(tuple(student.shape[:-1]), weights, attention_mask, statistics_dtype(jnp.dtype(student.dtype).name))
    arrays = {
        "student": student,
        "teacher": teacher,
        "student_head": student_head,
        "teacher_head": teacher_head,
        "valid": None if weights is None and attention_mask is None else kept,
    }
    with argument_names(student=student_name, teacher=teacher_name):
        loss = _KL_DIVERGENCE.invoke(arrays, options, platform=platform, cfg=cfg)
    loss = loss * scale * temperature**2
    weight_sum = summed(scale, row_axes)
    return KLDivergenceOutput(reduced(loss, weight_sum, reduction, row_axes), weight_sum)
