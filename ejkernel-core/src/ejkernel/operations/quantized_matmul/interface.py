"""Contract of `quantized_matmul`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32, Num, UInt32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.matrices import matrices, rows_as_given
from ejkernel.operations.grouped_matmul.groups import check_groups, check_sizes, grouping, random_grouping
from ejkernel.plugin import Phase
from ejkernel.quantization._weights import check_packed
from ejkernel.quantization.format import QuantizationFormat, resolve_format
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute


class QuantizedMatmulInputs(NamedTuple):
    """x `[b, m, k]`. The weights `[k, n]`, or `[n, k]` with `transpose`, packed along their last axis.

    w uint32 `[1 or b, k or n, words]`; scales `[1 or b, k or n, groups]`: floats for affine and nf4, uint8 for mx (E8M0) and nv
    (E4M3); zeros like scales for affine, else None.

    With group_sizes int32 `[1 or b, s]` the three are those of g matrices, s >= g, with an axis g behind the first; group_offset
    int32 `[1 or b]` or None: as in `GroupedMatmulInputs`.
    """

    x: Float[Array, "b m k"]
    w: UInt32[Array, "#b *g _ words"]
    scales: Num[Array, "#b *g _ groups"]
    zeros: Float[Array, "#b *g _ groups"] = None
    group_sizes: Int32[Array, "#b s"] = None
    group_offset: Int32[Array, "#b"] = None


class QuantizedMatmulOutputs(NamedTuple):
    """out `[b, m, n]`, like x. There is no residual."""

    out: Float[Array, "b m n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatmulCall(Call):
    """Static facts.

    Attributes:
        transpose: the weights are stored as `[n, k]`, in groups along k, instead of `[k, n]`, in groups along n.
        mode: one of `ejkernel.quantization.MODES`.
        bits: of a code.
        group_size: weights that share a scale.
    """

    x: ArraySpec
    w: ArraySpec
    scales: ArraySpec
    zeros: ArraySpec | None = None
    group_sizes: ArraySpec | None = None
    group_offset: ArraySpec | None = None
    transpose: bool = False
    mode: str = "affine"
    bits: int = 4
    group_size: int = 64

    @property
    def form(self) -> QuantizationFormat:
        """The format."""
        return QuantizationFormat(self.mode, self.bits, self.group_size)

    @property
    def packed_columns(self) -> int:
        """Weights per stored row: n, or k with `transpose`."""
        return self.scales.shape[-1] * self.group_size

    @property
    def columns(self) -> int:
        """n."""
        return self.stored_rows if self.transpose else self.packed_columns

    @property
    def stored_rows(self) -> int:
        """Of a matrix: k, or n with `transpose`."""
        return self.w.shape[-2]

    @property
    def matrices(self) -> int:
        """g: matrices of a member, 1 without group_sizes."""
        return 1 if self.group_sizes is None else self.w.shape[1]


class QuantizedMatmul(Operation):
    """`out = x @ W`, or `x @ W.T` with `transpose`, where `W = scale * (code - zero)` or `scale * value(code)`.

    W is formed in float32 and rounded to the dtype of x; products are summed in float32. Codes have no gradient, and neither
    have one-byte scales. With group_sizes, W is that of the row's group, and rows without a matrix are 0 and take no part in any
    gradient, as in `GroupedMatmul`.
    """

    name = "quantized_matmul"
    Call = QuantizedMatmulCall
    Inputs = QuantizedMatmulInputs
    Outputs = QuantizedMatmulOutputs
    revisions = (5, ("group_sizes", "group_offset"))
    differentiable = ("x", "scales", "zeros")
    shardable = ("b", "m", "n")

    def canonicalise(
        self,
        x: Any,
        w: Any,
        scales: Any,
        zeros: Any = None,
        group_sizes: Any = None,
        group_offset: Any = None,
        *,
        transpose: bool = False,
        mode: str = "affine",
        bits: int | None = None,
        group_size: int | None = None,
    ) -> Bound:
        """Check and add the batch axis. Arguments as in `ejkernel.quantized_matmul`."""
        if not isinstance(transpose, bool):
            raise wrong_type("transpose", repr(transpose), "a bool")
        form = resolve_format(mode, group_size, bits)
        check_compute("x", x)
        if x.ndim == 0:
            raise invalid("x", "shape ()", "[..., K]")
        check_packed(w, scales, zeros, form, name="w")
        _check_axes(x, w, group_sizes, group_offset)
        inner = scales.shape[-1] * form.group_size if transpose else w.shape[-2]
        if inner != x.shape[-1]:
            stored = "[N, K]" if transpose else "[K, N]"
            raise invalid(
                "w",
                f"packed weights of {w.shape[-2]} x {scales.shape[-1] * form.group_size}",
                f"{stored} with K = {x.shape[-1]} as in x",
                remedy=f"transpose={not transpose} reads them as {'[K, N]' if transpose else '[N, K]'}",
            )
        inputs = QuantizedMatmulInputs(
            matrices(x, 1),
            w[None],
            scales[None],
            None if zeros is None else zeros[None],
            *((None, None) if group_sizes is None else grouping(group_sizes, group_offset)),
        )
        specs = {name: None if value is None else ArraySpec.of(value) for name, value in inputs._asdict().items()}
        call = QuantizedMatmulCall(
            **specs,  # pyright: ignore[reportArgumentType]
            transpose=transpose,
            mode=form.mode,
            bits=form.bits,
            group_size=form.group_size,
        )

        return Bound(call, inputs, lambda outputs: rows_as_given(outputs.out, x.shape[:-1]))

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        check_sizes(arrays.get("group_sizes"), arrays.get("x"), "x")

    def random_inputs(self, call: QuantizedMatmulCall, rng: np.random.Generator, **given: Any) -> QuantizedMatmulInputs:
        """Any codes; one-byte scales near 1, as both of their formats can hold."""
        known: dict[str, Any] = {"w": rng.integers(0, 2**32, call.w.shape, np.uint32)}
        if call.scales.dtype == "uint8":
            one = 127 if call.mode.startswith("mx") else 56
            known["scales"] = rng.integers(one - 2, one + 3, call.scales.shape).astype(np.uint8)
        if call.group_sizes is not None:
            known |= random_grouping(rng, call.group_sizes, call.group_offset, call.x.shape[1], call.matrices)
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: QuantizedMatmulCall) -> Mapping[str, str]:
        """Columns are split over devices only where whole rows are stored for each: words and groups are not columns. Rows are
        not split where their groups are counted from the first."""
        row, column = ("n", "n") if call.transpose else ("k", "columns")
        m, g = ("m", "") if call.group_sizes is None else ("rows", "g ")
        return {
            "x": f"b {m} k",
            "w": f"b? {g}{row} words",
            "scales": f"b? {g}{row} groups",
            "zeros": f"b? {g}{row} groups",
            "group_sizes": "b? s",
            "group_offset": "b?",
            "out": f"b {m} {column}",
        }

    def output_specs(self, call: QuantizedMatmulCall) -> QuantizedMatmulOutputs:
        return QuantizedMatmulOutputs(ArraySpec((*call.x.shape[:2], call.columns), call.x.dtype))

    def public(self, call: QuantizedMatmulCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: QuantizedMatmulCall, phase: Phase) -> Cost:
        """Unpacking is not counted. Of groups, those matrices are read that have rows, as many as there can be."""
        product = 2 * call.x.size * call.columns
        read = min(call.x.shape[1] / call.matrices, 1) if call.matrices else 0
        small = round(read * (call.scales.nbytes + (0 if call.zeros is None else call.zeros.nbytes)))
        out = self.output_specs(call).out.nbytes
        moved = call.x.nbytes + round(read * call.w.nbytes) + small + out
        if phase == "forward":
            return Cost(product, moved)
        floats = call.form.float_scales
        return Cost((2 if floats else 1) * product, moved + call.x.nbytes + (small if floats else 0))


def _check_axes(x: Any, w: Any, group_sizes: Any, group_offset: Any) -> None:
    if group_sizes is None:
        if group_offset is not None:
            raise invalid("group_offset", group_offset, "None without group_sizes")
        if w.ndim != 2:
            remedy = "group_sizes= says how many rows of x belong to each of several matrices" if w.ndim == 3 else ""
            raise invalid("w", f"shape {tuple(w.shape)} with {w.ndim} axes", "2 axes", remedy=remedy)
        return
    if w.ndim != 3:
        raise invalid("w", f"shape {tuple(w.shape)} with {w.ndim} axes", "3 axes, the first of matrices, beside group_sizes")
    if x.ndim != 2:
        raise invalid("x", f"shape {tuple(x.shape)}", "[M, K] beside group_sizes")
    check_groups(group_sizes, group_offset, w.shape[0], "w")


OPERATION = QuantizedMatmul()
