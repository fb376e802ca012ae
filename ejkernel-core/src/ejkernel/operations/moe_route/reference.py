"""`moe_route` in NumPy float64: one token after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.operations.moe_route.interface import TINY, MoeRouteCall, MoeRouteInputs, MoeRouteOutputs


def _scores(call: MoeRouteCall, logits: Any) -> Any:
    """`[e]`; 0 where the logit is -inf."""
    if call.scoring == "sigmoid":
        return 0.5 * (1 + np.tanh(0.5 * logits))
    largest = logits.max()
    powers = np.exp(logits - (0 if largest == -np.inf else largest))
    return powers / (powers.sum() or 1)


def _group_value(call: MoeRouteCall, values: Any) -> float:
    best = np.sort(values)[::-1]
    if call.scoring == "softmax" or len(best) == 1 or best[1] == -np.inf:
        return best[0]
    return best[0] + best[1]


def _choose(call: MoeRouteCall, logits: Any, bias: Any) -> list[int]:
    """The experts of one token, fewer than k where no more are left."""
    worth = _scores(call, logits) + (0 if bias is None else bias)
    worth = np.where(np.isnan(worth), np.inf, np.where(logits == -np.inf, -np.inf, worth))
    rank = np.where(np.isnan(logits), np.inf, logits) if bias is None else worth
    if call.num_groups > 1:
        parts = (worth if call.scoring == "sigmoid" else rank).reshape(call.num_groups, -1)
        values = np.array([_group_value(call, part) for part in parts])
        admitted = np.isin(np.arange(call.num_groups), np.argsort(-values, kind="stable")[: call.top_groups])
        rank = np.where(np.repeat(admitted, parts.shape[1]), rank, -np.inf)
    order = np.argsort(-rank, kind="stable")[: call.k]
    return [int(expert) for expert in order if rank[expert] > -np.inf]


def forward(call: MoeRouteCall, inputs: MoeRouteInputs) -> MoeRouteOutputs:
    batch, tokens, _ = inputs.logits.shape
    weights, experts = np.zeros((batch, tokens, call.k)), np.full((batch, tokens, call.k), -1, np.int32)
    for at in np.ndindex(batch, tokens):
        logits = inputs.logits[at]
        chosen = _choose(call, logits, None if inputs.bias is None else inputs.bias[at[0] % len(inputs.bias)])
        if not chosen:
            continue
        scores = _scores(call, logits)[chosen]
        if call.normalize:
            scores = _scores(call, logits[chosen]) if call.scoring == "softmax" else scores / (scores.sum() + TINY)
        weights[at][: len(chosen)], experts[at][: len(chosen)] = call.scale * scores, chosen
    return MoeRouteOutputs(weights, experts)


def backward(
    call: MoeRouteCall, inputs: MoeRouteInputs, outputs: MoeRouteOutputs, cotangents: MoeRouteOutputs
) -> MoeRouteInputs:
    d_logits = np.zeros(inputs.logits.shape)
    for at in np.ndindex(*inputs.logits.shape[:2]):
        chosen = outputs.experts[at][outputs.experts[at] >= 0]
        logits, grad = inputs.logits[at], call.scale * cotangents.weights[at][: len(chosen)]
        if not len(chosen):
            continue
        if call.scoring == "softmax":
            among = chosen if call.normalize else np.arange(len(logits))
            scores, d_scores = _scores(call, logits[among]), np.zeros(len(among))
            d_scores[np.arange(len(chosen)) if call.normalize else chosen] = grad
            d_logits[at][among] = scores * (d_scores - (scores * d_scores).sum())
            continue
        scores = _scores(call, logits)[chosen]
        if call.normalize:
            total = scores.sum() + TINY
            grad = (grad - (grad * scores).sum() / total) / total
        d_logits[at][chosen] = grad * scores * (1 - scores)
    return MoeRouteInputs(d_logits)
