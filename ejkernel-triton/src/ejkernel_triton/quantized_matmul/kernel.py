"""The launches of `quantized_matmul`.

Up to some hundred rows one kernel reads the packed weights, unpacks them in registers and multiplies; sections of the contracted
dimension are summed by programs of their own and combined in order. For more rows the weights are unpacked to memory once and
multiplied by XLA. The gradient of x is the same product with the other dimension contracted.

Rows in groups are multiplied by that one kernel too: each program finds the rows and the matrix of its tile from the bounds of the
groups, so only matrices that have rows are read. For many rows a group all matrices are unpacked to memory once, and multiplied as
`grouped_matmul` does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call import ArraySpec, vary_like
from ejkernel.operations.grouped_matmul.groups import bounds_of
from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall, GroupedMatmulInputs
from ejkernel.operations.quantized_matmul.interface import (
    QuantizedMatmulCall,
    QuantizedMatmulInputs,
    QuantizedMatmulOutputs,
)
from ejkernel.plugin import current_target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._interpret import interpreting
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._numerics import dot_precision
from ejkernel_triton.grouped_matmul import config as grouped_config, kernel as grouped_kernel
from ejkernel_triton.grouped_matmul.schedule import max_tiles
from ejkernel_triton.quantized_matmul.config import LEAST_DEPTH, Config, intervals_of, period_of
from ejkernel_triton.quantized_matmul.gradients import scale_gradients
from ejkernel_triton.quantized_matmul.tiles import combine_kernel, product_kernel, unpack_kernel

_COMBINED = (128, 1024)
"""Elements of the result that one program combines: at least, and at most where many programs do."""
_COMBINING = 264
"""Programs that are many."""


class _Weights:
    """Packed weights as kernels get them."""

    def __init__(self, call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs) -> None:
        self.rows, self.columns, self.period = call.stored_rows, call.packed_columns, period_of(call.bits)
        self.arrays = inputs.w, inputs.scales, inputs.w if inputs.zeros is None else inputs.zeros
        counts = [array.shape[0] * call.matrices for array in self.arrays]
        self.matrices = 0 if inputs.group_sizes is None else call.matrices
        self.bounds = self.arrays[0] if inputs.group_sizes is None else _bounds(call, inputs)
        self.groups = inputs.group_sizes, inputs.group_offset
        self.count = max(counts)
        self.members = call.x.shape[0] if self.matrices else self.count
        self.constants: dict[str, Any] = {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            **dict(zip(("W_COUNT", "SCALES_COUNT", "ZEROS_COUNT"), counts, strict=True)),
            "MODE": call.mode,
            "BITS": call.bits,
            "GROUP": call.group_size,
            "PERIOD": self.period,
            "ASM": _assembly(),
        }

    def times(self, left: Any, config: Config, *, packed_inner: bool) -> Any:
        """`left [b, m, k]` times the weights as they are stored, or transposed with `packed_inner`; in the dtype of left."""
        shape = *left.shape[:2], self.rows if packed_inner else self.columns
        left = left.reshape(self.members, -1, left.shape[2])
        product = self._by_unpacking if config.unpack else self._in_tiles
        return product(left, config, packed_inner).reshape(shape)

    def _by_unpacking(self, left: Any, config: Config, packed_inner: bool) -> Any:
        weights = self.unpacked(left.dtype, config)
        if self.matrices:
            return self._in_groups(left, weights, transposed=packed_inner)
        precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
        contracted = (((2,), (2 if packed_inner else 1,)), ((0,), (0,)))
        return jax.lax.dot_general(left, weights, contracted, precision=precision, preferred_element_type=left.dtype)

    def _in_groups(self, left: Any, weights: Any, *, transposed: bool) -> Any:
        weights = weights.reshape(-1, self.matrices, *weights.shape[1:])
        sizes, offset = self.groups
        call = GroupedMatmulCall(
            lhs=ArraySpec.of(left),
            rhs=ArraySpec.of(weights),
            group_sizes=ArraySpec.of(sizes),
            group_offset=None if offset is None else ArraySpec.of(offset),
            preferred_element_type=left.dtype.name,
            transpose_rhs=transposed,
        )
        inputs = GroupedMatmulInputs(left, weights, sizes, offset)
        return grouped_kernel.forward(call, inputs, grouped_config.forward_heuristic(call, current_target())).out

    def unpacked(self, dtype: Any, config: Config) -> Any:
        """Weights `[n, rows, columns]` of all members and matrices, or of those that all members share."""
        rows, periods = config.block_rows, config.block_periods
        (weights,) = call_kernel(
            unpack_kernel,
            self.arrays,
            (((self.count, self.rows, self.columns), dtype),),
            grid=self.count * -(-self.rows // rows) * -(-self.columns // (periods * self.period)),
            num_warps=config.num_warps,
            BLOCK_R=rows,
            BLOCK_P=periods,
            **self.constants,
        )
        return weights

    def _in_tiles(self, left: Any, config: Config, packed_inner: bool) -> Any:
        rows, dtype = left.shape[1], left.dtype
        width = self.rows if packed_inner else self.columns
        if packed_inner:  # a config may be of the other phase, whose tiles do not contract periods
            config = dataclasses.replace(config, block_periods=max(config.block_periods, LEAST_DEPTH))
        tile = (config.block_rows, config.block_periods * self.period)
        tiles_n = -(-width // tile[0 if packed_inner else 1])
        blocks_k = -(-left.shape[2] // tile[1 if packed_inner else 0])
        split = -(-blocks_k // -(-blocks_k // config.split_k))  # no section without a block
        shape = self.members, rows, width
        tiles_m, programs, intervals = -(-rows // config.block_m), self.members * split * tiles_n, 1
        if self.matrices:
            intervals = self.members * intervals_of(self.matrices)
            tiles_m, programs = max_tiles(self.members * rows, intervals, config.block_m), split * tiles_n
        (out,) = call_kernel(
            product_kernel,
            (self._places_first(left) if packed_inner else left, *self.arrays, self.bounds, rows, tiles_m),
            (((split, *shape), jnp.float32 if split > 1 else dtype),),
            grid=programs * tiles_m,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            PACKED_INNER=packed_inner,
            MATRICES=self.matrices,
            INTERVALS=next_power_of_2(intervals),
            MEMBERS=self.members,
            SPLIT=split,
            BLOCK_M=config.block_m,
            BLOCK_R=config.block_rows,
            BLOCK_P=config.block_periods,
            STAGES=config.num_stages,
            PRECISION=dot_precision(None, dtype),
            **self.constants,
        )
        if split == 1:
            return out[0]
        count = self.members * rows * width
        block = min(max(next_power_of_2(count // _COMBINING), _COMBINED[0]), _COMBINED[1])
        (out,) = call_kernel(
            combine_kernel,
            (out, count),
            ((shape, dtype),),
            grid=-(-count // block),
            num_warps=4,
            SPLIT=split,
            BLOCK=block,
        )
        return out

    def _places_first(self, left: Any) -> Any:
        """Columns by their place in a period: those that are multiplied with the codes of one place are contiguous."""
        left = jnp.pad(left, ((0, 0), (0, 0), (0, -left.shape[2] % self.period)))
        return left.reshape(*left.shape[:2], -1, self.period).swapaxes(2, 3)


def _bounds(call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs) -> Any:
    """`[b, g + 3]`: of the intervals of `tile_of_group`."""
    batch, rows, _ = call.x.shape
    bounds = bounds_of(inputs.group_sizes, inputs.group_offset, batch, rows, call.matrices)
    return jnp.pad(jnp.pad(bounds, ((0, 0), (1, 0))), ((0, 0), (0, 1)), constant_values=rows)


def _assembly() -> int:
    """See `weights_at`."""
    if interpreting():
        return 0
    capability = current_target().capability
    return 2 if capability is not None and capability >= (8, 9) else 1


def _multiplies_nothing(call: QuantizedMatmulCall) -> bool:
    return not call.x.size or not call.columns or not call.matrices


def forward(call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs, config: Config) -> QuantizedMatmulOutputs:
    if _multiplies_nothing(call):
        return QuantizedMatmulOutputs(vary_like(jnp.zeros((*call.x.shape[:2], call.columns), call.x.dtype), inputs))
    return QuantizedMatmulOutputs(_Weights(call, inputs).times(inputs.x, config, packed_inner=call.transpose))


def backward(
    call: QuantizedMatmulCall,
    inputs: QuantizedMatmulInputs,
    outputs: QuantizedMatmulOutputs,
    cotangents: QuantizedMatmulOutputs,
    config: Config,
) -> QuantizedMatmulInputs:
    grad = cotangents.out.astype(inputs.x.dtype)
    if _multiplies_nothing(call):
        zeros = {name: vary_like(jnp.zeros_like(array), inputs) for name, array in _moving(call, inputs).items()}
        return QuantizedMatmulInputs(**{"w": None, "scales": None, **zeros})
    d_x = _Weights(call, inputs).times(grad, config, packed_inner=not call.transpose)
    return QuantizedMatmulInputs(d_x, None, *scale_gradients(call, inputs, grad))


def _moving(call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs) -> dict[str, Any]:
    arrays = {"x": inputs.x, "scales": inputs.scales if call.form.float_scales else None, "zeros": inputs.zeros}
    return {name: array for name, array in arrays.items() if array is not None}
