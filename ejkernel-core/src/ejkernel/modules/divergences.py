"""Divergences over a vocabulary, for distillation."""

from __future__ import annotations

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions.kl_divergence import KLDivergenceOutput, kl_divergence
from ejkernel.modules._class_api import class_api

__all__ = ["FusedKLDivergence", "KLDivergenceOutput", "fused_kl_divergence"]


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
    return kl_divergence(arrays, options, **run)


FusedKLDivergence = class_api("FusedKLDivergence", fused_kl_divergence)
