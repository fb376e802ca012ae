"""Every public function explains itself from the shapes and dtypes of its arrays alone."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import SingleDeviceSharding
from public_calls import CALLS

import ejkernel


@pytest.mark.unsampled
@pytest.mark.parametrize("name", CALLS)
def test_explains_from_shapes(name: str):
    call = CALLS[name]
    specs = jax.eval_shape(lambda: call.in_dtype("float32"))
    found = ejkernel.explain(name, **specs, **call.options)
    assert found.chosen == "xla" or found.forward.target.backend != "cpu"
    assert found.forward.call == ejkernel.explain(getattr(ejkernel, name), **specs, **call.options).forward.call


def test_shapes_say_where_they_are():
    device = jax.devices()[0]
    placed = jax.ShapeDtypeStruct((4, 8), "float32", sharding=SingleDeviceSharding(device))
    assert ejkernel.explain("rms_norm", placed).forward.target.device_kind == device.device_kind
    with ejkernel.use(target="gpu:9.0"):
        assert ejkernel.explain("rms_norm", placed).forward.target.capability == (9, 0)


def test_shapes_and_arrays_together():
    x = jax.ShapeDtypeStruct((4, 8), "float32")
    assert ejkernel.explain("rms_norm", x, jax.numpy.ones(8)).chosen is not None
    with pytest.raises(ValueError, match="scale: got shape"):
        ejkernel.explain("rms_norm", x, jax.ShapeDtypeStruct((3,), "float32"))
