"""`delta_rule` in NumPy float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ejkernel.operations.delta_rule.interface import NORM_EPSILON, DeltaRuleCall, DeltaRuleInputs, DeltaRuleOutputs


class _Vectors(NamedTuple):
    """What each token does, with H heads: query, key, decay factor, read, write, key of the value, value, beta."""

    query: Any
    key: Any
    factor: Any
    read: Any
    write: Any
    stored: Any
    value: Any
    beta: Any


def _lengths(x: Any) -> Any:
    return np.sqrt((x**2).sum(-1, keepdims=True) + NORM_EPSILON)


_TOKENS = ("query", "key", "value", "beta", "decay", "a", "b")


def _taking_part(call: DeltaRuleCall, inputs: DeltaRuleInputs) -> DeltaRuleInputs:
    """The inputs with zeros in place of tokens that take no part, which may hold NaN."""
    mask = np.zeros(inputs.query.shape[:2], bool)
    for row, _, tokens in _sequences(call, inputs):
        mask[row, [token for token, _ in tokens]] = True
    arrays = {name: getattr(inputs, name) for name in _TOKENS if getattr(inputs, name) is not None}
    return inputs._replace(
        **{name: np.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, 0) for name, x in arrays.items()}
    )


def _vectors(call: DeltaRuleCall, inputs: DeltaRuleInputs) -> _Vectors:
    def wide(x: Any) -> Any:
        return np.repeat(x, call.heads // x.shape[2], axis=2)

    query, key, value = (wide(x) for x in inputs[:3])
    if call.use_qk_l2norm:
        query, key = query / _lengths(query), key / _lengths(key)
    beta = np.ones(key.shape[:3]) if inputs.beta is None else wide(inputs.beta)
    factor = np.ones(key.shape) if inputs.decay is None else np.exp(wide(inputs.decay))
    factor = np.broadcast_to(factor if factor.ndim == 4 else factor[..., None], key.shape)
    stored = beta[..., None] * key
    read = factor * key if inputs.b is None else wide(inputs.b)
    write = -stored if inputs.a is None else wide(inputs.a)
    return _Vectors(query, key, factor, read, write, stored, value, beta)


def _sequences(call: DeltaRuleCall, inputs: DeltaRuleInputs) -> Iterator[tuple[int, int, list[tuple[int, bool]]]]:
    """Row of the batch, index of the sequence, and its tokens in order, each with whether the state becomes 0 before it."""
    batch, length = inputs.query.shape[:2]
    step = -1 if call.reverse else 1
    for row in range(batch):
        if inputs.cu_seqlens is not None:
            bounds = inputs.cu_seqlens[row % len(inputs.cu_seqlens)]
            for index in range(call.sequences):
                yield row, index, [(token, False) for token in range(bounds[index], bounds[index + 1])[::step]]
            continue
        ids = np.zeros(length, int) if inputs.seg_ids is None else inputs.seg_ids[row % len(inputs.seg_ids)]
        tokens = [token for token in range(length)[::step] if ids[token] >= 0]
        before = [*tokens[:1], *tokens[:-1]]
        yield row, 0, [(token, ids[token] != ids[last]) for token, last in zip(tokens, before, strict=True)]


def _initial(call: DeltaRuleCall, inputs: DeltaRuleInputs) -> Any:
    batch, _, _, width = inputs.query.shape
    shape = (batch, call.sequences, call.heads, width, inputs.value.shape[3])
    return np.zeros(shape) if inputs.initial_state is None else inputs.initial_state


def forward(call: DeltaRuleCall, inputs: DeltaRuleInputs) -> DeltaRuleOutputs:
    inputs = _taking_part(call, inputs)
    x, final = _vectors(call, inputs), _initial(call, inputs).copy()
    out = np.zeros((*inputs.query.shape[:2], *final.shape[2:3], final.shape[-1]))
    for row, index, tokens in _sequences(call, inputs):
        for token, fresh in tokens:
            at = (row, token)
            state = final[row, index] = _next(x, at, final[row, index] * (not fresh))
            out[at] = call.softmax_scale * np.einsum("hd,hdv->hv", x.query[at], state)
    return DeltaRuleOutputs(out, final if call.return_state else None)


def _next(x: _Vectors, at: tuple[int, int], state: Any) -> Any:
    """The state after a token."""
    correction = np.einsum("hd,hdv->hv", x.read[at], state)
    return x.factor[at][..., None] * state + _outer(x.write[at], correction) + _outer(x.stored[at], x.value[at])


def _outer(rows: Any, columns: Any) -> Any:
    return rows[..., :, None] * columns[..., None, :]


def backward(
    call: DeltaRuleCall, inputs: DeltaRuleInputs, outputs: DeltaRuleOutputs, cotangents: DeltaRuleOutputs
) -> DeltaRuleInputs:
    inputs = _taking_part(call, inputs)
    x, initial = _vectors(call, inputs), _initial(call, inputs)
    d_initial = np.zeros(initial.shape) if cotangents.final_state is None else cotangents.final_state.copy()
    d = _Vectors(*(np.zeros(values.shape) for values in x))
    for row, index, tokens in _sequences(call, inputs):
        states = [initial[row, index]]
        for token, fresh in tokens:
            states.append(_next(x, (row, token), states[-1] * (not fresh)))
        d_state = d_initial[row, index]
        for number in reversed(range(len(tokens))):
            token, fresh = tokens[number]
            at, grad = (row, token), cotangents.out[row, token] * call.softmax_scale
            old, new = states[number] * (not fresh), states[number + 1]
            d_state = d_state + _outer(x.query[at], grad)
            correction = np.einsum("hd,hdv->hv", x.read[at], old)
            d_correction = np.einsum("hd,hdv->hv", x.write[at], d_state)
            d.query[at] = np.einsum("hdv,hv->hd", new, grad)
            d.write[at] = np.einsum("hdv,hv->hd", d_state, correction)
            d.stored[at] = np.einsum("hdv,hv->hd", d_state, x.value[at])
            d.value[at] = np.einsum("hdv,hd->hv", d_state, x.stored[at])
            d.read[at] = np.einsum("hdv,hv->hd", old, d_correction)
            d.factor[at] = np.einsum("hdv,hdv->hd", old, d_state)
            d_state = x.factor[at][..., None] * d_state + _outer(x.read[at], d_correction)
            d_state = d_state * (not fresh)
        d_initial[row, index] = d_state
    return _to_inputs(call, inputs, x, d, d_initial)


def _to_inputs(call: DeltaRuleCall, inputs: DeltaRuleInputs, x: _Vectors, d: _Vectors, d_initial: Any) -> DeltaRuleInputs:
    """From the gradients of what each token does to those of the arrays that it is made of."""
    d_stored, d_key, d_factor = d.stored, d.key, d.factor
    if inputs.a is None:
        d_stored = d_stored - d.write
    if inputs.b is None:
        d_key, d_factor = d_key + x.factor * d.read, d_factor + x.key * d.read
    d_key = d_key + x.beta[..., None] * d_stored
    d_query = d.query
    if call.use_qk_l2norm:
        d_query, d_key = (_through_norm(call, *pair) for pair in ((inputs.query, d_query), (inputs.key, d_key)))
    d_decay = d_factor * x.factor
    gradients = {
        "query": d_query,
        "key": d_key,
        "value": d.value,
        "beta": (d_stored * x.key).sum(-1),
        "decay": d_decay if call.decays_by_channel else d_decay.sum(-1),
        "a": d.write,
        "b": d.read,
    }
    summed = {
        name: None if getattr(inputs, name) is None else _sum_heads(gradient, getattr(inputs, name).shape)
        for name, gradient in gradients.items()
    }
    return DeltaRuleInputs(**summed, initial_state=None if inputs.initial_state is None else d_initial)


def _sum_heads(gradient: Any, shape: tuple[int, ...]) -> Any:
    return gradient.reshape(*shape[:3], -1, *shape[3:]).sum(axis=3) if gradient.size else np.zeros(shape)


def _through_norm(call: DeltaRuleCall, array: Any, gradient: Any) -> Any:
    array = np.repeat(array, call.heads // array.shape[2], axis=2)
    length = _lengths(array)
    return (gradient - array * (array * gradient).sum(-1, keepdims=True) / length**2) / length
