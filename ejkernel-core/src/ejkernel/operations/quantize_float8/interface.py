"""Contract of `quantize_float8`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Num

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.matrices import matrices, rows_as_given
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute
from ejkernel.utils.dtypes import FLOAT8
from ejkernel.utils.tracing import without_gradient


class QuantizeFloat8Inputs(NamedTuple):
    """x `[b, m, k]`; scale `[1 or b]`."""

    x: Float[Array, "b m k"]
    scale: Float32[Array, "#b"]


class QuantizeFloat8Outputs(NamedTuple):
    """values `[b, m, k]` in `dtype`; largest float32 `[b]`; if `transposed` the values as `[b, k, m]`. No residual."""

    values: Num[Array, "b m k"]
    largest: Float32[Array, "b"]
    transposed: Num[Array, "b k m"] = None


class QuantizedFloat8(NamedTuple):
    """What `quantize_float8` returns.

    Attributes:
        values: `[..., K]`, float8; times scale about x.
        scale: float32 scalar.
        largest: float32 scalar, the largest `abs(x)`; NaN if x has one, 0 if x is empty.
        transposed: the values as `[K, M]`; None unless asked for.
    """

    values: Any
    scale: Any
    largest: Any
    transposed: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeFloat8Call(Call):
    """Static facts of one `quantize_float8`."""

    x: ArraySpec
    scale: ArraySpec
    dtype: str = "float8_e4m3fn"
    transposed: bool = False

    @property
    def most(self) -> float:
        """The largest number of the dtype."""
        return float(jnp.finfo(self.dtype).max)


class QuantizeFloat8(Operation):
    """`values = clip(x * (1 / scale), -most, most)` in float32, rounded to the nearest, ties to even; `largest = max abs(x)`.

    NaN stays NaN, and an infinity becomes the largest number of the dtype. Below 2^-128 the reciprocal is infinite: 0 becomes NaN.
    """

    name = "quantize_float8"
    Call = QuantizeFloat8Call
    Inputs = QuantizeFloat8Inputs
    Outputs = QuantizeFloat8Outputs
    revisions = (2,)
    differentiable = ()

    def canonicalise(self, x: Any, scale: Any = None, *, dtype: Any = "float8_e4m3fn", transposed: bool = False) -> Bound:
        """Check and add the batch axis. Arguments as in `ejkernel.quantize_float8`."""
        check_compute("x", x)
        if not isinstance(transposed, bool):
            raise wrong_type("transposed", repr(transposed), "a bool")
        if x.ndim == 0 or (transposed and x.ndim != 2):
            raise invalid("x", f"shape {tuple(x.shape)}", "[M, K] with transposed=True" if transposed else "[..., K]")
        name = _float8("dtype", dtype)
        x = without_gradient("x", x)
        if scale is None:
            scale = _fitting_scale(x, float(jnp.finfo(name).max))
        else:
            check_compute("scale", scale)
            if scale.shape != ():
                raise invalid("scale", f"shape {tuple(scale.shape)}", "one number")
            scale = without_gradient("scale", jnp.asarray(scale, jnp.float32))
        inputs = QuantizeFloat8Inputs(matrices(x, 1), scale[None])
        call = QuantizeFloat8Call(x=ArraySpec.of(inputs.x), scale=ArraySpec.of(inputs.scale), dtype=name, transposed=transposed)
        rows = tuple(x.shape[:-1])

        def finish(outputs: QuantizeFloat8Outputs) -> QuantizedFloat8:
            back = None if outputs.transposed is None else outputs.transposed[0]
            return QuantizedFloat8(rows_as_given(outputs.values, rows), scale, jnp.max(outputs.largest, initial=0.0), back)

        return Bound(call, inputs, finish)

    def dimensions(self, call: QuantizeFloat8Call) -> Mapping[str, str]:
        return {"x": "b m k", "scale": "b?", "values": "b m k", "largest": "b", "transposed": "b k m"}

    def output_specs(self, call: QuantizeFloat8Call) -> QuantizeFloat8Outputs:
        batch, rows, columns = call.x.shape
        back = ArraySpec((batch, columns, rows), call.dtype) if call.transposed else None
        return QuantizeFloat8Outputs(ArraySpec(call.x.shape, call.dtype), ArraySpec((batch,), "float32"), back)

    def public(self, call: QuantizeFloat8Call) -> tuple[str, ...]:
        return ("values", "largest", *(("transposed",) if call.transposed else ()))

    def cost(self, call: QuantizeFloat8Call, phase: Phase) -> Cost:
        return Cost(2 * call.x.size, call.x.nbytes + call.x.size * (2 if call.transposed else 1))


def _float8(name: str, dtype: Any) -> str:
    try:
        found = np.dtype(dtype).name
    except TypeError:
        found = repr(dtype)
    if found not in FLOAT8:
        raise invalid(name, found, " or ".join(FLOAT8))
    return found


def _fitting_scale(x: Any, most: float) -> Any:
    """That of the largest number of x; 1 where all are 0."""
    largest = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    return jnp.where(largest == 0, 1.0, largest / most)


OPERATION = QuantizeFloat8()
