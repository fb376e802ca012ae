"""What stands around the products of a mixture of experts: choice, sorting, weighted sum, and the losses that balance it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.errors import invalid, wrong_type
from ejkernel.modules._class_api import class_api
from ejkernel.operations.moe_permute.interface import OPERATION as _MOE_PERMUTE, check_choices
from ejkernel.operations.moe_route.interface import OPERATION as _MOE_ROUTE, SCORINGS
from ejkernel.operations.moe_unpermute.interface import OPERATION as _MOE_UNPERMUTE
from ejkernel.utils.checks import check_compute, check_shape
from ejkernel.utils.dtypes import accumulator

__all__ = [
    "MoePermute",
    "MoePermuteOutput",
    "MoeRoute",
    "MoeRouteOutput",
    "MoeUnpermute",
    "moe_load_balancing_loss",
    "moe_permute",
    "moe_route",
    "moe_unpermute",
    "moe_z_loss",
]


class MoeRouteOutput(NamedTuple):
    """weights `[T,k]` in float32, differentiable; experts int32 `[T,k]`, best first, -1 where none is left."""

    weights: t.RouteWeights
    experts: t.ChosenExperts


class MoePermuteOutput(NamedTuple):
    """rows `[T * k, D]`, differentiable; group_sizes int32 `[E]`; positions int32 `[T,k]`, for `moe_unpermute`."""

    rows: t.SortedRows
    group_sizes: t.ExpertCounts
    positions: t.ChosenExperts


@public()
def moe_route(
    logits: t.RouterLogits,
    k: t.Count,
    *,
    bias: t.ExpertBias | None = None,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    num_groups: t.Count = 1,
    top_groups: t.Count | None = None,
    normalize: t.Flag = True,
    scale: t.Number = 1.0,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> MoeRouteOutput:
    """The k best experts of each token and their weights, in float32.

    `score = softmax(logits)` or `sigmoid(logits)` over E. Chosen are the largest `score + bias`, of equals the lowest index;
    weights are `scale * score`, without the bias, divided by their sum with normalize. A softmax of the chosen logits alone
    (Mixtral) is the same as softmax with normalize.

    Args:
        logits: `[T,E]`, float32, bfloat16 or float16. Experts with -inf are masked: never chosen. NaN is above all else and in the
            weights.
        k: experts of a token.
        bias: `[E]`, moves the choice alone (DeepSeek-V3's correction bias); has no gradient.
        scoring: "softmax", or "sigmoid".
        num_groups: groups of E / num_groups consecutive experts.
        top_groups: groups that a token chooses from; None = all. The value of a group is its largest `score + bias` with softmax
            (DeepSeek-V2), the sum of its two largest with sigmoid (DeepSeek-V3).
        normalize: divide weights by their sum; sigmoid adds 1e-20 to it.
        scale: factor on weights, also called routed_scaling_factor.

    Returns:
        `MoeRouteOutput(weights, experts)`. Where fewer than k experts are not masked, the rest are -1 with weight 0: `moe_permute`
        gives them to no group. So a token whose logits are all -inf is padding.

    Raises:
        ValueError: a shape, k or the groups do not fit.

    Source: Shazeer et al., Outrageously Large Neural Networks, 2017; DeepSeek-AI, DeepSeek-V2, 2024 (groups), and DeepSeek-V3,
        2024 (sigmoid, bias).
    """
    arrays, options, run = split(locals(), "logits bias")
    return MoeRouteOutput(*_MOE_ROUTE.invoke(arrays, options, **run))


@public()
def moe_permute(
    x: t.TokenRows,
    experts: t.ChoicesGiven,
    num_experts: t.Count,
    *,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> MoePermuteOutput:
    """k copies of each token in the order of their experts, as `grouped_matmul` takes them; copies for one expert keep their order.

    Args:
        x: `[T,D]`, float32, bfloat16 or float16.
        experts: integers `[T,k]`, as `moe_route` returns them. A copy whose expert is not in [0, num_experts), such as -1, goes to
            no group; `experts - first` leaves those held on this device.
        num_experts: E, the number of groups.

    Returns:
        `MoePermuteOutput(rows, group_sizes, positions)`. `rows[positions[t, j]] = x[t]`; rows past the sum of group_sizes are 0,
        whatever x holds, and belong to copies of no group, whose positions are below 0 (`~row`).

    Source: Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022.
    """
    arrays, options, run = split(locals(), "x experts")
    return MoePermuteOutput(*_MOE_PERMUTE.invoke(arrays, options, **run))


@public()
def moe_unpermute(
    rows: t.RowsOfExperts,
    positions: t.ChoicesGiven,
    weights: t.ChoiceWeights | None = None,
    *,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.TokenRowsOutput:
    """Back to tokens: `out[t] = sum_j weights[t, j] * rows[positions[t, j]]`, summed in float32 and rounded once.

    Args:
        rows: `[T * k, D]`, float32, bfloat16 or float16.
        positions: integers `[T,k]` as `moe_permute` returns them. Below 0: the copy has no part, whatever weight and rows hold.
        weights: `[T,k]`, floating; None = 1.

    Returns:
        `[T,D]` in the dtype of rows.

    Source: as `moe_permute`.
    """
    arrays, options, run = split(locals(), "rows positions weights")
    return _MOE_UNPERMUTE.invoke(arrays, options, **run)


@public(dispatches=False)
def moe_load_balancing_loss(
    logits: t.RouterLogits,
    experts: t.ChoicesGiven,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    where: t.TokenWhere | None = None,
) -> t.Loss:
    """`E * sum_e f_e * p_e`, f_e the copies for expert e per token, p_e the mean of its probability over tokens.

    k where tokens are spread evenly, as in transformers; Megatron's is this by k. Differentiable in logits, through p alone.
    Tokens whose logits are all -inf do not count. Inside a `shard_map` it is of this device's tokens.

    Args:
        logits: `[T,E]`, those of `moe_route`.
        experts: integers `[T,k]`, as `moe_route` returns them.
        scoring: probabilities are "softmax" of the logits, or "sigmoid" divided by its sum over E.
        where: bool `[T]`, tokens that count; None = all.

    Returns:
        A number in float32.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.

    Source: Fedus et al., Switch Transformers, 2021, equations 4 to 6.
    """
    if scoring not in SCORINGS:
        raise invalid("scoring", repr(scoring), "'softmax' or 'sigmoid'")
    wide, live = _live(logits, where)
    experts = jnp.asarray(experts)
    check_choices("experts", experts, wide.shape[0])
    scores = jax.nn.softmax(wide, axis=-1) if scoring == "softmax" else jax.nn.sigmoid(wide)
    if scoring == "sigmoid":
        scores = scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), jnp.finfo(scores.dtype).tiny)
    count = jnp.maximum(jnp.sum(live, dtype=scores.dtype), 1)
    chosen = (experts[:, :, None] == jnp.arange(wide.shape[1], dtype=experts.dtype)[None, None]) & live[:, None, None]
    frequency = jnp.sum(chosen, axis=(0, 1), dtype=scores.dtype) / count
    probability = jnp.sum(jnp.where(live[:, None], scores, 0), axis=0) / count
    return wide.shape[1] * jnp.sum(frequency * probability)


@public(dispatches=False)
def moe_z_loss(logits: t.RouterLogits, *, where: t.TokenWhere | None = None) -> t.Loss:
    """The mean over tokens of `(log sum_e exp(logits_e))^2`, which keeps logits small. Tokens count as in
    `moe_load_balancing_loss`.

    Args:
        logits: `[T,E]`, those of `moe_route`.
        where: bool `[T]`, tokens that count; None = all.

    Returns:
        A number in float32.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.

    Source: Zoph et al., ST-MoE, 2022, equation 5.
    """
    wide, live = _live(logits, where)
    lse = jnp.where(live, jax.nn.logsumexp(wide, axis=-1), 0)
    return jnp.sum(lse * lse) / jnp.maximum(jnp.sum(live, dtype=lse.dtype), 1)


def _live(logits: Any, where: Any) -> tuple[Any, Any]:
    """Logits in float32, 0 for tokens that do not count, and which count `[T]`."""
    check_compute("logits", logits, ndim=2)
    wide = jnp.asarray(logits).astype(accumulator(logits.dtype))
    live = jnp.any(wide != -jnp.inf, axis=-1)
    if where is not None:
        check_shape("where", where, wide.shape[:1], "[T]")
        if where.dtype != bool:
            raise wrong_type("where", f"dtype {where.dtype}", "bool; True marks tokens that count")
        live = live & where
    return jnp.where(live[:, None], wide, 0), live


MoeRoute = class_api("MoeRoute", moe_route)
MoePermute = class_api("MoePermute", moe_permute)
MoeUnpermute = class_api("MoeUnpermute", moe_unpermute)
