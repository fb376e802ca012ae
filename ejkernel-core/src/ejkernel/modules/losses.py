"""Losses over a vocabulary, and the log-probabilities of its entries."""

from __future__ import annotations

import numpy as np

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions.cross_entropy import CrossEntropyOutput, cross_entropy, logprobs
from ejkernel.modules._class_api import class_api

__all__ = ["CrossEntropyOutput", "FusedCrossEntropy", "TokenLogprobs", "fused_cross_entropy", "token_logprobs"]


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
        precision: of the products with the head; None = full precision of the dtype. Logits of bfloat16 may be rounded to it where
            gradients are formed with them, and not with "highest".
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
        locals(), "logits targets weights hidden lm_head_weight lm_head_bias attention_mask class_weights"
    )
    return cross_entropy(arrays, options, **run)


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
    return logprobs(arrays, options, **run)


FusedCrossEntropy = class_api("FusedCrossEntropy", fused_cross_entropy)
TokenLogprobs = class_api("TokenLogprobs", token_logprobs)
