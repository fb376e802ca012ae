"""Both phases; each recomputes the logits of a tile.

Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.cross_entropy.interface import IGNORED, CrossEntropyCall, CrossEntropyInputs, CrossEntropyOutputs
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._vocabulary import Head, Tiles, VocabularyConfig, merged_rows, over_rows, row_steps, zero_head


class Rows(NamedTuple):
    """Running state `[b, n]`: largest logit, sum of `exp(logit - largest)`, the target's logit, sum of logits."""

    largest: Any
    total: Any
    target: Any
    logit_sum: Any


def _tiles(call: CrossEntropyCall, config: VocabularyConfig) -> tuple[Tiles, int]:
    """The tiles, and the number of steps over rows."""
    tiles = Tiles.of(call.vocabulary, config.block_vocabulary, call.transpose_head, call.precision, call.head)
    if call.head is None:
        return tiles, 1
    rows = 1
    for size in call.x.shape[1:-1]:
        rows *= size
    return tiles, row_steps(call.x.shape[0], rows, config.block_rows)


def forward(call: CrossEntropyCall, inputs: CrossEntropyInputs, config: VocabularyConfig) -> CrossEntropyOutputs:
    tiles, steps = _tiles(call, config)
    head = Head(inputs.head, inputs.head_bias)
    targets = merged_rows(inputs.targets, 0)

    # Padding rows hold 0, which must mean ignored.
    def work(_: None, arrays: tuple[Any, Any]) -> tuple[None, CrossEntropyOutputs]:
        return None, _rows(call, tiles, head, arrays[0], arrays[1] + IGNORED)

    _, outputs = over_rows(work, None, (merged_rows(inputs.x, 1), targets - IGNORED), steps)
    return CrossEntropyOutputs(*(None if value is None else value.reshape(inputs.targets.shape) for value in outputs))


def _rows(call: CrossEntropyCall, tiles: Tiles, head: Head, x: Any, targets: Any) -> CrossEntropyOutputs:
    valid = targets != IGNORED
    x = jnp.where(valid[..., None], x, jnp.zeros((), x.dtype))
    like = (x, targets, head)
    zeros = vary_like(jnp.zeros(x.shape[:2], accumulator(x.dtype)), like)
    state = Rows(zeros - jnp.inf, zeros, zeros, zeros if call.sum_logits else None)

    def update(rows: Rows, tile: Any) -> Rows:
        logits, _ = capped(call.logit_softcap, tiles.logits(x, head, tile))
        columns, own = tiles.columns(tile)
        seen = logits if own is None else jnp.where(own, logits, -jnp.inf)
        # Any constant may be subtracted, so the maximum needs no derivative.
        largest = jnp.maximum(rows.largest, jax.lax.stop_gradient(jnp.max(seen, axis=-1)))
        shift = shift_of(largest)
        total = rows.total * jnp.exp(rows.largest - shift) + jnp.sum(jnp.exp(seen - shift[..., None]), axis=-1)
        if tiles.size == tiles.block:  # gather: comparing every logit kept XLA on CPU from fusing the sums
            found = jnp.take_along_axis(logits, jnp.clip(targets, 0, tiles.size - 1)[..., None], axis=-1)[..., 0]
            target = jnp.where((targets >= 0) & (targets < tiles.size), found, 0)
        else:
            wanted = columns == targets[..., None]
            wanted = wanted if own is None else wanted & own
            target = rows.target + jnp.sum(jnp.where(wanted, logits, 0), axis=-1)
        if rows.logit_sum is None:
            return Rows(largest, total, target, None)
        logits = logits if own is None else jnp.where(own, logits, 0)
        return Rows(largest, total, target, rows.logit_sum + jnp.sum(logits, axis=-1))

    rows = tiles.fold(update, state)
    log_total, shift = jnp.log(rows.total), shift_of(rows.largest)
    here = (targets >= 0) & (targets < tiles.size)
    loss = log_total + jnp.where(here, shift - rows.target, shift)
    outputs = CrossEntropyOutputs(loss, log_total + shift, rows.logit_sum)
    return CrossEntropyOutputs(*(None if value is None else jnp.where(valid, value, 0) for value in outputs))


def shift_of(largest: Any) -> Any:
    """0 where every logit is -inf, since -inf - -inf is NaN."""
    return jnp.where(largest == -jnp.inf, 0, largest)


def capped(soft_cap: float | None, logits: Any) -> tuple[Any, Any]:
    """Logits after the soft cap, which leaves -inf as it is, and its slope; None for 1."""
    if soft_cap is None:
        return logits, None
    bent = jnp.tanh(logits / soft_cap)
    return jnp.where(logits == -jnp.inf, logits, soft_cap * bent), 1 - bent * bent


def logits_gradient(logits: Any, slope: Any, lse: Any, wanted: Any, kept: Any, d_loss: Any, d_lse: Any, d_sum: Any) -> Any:
    """Of logits `[b, n, block]`, whose target is where `wanted` is; 0 but for those that are `kept`. The others are `[b, n, 1]`."""
    found = jnp.exp(logits - shift_of(lse)) * (d_loss + d_lse) + d_sum
    found = found - jnp.where(wanted, d_loss, 0)
    found = found if slope is None else found * slope
    return jnp.where(kept, found, 0)


def backward(
    call: CrossEntropyCall,
    inputs: CrossEntropyInputs,
    outputs: CrossEntropyOutputs,
    cotangents: CrossEntropyOutputs,
    config: VocabularyConfig,
) -> CrossEntropyInputs:
    tiles, steps = _tiles(call, config)
    head = Head(inputs.head, inputs.head_bias)
    x, targets, lse = merged_rows(inputs.x, 1), merged_rows(inputs.targets, 0), merged_rows(outputs.lse, 0)
    given = CrossEntropyOutputs(*(None if value is None else merged_rows(value, 0) for value in cotangents))

    def work(sums: Head, arrays: Any) -> tuple[Head, Any]:
        return _gradients(call, tiles, head, sums, arrays[0], arrays[1] + IGNORED, *arrays[2:])

    sums = zero_head(head, steps > 1, (inputs, outputs, cotangents))
    sums, d_x = over_rows(work, sums, (x, targets - IGNORED, lse, given), steps)
    return CrossEntropyInputs(
        x=d_x.reshape(inputs.x.shape),
        targets=None,
        head=None if sums.matrix is None else sums.matrix.astype(inputs.head.dtype),
        head_bias=None if sums.bias is None else sums.bias.astype(inputs.head_bias.dtype),
    )


def _gradients(
    call: CrossEntropyCall, tiles: Tiles, head: Head, sums: Head, x: Any, targets: Any, lse: Any, given: CrossEntropyOutputs
) -> tuple[Head, Any]:
    """The head's gradient with these rows' contribution, and the gradient of x."""
    valid = targets != IGNORED
    clean = jnp.where(valid[..., None], x, jnp.zeros((), x.dtype))
    none = jnp.zeros((), lse.dtype)
    d_loss, d_lse, d_sum = (none if value is None else jnp.where(valid, value, 0)[..., None] for value in given)

    def d_logits_of(tile: Any) -> Any:
        logits, slope = capped(call.logit_softcap, tiles.logits(clean, head, tile))
        columns, own = tiles.columns(tile)
        kept = valid[..., None] if own is None else valid[..., None] & own
        wanted = columns == targets[..., None]
        return logits_gradient(logits, slope, lse[..., None], wanted, kept, d_loss, d_lse, d_sum)

    if head.matrix is None:
        return sums, d_logits_of((0, 0)).astype(x.dtype)

    def add(state: tuple[Head, Any], tile: Any) -> tuple[Head, Any]:
        sums, d_x = state
        d_logits = d_logits_of(tile)
        return tiles.add_to_head(sums, clean, d_logits, tile), d_x + tiles.d_rows(d_logits, head, tile).astype(d_x.dtype)

    start = vary_like(jnp.zeros(x.shape, accumulator(x.dtype)), (x, head, given, sums))
    sums, d_x = tiles.fold(add, (sums, start))
    return sums, d_x.astype(x.dtype)
