"""The float64 reference of `flash_attention`: its numbers, its gradients by finite differences, and the shared cases."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from ejkernel.operations.flash_attention import reference
from ejkernel.operations.flash_attention.cases import CASES, TOGGLES
from ejkernel.operations.flash_attention.interface import (
    OPERATION,
    FlashAttentionCall,
    FlashAttentionInputs,
    FlashAttentionOutputs,
)

SMALL = {case.name: case for case in CASES if not case.is_benchmark}
FLOATING = OPERATION.differentiable


def problem(name, seed=0):
    """Canonical call and float64 NumPy inputs of a case."""
    case = SMALL[name]
    bound = OPERATION.canonicalise(**case.arrays(np.random.default_rng(seed)), **case.options)

    def as_numpy(array):
        array = np.asarray(array)
        return array.astype(np.float64) if array.dtype.kind == "f" else array

    return bound.call, jax.tree.map(as_numpy, bound.inputs)


def present(inputs):
    return [name for name in FLOATING if getattr(inputs, name) is not None]


def test_numbers_by_hand():
    query, key = np.zeros((1, 2, 1, 1), np.float32), np.zeros((1, 2, 1, 1), np.float32)
    value = np.array([2.0, 6.0], np.float32).reshape(1, 2, 1, 1)
    bias = np.array([[0.0, np.log(3.0)], [0.0, 0.0]], np.float32)
    sinks = np.array([np.log(4.0)], np.float32)
    bound = OPERATION.canonicalise(query, key, value, bias, sinks)
    outputs = reference.forward(bound.call, jax.tree.map(np.float64, bound.inputs))
    np.testing.assert_allclose(outputs.out.ravel(), [(2 + 3 * 6) / 8, (2 + 6) / 6], rtol=1e-6)
    np.testing.assert_allclose(outputs.lse.ravel(), [np.log(8), np.log(6)], rtol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_case_is_finite_and_shaped_by_the_contract(name):
    call, inputs = problem(name)
    outputs = reference.forward(call, inputs)
    expected = OPERATION.output_specs(dataclasses.replace(call, save_residuals=True))
    assert outputs.out.shape == expected.out.shape
    assert outputs.lse.shape == expected.lse.shape
    assert np.isfinite(outputs.out).all()
    assert not np.isnan(outputs.lse).any()
    assert not np.isposinf(outputs.lse).any()
    gradients = reference.backward(call, inputs, outputs, FlashAttentionOutputs(np.ones_like(outputs.out)))
    for name in present(inputs):
        assert getattr(gradients, name).shape == getattr(inputs, name).shape
        assert np.isfinite(getattr(gradients, name)).all()


GRADIENT_CASES = [
    "gqa-causal-tail", "value-size", "scale", "bottom-right-empty-rows", "window-sides", "chunk-causal",
    "prefix-window", "positions", "segments-causal-padding", "lengths-0-and-1", "mask-heads", "bias-2x2x13x21",
    "bias-2x1x1x21", "bias-1x1x13x1", "bias-13x21", "bias-gqa", "sinks", "sinks-several", "sinks-shared",
    "sinks-empty-rows", "soft-cap", "soft-cap-causal-window", "dropout", "dropout-causal", "unnormalised",
    "unnormalised-sinks", "lse", "everything",
]  # fmt: skip


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_backward_is_the_derivative_of_forward(name):
    """Along a random direction of every input; unnormalised outputs with the row's largest logit held where it was."""
    call, inputs = problem(name)
    rng = np.random.default_rng(1)
    base = reference.forward(call, inputs)
    visible_rows = np.isfinite(base.lse)
    weights = FlashAttentionOutputs(rng.standard_normal(base.out.shape), rng.standard_normal(base.lse.shape) * visible_rows)
    normalised = dataclasses.replace(call, normalize_output=True)
    base_total = np.where(visible_rows, reference.forward(normalised, inputs).lse, 0.0)
    ratio = np.zeros(1) if call.normalize_output else unnormalised_factor(call, inputs)

    def objective(shifted):
        outputs = reference.forward(normalised, shifted)
        lse = np.where(visible_rows, outputs.lse, 0.0)
        factor = 1.0 if call.normalize_output else (ratio * np.exp(lse - base_total))[..., None]
        return (weights.out * outputs.out * factor).sum() + (weights.lse * lse).sum()

    gradients = reference.backward(call, inputs, base, weights)
    for field in present(inputs):
        array = getattr(inputs, field)
        direction, step = rng.standard_normal(array.shape), 1e-5
        ends = [objective(inputs._replace(**{field: array + sign * step * direction})) for sign in (1, -1)]
        numeric = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose((getattr(gradients, field) * direction).sum(), numeric, rtol=2e-7, atol=2e-7, err_msg=field)


def unnormalised_factor(call, inputs):
    """What an unnormalised row is divided by, measured on values of one."""
    ones = inputs._replace(value=np.ones_like(inputs.value), dropout_streams=None)
    return reference.forward(call, ones).out[..., 0] / np.maximum(
        reference.forward(dataclasses.replace(call, normalize_output=True), ones).out[..., 0], 1e-300
    )


def test_unnormalised_output_is_the_sum_of_exponentials_below_the_largest_logit():
    call, inputs = problem("unnormalised")
    logits = call.softmax_scale * np.einsum("bthd,bshd->bths", inputs.query, inputs.key)
    expected = np.einsum("bths,bshv->bthv", np.exp(logits - logits.max(-1, keepdims=True)), inputs.value)
    np.testing.assert_allclose(reference.forward(call, inputs).out, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "name", ["bottom-right-empty-rows", "mask-nothing-visible", "lengths-0-and-1", "window-empty-rows", "no-keys"]
)
def test_rows_that_see_nothing(name):
    call, inputs = problem(name)
    outputs = reference.forward(call, inputs)
    empty = np.isneginf(outputs.lse)
    assert empty.any()
    assert (outputs.out[empty] == 0).all()
    cotangents = FlashAttentionOutputs(np.random.default_rng(2).standard_normal(outputs.out.shape), np.ones_like(outputs.lse))
    assert (reference.backward(call, inputs, outputs, cotangents).query[empty] == 0).all()


def test_nothing_depends_on_masked_places():
    call, inputs = problem("nan-in-masked-places")
    clean = jax.tree.map(lambda array: np.nan_to_num(array, nan=3.0, posinf=4.0, neginf=5.0), inputs)
    for values, others in zip(run_both(call, inputs), run_both(call, clean), strict=True):
        np.testing.assert_array_equal(values, others)


def run_both(call, inputs):
    outputs = reference.forward(call, inputs)
    gradients = reference.backward(call, inputs, outputs, FlashAttentionOutputs(np.ones_like(outputs.out)))
    return [*outputs, *(getattr(gradients, name) for name in present(inputs))]


def test_gradients_of_hidden_keys_are_zero():
    call, inputs = problem("nan-in-masked-places")
    outputs = reference.forward(call, inputs)
    gradients = reference.backward(call, inputs, outputs, FlashAttentionOutputs(np.ones_like(outputs.out)))
    assert (gradients.key[0, 9:] == 0).all()
    assert (gradients.value[1, 14:] == 0).all()
    assert (gradients.query[1, 11:] == 0).all()


def test_dropout_keeps_the_expected_share_and_scale():
    call, inputs = problem("dropout")
    ones = inputs._replace(value=np.ones_like(inputs.value))
    sums = reference.forward(call, ones).out[..., 0]
    assert abs(sums.mean() - 1) < 0.05
    assert sums.std() > 0.05


def test_every_field_of_the_call_has_a_toggle():
    fields = {field.name for field in dataclasses.fields(FlashAttentionCall)}
    assert set(TOGGLES) == fields - {"query", "key", "value", "save_residuals"}
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert {toggle.case for toggle in TOGGLES.values()} <= set(names)


@pytest.mark.parametrize("field", [field for field, toggle in TOGGLES.items() if not toggle.program])
def test_every_toggle_changes_its_field_and_the_numbers(field):
    toggle = TOGGLES[field]
    case = SMALL[toggle.case]
    arrays = dict(case.arrays(np.random.default_rng(0)))
    changed = {name: array for name, array in arrays.items() if name != toggle.drop}
    bounds = [
        OPERATION.canonicalise(**arrays, **case.options),
        OPERATION.canonicalise(**changed, **{**case.options, **toggle.options}),
    ]
    assert getattr(bounds[0].call, field) != getattr(bounds[1].call, field)
    outputs = [reference.forward(b.call, jax.tree.map(np.asarray, b.inputs)).out for b in bounds]
    assert abs(outputs[0] - outputs[1]).max() > 1e-3


def test_inputs_of_a_case_are_tiny():
    for name in SMALL:
        call, _ = problem(name)
        assert max(call.query.shape[1], call.key.shape[1]) <= 64
        assert set(FlashAttentionInputs._fields) <= {field.name for field in dataclasses.fields(call)}
