"""Recurrences in chunks: a token that is not finite reaches itself and later tokens, and no earlier one."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operations.delta_rule import reference as delta_reference
from ejkernel.operations.delta_rule.cases import arrays as delta
from ejkernel.operations.delta_rule.interface import OPERATION as DELTA_RULE
from ejkernel.operations.linear_recurrence import reference as linear_reference
from ejkernel.operations.linear_recurrence.cases import arrays as linear
from ejkernel.operations.linear_recurrence.interface import OPERATION as LINEAR_RECURRENCE
from ejkernel.testing.checks import widened
from ejkernel.utils.tolerance import FORWARD, check_close

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.delta_rule import config as delta_config, general, kernel as delta_kernel
from ejkernel_triton.linear_recurrence import config as linear_config, decays, kernel as linear_kernel, launches

FUSED, SEGMENTED = linear_config.Config(16, 0, 16, 4, 1), linear_config.Config(16, 16, 16, 4, 1)
CHUNKED, SPLIT = delta_config.Config(16, 16, 4, 1), delta_config.Config(16, 16, 4, 1, segments=2)
PACKED = (0, 9, 30, 40)


def backward_in_time(arrays: Any) -> Any:
    """The arrays of a case, the last token first."""
    return lambda rng: {name: np.flip(array, 1) for name, array in arrays(rng).items()}


NAN: dict[str, tuple[Any, Any, Any, Any]] = {
    "by key": (LINEAR_RECURRENCE, linear(1, 40, decays="gk", garbage=22, state=True), {"return_state": True}, FUSED),
    "by key, in segments": (LINEAR_RECURRENCE, linear(1, 40, decays="gk g", garbage=22), {}, SEGMENTED),
    "scalar": (LINEAR_RECURRENCE, linear(length=24, decays="g gamma", garbage=13), {}, FUSED),
    "scalar, backward in time": (
        LINEAR_RECURRENCE,
        backward_in_time(linear(length=24, decays="g", garbage=13)),
        {"reverse": True},
        FUSED,
    ),
    "no decay": (LINEAR_RECURRENCE, linear(length=24, garbage=1, value_heads=4), {}, SEGMENTED),
    "factors": (LINEAR_RECURRENCE, linear(length=24, decays="g", value_scale=True, skip="head", garbage=13), {}, FUSED),
    "bonus": (LINEAR_RECURRENCE, linear(length=24, decays="gk", bonus=True, garbage=13), {}, FUSED),
    "packed": (LINEAR_RECURRENCE, linear(1, 40, decays="g", garbage=22, bounds=PACKED, state=True), {}, SEGMENTED),
    "delta": (DELTA_RULE, delta(1, 40, garbage=22, state=True), {"return_state": True}, CHUNKED),
    "delta, split": (DELTA_RULE, delta(1, 40, garbage=22, state=True), {"return_state": True}, SPLIT),
    "delta by channel, split": (DELTA_RULE, delta(1, 40, decay="channel", garbage=22), {}, SPLIT),
    "delta, packed": (DELTA_RULE, delta(1, 40, garbage=22, bounds=PACKED), {}, CHUNKED),
    "delta, segments": (DELTA_RULE, delta(1, 24, garbage=13, ids=[0] * 9 + [1] * 15), {}, CHUNKED),
    "delta with a and b": (DELTA_RULE, delta(length=24, decay="channel", low_rank="ab", beta=False, garbage=13), {}, CHUNKED),
}


@pytest.mark.parametrize("name", NAN)
def test_nan_reaches_no_earlier_output(name, monkeypatch):
    for module in (decays, launches, delta_kernel, general):
        monkeypatch.setattr(module, "call_kernel", testing.interpreted_call)
    operation, arrays, options, config = NAN[name]
    made = {key: jnp.asarray(value) for key, value in arrays(np.random.default_rng(0)).items()}
    bound = operation.canonicalise(**made, **options)
    kernel, reference = (delta_kernel, delta_reference) if operation is DELTA_RULE else (linear_kernel, linear_reference)
    found = kernel.forward(bound.call, bound.inputs, config)
    wanted = reference.forward(bound.call, widened(bound.inputs))
    for what, right in wanted._asdict().items():
        if right is None:
            continue
        value, nan = np.asarray(getattr(found, what), np.float64), np.isnan(right)
        assert nan.any() and (what == "final_state" or not nan.all())
        np.testing.assert_array_equal(np.isnan(value), nan, err_msg=what)
        check_close(what, np.where(nan, 0, value), np.where(nan, 0, right), FORWARD["float32"])
