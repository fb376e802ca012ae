"""Grouped matrix multiplication on TPU.

Two kernels. `_rows_kernel` multiplies rows by the matrix of their group: forward, and with the matrices transposed the gradient of
lhs. `_matrices_kernel` sums, for every matrix, over the rows of its group: the gradients of rhs, rhs_scale and bias. Both run over
the items of `schedule`, which a TPU core takes in order, so that a block of the result stays in VMEM while consecutive items
work on it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.call import ArraySpec, has_gradient
from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall, GroupedMatmulInputs, GroupedMatmulOutputs
from ejkernel.operations.grouped_matmul.phases import (
    backward_of_nothing,
    forward_of_nothing,
    gradient_like,
    gradients_of,
    multiplies_nothing,
)
from ejkernel_pallas._call import block_traffic, compiler_params, cost_estimate, result_like
from ejkernel_pallas.tpu.grouped_matmul.config import BackwardConfig, Config, Tile, matrices_bytes, rows_bytes, vmem_limit
from ejkernel_pallas.tpu.grouped_matmul.schedule import (
    Items,
    has_matrix,
    matrix_items,
    max_row_items,
    row_items,
)

_ITEM_ARRAYS = len(Items._fields)


@dataclasses.dataclass(frozen=True)
class _Product:
    """Static parameters of `[rows, inner] . [inner, columns]`."""

    rows: int
    inner: int
    columns: int
    tile: Tile
    dtype: Any
    precision: Any
    transposed: bool

    @property
    def steps(self) -> int:
        """Tiles of the contracted dimension."""
        return pl.cdiv(self.inner, self.tile.block_k)

    @property
    def wide(self) -> int:
        """Tiles of the columns."""
        return pl.cdiv(self.columns, self.tile.block_n)

    def flops(self, items: int) -> int:
        """Of so many items, in whole tiles."""
        tile = self.tile
        return 2 * items * tile.block_m * self.steps * tile.block_k * self.wide * tile.block_n

    def dot(self, left: Any, right: Any, contracted: tuple[int, int]) -> Any:
        if contracted == (1, 1) and right.shape[0] == 1:  # Pallas cannot lower a product with one row of less than 32 bits
            left, right = left.astype(jnp.float32), right.astype(jnp.float32)
        return jax.lax.dot_general(
            left,
            right,
            (((contracted[0],), (contracted[1],)), ((), ())),
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )


def _converted(values: Any, dtype: Any) -> Any:
    """8-bit types pass through float32, from which every TPU converts."""
    if values.dtype.itemsize == 1 and dtype != jnp.float32:
        values = values.astype(jnp.float32)
    return values.astype(dtype)


def _zero_outside(values: Any, axis: int, low: Any, high: Any) -> Any:
    """Zeros outside of `low <= index < high`; selects in float32, as not every TPU selects narrower types."""
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis)
    return jnp.where((index >= low) & (index < high), values.astype(jnp.float32), 0.0).astype(values.dtype)


def _rows_kernel(*refs: Any, product: _Product, inner_scale: bool, scale: bool, bias: bool, existing: bool) -> None:
    items, others = Items(*refs[:_ITEM_ARRAYS]), list(refs[_ITEM_ARRAYS:])
    values_ref, rhs_ref = others.pop(0), others.pop(0)  # [TM, TK], [TK, TN] or [TN, TK]
    inner_scale_ref = others.pop(0) if inner_scale else None  # [1, TK]
    scale_ref = others.pop(0) if scale else None  # [1, TN]
    bias_ref = others.pop(0) if bias else None  # [1, TN]
    base_ref = others.pop(0) if existing else None  # [TM, TN]
    out_ref, *sums = others  # [TM, TN]
    tile, i_item, i_inner = product.tile, pl.program_id(1), pl.program_id(2)
    i_row = items.tile[i_item] * tile.block_m
    low, high, new = items.low[i_item] - i_row, items.high[i_item] - i_row, items.edges[i_item] % 2 == 1

    def partial_product(masked: bool) -> Any:
        """[TM, TN]; what lies beyond the end of the contracted dimension is undefined."""
        left, right = values_ref[...], _converted(rhs_ref[...], product.dtype)
        if inner_scale_ref is not None:
            left = left.astype(jnp.float32) * inner_scale_ref[...]
        left = left.astype(product.dtype)
        if masked:
            left, right = _zero_outside(left, 1, 0, rest), _zero_outside(right, 1 if product.transposed else 0, 0, rest)
        return product.dot(left, right, (1, 1 if product.transposed else 0))

    def store(total: Any) -> None:
        if scale_ref is not None:
            total = total * scale_ref[...]
        if bias_ref is not None:
            total = total + bias_ref[...]

        def store_all() -> None:
            out_ref[...] = total.astype(out_ref.dtype)

        def store_own() -> None:
            index = jax.lax.broadcasted_iota(jnp.int32, total.shape, 0)
            own = (index >= low) & (index < high)
            out_ref[...] = jnp.where(own, total, out_ref[...].astype(jnp.float32)).astype(out_ref.dtype)

        pl.when(whole)(store_all)
        pl.when(jnp.logical_not(whole))(store_own)

    def store_base() -> None:
        out_ref[...] = jnp.zeros_like(out_ref) if base_ref is None else base_ref[...]

    def clear() -> None:
        sums[0][...] = jnp.zeros_like(sums[0])

    def add(masked: bool) -> None:
        sums[0][...] += partial_product(masked)  # [TM, TN]

    rest, first, last = product.inner % tile.block_k, i_inner == 0, i_inner == product.steps - 1
    whole, busy = (low <= 0) & (high >= tile.block_m), high > low
    pl.when(first & new & jnp.logical_not(whole))(store_base)
    if product.steps == 1:
        pl.when(busy)(lambda: store(partial_product(masked=rest > 0)))
        return
    pl.when(busy & first)(clear)
    pl.when(busy if rest == 0 else busy & jnp.logical_not(last))(lambda: add(masked=False))
    if rest > 0:
        pl.when(busy & last)(lambda: add(masked=True))
    pl.when(busy & last)(lambda: store(sums[0][...]))


def _matrices_kernel(*refs: Any, product: _Product, rhs: bool, rhs_scale: bool, scaled: bool, bias: bool) -> None:
    items, others = Items(*refs[:_ITEM_ARRAYS]), list(refs[_ITEM_ARRAYS:])
    multiplied = rhs or rhs_scale
    values_ref = others.pop(0) if multiplied else None  # [TM, TK]
    grad_ref = others.pop(0)  # [TM, TN]
    rhs_ref = others.pop(0) if rhs_scale else None  # [TK, TN] or [TN, TK]
    scale_ref = others.pop(0) if scaled else None  # [1, TN]
    d_rhs_ref = others.pop(0) if rhs else None  # as rhs
    d_scale_ref = others.pop(0) if rhs_scale else None  # [1, TN]
    d_bias_ref = others.pop(0) if bias else None  # [1, TN]
    sums = others  # [TK, TN] if a product is asked for
    tile, i_inner, i_item = product.tile, pl.program_id(0), pl.program_id(2)
    i_row, edges = items.tile[i_item] * tile.block_m, items.edges[i_item]
    low, high = items.low[i_item] - i_row, items.high[i_item] - i_row

    def clear() -> None:
        for ref in (*sums, *(() if d_bias_ref is None else (d_bias_ref,))):
            ref[...] = jnp.zeros_like(ref)

    def add(masked: bool) -> None:
        """Rows of other groups may hold NaN on either side."""
        grad = grad_ref[...]
        grad = _zero_outside(grad, 0, low, high) if masked else grad

        def add_bias() -> None:
            if d_bias_ref is not None:
                d_bias_ref[...] += jnp.sum(grad.astype(jnp.float32), axis=0, keepdims=True)

        if d_bias_ref is not None:
            pl.when(i_inner == 0)(add_bias)
        if values_ref is not None:
            left = values_ref[...]
            left = _zero_outside(left, 0, low, high) if masked else left
            sums[0][...] += product.dot(left.astype(product.dtype), grad.astype(product.dtype), (0, 0))

    def store() -> None:
        total = sums[0][...]
        if d_scale_ref is not None and rhs_ref is not None:
            matrix = rhs_ref[...].astype(jnp.float32)
            matrix = matrix.T if product.transposed else matrix
            inside = jax.lax.broadcasted_iota(jnp.int32, total.shape, 0) < product.inner - i_inner * tile.block_k
            d_scale_ref[...] = jnp.sum(jnp.where(inside, matrix * total, 0.0), axis=0, keepdims=True)
        if d_rhs_ref is not None:
            total = total if scale_ref is None else total * scale_ref[...]
            d_rhs_ref[...] = (total.T if product.transposed else total).astype(d_rhs_ref.dtype)

    whole = (low <= 0) & (high >= tile.block_m)
    pl.when(edges % 2 == 1)(clear)
    pl.when(whole)(lambda: add(masked=False))
    pl.when((high > low) & jnp.logical_not(whole))(lambda: add(masked=True))
    if multiplied:
        pl.when(edges >= 2)(store)


def _precision(call: GroupedMatmulCall) -> Any:
    """Full float32 unless "default" is requested: not every JAX version lowers "high", which may be more precise."""
    exact = call.product_dtype == "float32" and call.precision != "default"
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def _per_matrix(value: Any, matrices: int, columns: int) -> Any:
    """rhs_scale or bias as float32 `[1 or b, g, 1, n]`."""
    return jnp.broadcast_to(value.astype(jnp.float32), (value.shape[0], matrices, columns))[:, :, None]


def _own(member: Any, array: Any) -> Any:
    """Index of a member of the batch in an array that the batch may share."""
    return member if array.shape[0] > 1 else 0


def _run(
    kernel: Any,
    grid: tuple[Any, ...],
    semantics: Sequence[str],
    items: Items,
    operands: Any,
    results: Any,
    scratch: Any,
    vmem: int,
    cost: pl.CostEstimate,
    name: str,
) -> Any:
    """`operands` and `results` with their blocks."""
    specs = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=_ITEM_ARRAYS,
        grid=grid,
        in_specs=[spec for _, spec in operands],
        out_specs=[spec for _, spec in results],
        scratch_shapes=scratch,
    )
    return pl.pallas_call(
        kernel,
        grid_spec=specs,
        out_shape=[result for result, _ in results],
        compiler_params=compiler_params(name, tuple(semantics), vmem_limit(vmem)),
        cost_estimate=cost,
        name=name,
    )(*items, *(array for array, _ in operands))


def _multiply_rows(
    product: _Product,
    inputs: GroupedMatmulInputs,
    values: Any,
    dtype: Any,
    *,
    inner_scale: Any = None,
    scale: Any = None,
    bias: Any = None,
    existing: Any = None,
) -> Any:
    """`[b, rows, columns]`: every row of `values [b, rows, inner]` times its matrix; `existing` or 0 where there is none."""
    rhs, tile, last = inputs.rhs, product.tile, product.steps - 1
    batch = values.shape[0]
    items, count = row_items(inputs.group_sizes, inputs.group_offset, batch, product.rows, rhs.shape[1], tile.block_m)

    def read(i_item: Any, i_inner: Any, items: Items) -> tuple[Any, Any]:
        """Item whose blocks are read and tile of the contracted dimension; an item without rows moves nothing."""
        source = items.source[i_item]
        return source, jnp.where(source == i_item, i_inner, jnp.where(source < i_item, last, 0))

    def at_values(_: Any, i_item: Any, i_inner: Any, *refs: Any) -> tuple[Any, ...]:
        items = Items(*refs)
        source, i_inner = read(i_item, i_inner, items)
        return items.member[source], items.tile[source], i_inner

    def at_rhs(i_column: Any, i_item: Any, i_inner: Any, *refs: Any) -> tuple[Any, ...]:
        items = Items(*refs)
        source, i_inner = read(i_item, i_inner, items)
        matrix = _own(items.member[source], rhs), items.matrix[source]
        return (*matrix, i_column, i_inner) if product.transposed else (*matrix, i_inner, i_column)

    def at_row(i_column: Any, i_item: Any, i_inner: Any, *refs: Any, array: Any, inner: bool = False) -> tuple[Any, ...]:
        items = Items(*refs)
        source, i_inner = read(i_item, i_inner, items)
        return _own(items.member[source], array), items.matrix[source], 0, i_inner if inner else i_column

    def at_out(i_column: Any, i_item: Any, _: Any, *refs: Any) -> tuple[Any, ...]:
        items = Items(*refs)
        return items.member[i_item], items.tile[i_item], i_column

    def at_base(i_column: Any, i_item: Any, _: Any, *refs: Any) -> tuple[Any, ...]:
        items = Items(*refs)
        base = items.base[i_item]
        return items.member[base], items.tile[base], i_column

    matrix = (tile.block_n, tile.block_k) if product.transposed else (tile.block_k, tile.block_n)
    operands = [
        (values, pl.BlockSpec((None, tile.block_m, tile.block_k), at_values)),
        (rhs, pl.BlockSpec((None, None, *matrix), at_rhs)),
    ]
    if inner_scale is not None:
        at = functools.partial(at_row, array=inner_scale, inner=True)
        operands.append((inner_scale, pl.BlockSpec((None, None, 1, tile.block_k), at)))
    for row in (scale, bias):
        if row is not None:
            operands.append((row, pl.BlockSpec((None, None, 1, tile.block_n), functools.partial(at_row, array=row))))
    block = (None, tile.block_m, tile.block_n)
    if existing is not None:
        operands.append((existing, pl.BlockSpec(block, at_base)))
    kernel = functools.partial(
        _rows_kernel,
        product=product,
        inner_scale=inner_scale is not None,
        scale=scale is not None,
        bias=bias is not None,
        existing=existing is not None,
    )
    out = result_like(values, (batch, product.rows, product.columns), dtype)
    sizes = (values.dtype, rhs.dtype, product.dtype, out.dtype)
    (found,) = _run(
        kernel,
        (product.wide, count, product.steps),
        ("parallel", "arbitrary", "arbitrary"),
        items,
        operands,
        [(out, pl.BlockSpec(block, at_out))],
        [pltpu.VMEM((tile.block_m, tile.block_n), jnp.float32)] if product.steps > 1 else [],
        rows_bytes(tile, *(jnp.dtype(size).itemsize for size in sizes), existing=existing is not None),
        _rows_cost(product, batch, values.dtype, rhs, out.dtype, existing=existing is not None),
        "ejkernel_grouped_matmul_rows",
    )
    return found


def _rows_cost(product: _Product, batch: int, values: Any, rhs: Any, out: Any, *, existing: bool) -> pl.CostEstimate:
    """Assumes the largest number of groups that end within a tile: sizes are known at run time only."""
    tile, wide, steps, matrices = product.tile, product.wide, product.steps, rhs.shape[1]
    items = max_row_items(batch, product.rows, matrices, tile.block_m)
    tiles = batch * pl.cdiv(product.rows, tile.block_m)
    # Where nothing is cut along the contracted dimension, rows stay for all of their groups and a matrix for all of its rows.
    rows_read, matrices_read = (tiles, batch * min(matrices, product.rows)) if steps == 1 else (items * steps, items * steps)
    accessed = block_traffic(
        [
            ((tile.block_m, tile.block_k), values, wide * rows_read),
            ((tile.block_k, tile.block_n), rhs.dtype, wide * matrices_read),
            ((tile.block_m, tile.block_n), out, wide * tiles * (2 if existing else 1)),
        ]
    )
    return cost_estimate(product.flops(items), 0, accessed)


def _matrices_cost(product: _Product, batch: int, matrices: int, rows: Sequence[Any], whole: Sequence[Any]) -> pl.CostEstimate:
    """`rows`, the gradient and where products are formed lhs, are read for every block of a matrix; `whole` pass once."""
    tile, multiplied = product.tile, len(rows) > 1
    items = max_row_items(batch, product.rows, matrices, tile.block_m)
    times = items * product.wide * (product.steps if multiplied else 1)
    accessed = block_traffic(
        [((tile.block_m, width), array.dtype, times) for array, width in zip(rows, (tile.block_n, tile.block_k), strict=False)]
        + [(array.shape, array.dtype, 1) for array in whole]
    )
    return cost_estimate(product.flops(items) if multiplied else 0, 0, accessed)


def _sum_over_rows(call: GroupedMatmulCall, inputs: GroupedMatmulInputs, grad: Any, tile: Tile, scale: Any) -> dict[str, Any]:
    """Gradients of rhs, rhs_scale and bias, of those that there are."""
    lhs, rhs = inputs.lhs, inputs.rhs
    batch, rows, inner, matrices, columns = *lhs.shape, rhs.shape[1], call.columns
    per_matrix = {name: getattr(inputs, name) for name in ("rhs", "rhs_scale", "bias")}
    shared = all(value is None or value.shape[0] == 1 for value in per_matrix.values())
    summed = 1 if shared else batch
    has = {name: value is not None for name, value in per_matrix.items()} | {"rhs": has_gradient(rhs)}
    multiplied = has["rhs"] or has["rhs_scale"]
    product = _product(call, rows, inner, columns, tile, call.transpose_rhs)
    items, count = matrix_items(inputs.group_sizes, inputs.group_offset, batch, rows, matrices, tile.block_m, shared=shared)

    def at_rows(axis: int, *index: Any) -> tuple[Any, ...]:
        items = Items(*index[3:])
        return items.member[index[2]], items.tile[index[2]], index[axis]

    def at_matrix(i_inner: Any, i_column: Any, i_item: Any, *refs: Any, array: Any) -> tuple[Any, ...]:
        items = Items(*refs)
        where = (i_column, i_inner) if product.transposed else (i_inner, i_column)
        return _own(items.member[i_item], array), items.matrix[i_item], *where

    def at_scale(_: Any, i_column: Any, i_item: Any, *refs: Any) -> tuple[Any, ...]:
        items = Items(*refs)
        return _own(items.member[i_item], scale), items.matrix[i_item], 0, i_column

    def at_row(i_inner: Any, i_column: Any, i_item: Any, *refs: Any) -> tuple[Any, ...]:
        items = Items(*refs)
        return items.member[i_item] if summed > 1 else 0, i_inner, items.matrix[i_item], 0, i_column

    steps = product.steps if multiplied else 1
    block = (tile.block_n, tile.block_k) if product.transposed else (tile.block_k, tile.block_n)
    operands, results = [], {}
    if multiplied:
        operands.append((lhs, pl.BlockSpec((None, tile.block_m, tile.block_k), functools.partial(at_rows, 0))))
    operands.append((grad, pl.BlockSpec((None, tile.block_m, tile.block_n), functools.partial(at_rows, 1))))
    if has["rhs_scale"]:
        operands.append((rhs, pl.BlockSpec((None, None, *block), functools.partial(at_matrix, array=rhs))))
    if has["rhs"]:
        if scale is not None:
            operands.append((scale, pl.BlockSpec((None, None, 1, tile.block_n), at_scale)))
        d_rhs = result_like(lhs, (summed, *rhs.shape[1:]), rhs.dtype if summed == rhs.shape[0] else jnp.float32)
        results["rhs"] = d_rhs, pl.BlockSpec((None, None, *block), functools.partial(at_matrix, array=d_rhs))
    for name in ("rhs_scale", "bias"):
        if has[name]:
            row = result_like(lhs, (summed, steps, matrices, 1, columns), jnp.float32)
            results[name] = row, pl.BlockSpec((None, None, None, 1, tile.block_n), at_row)
    kernel = functools.partial(
        _matrices_kernel,
        product=product,
        rhs=has["rhs"],
        rhs_scale=has["rhs_scale"],
        scaled=has["rhs"] and scale is not None,
        bias=has["bias"],
    )
    in_bytes = {
        name: jnp.dtype(value.dtype).itemsize
        for name, value in {"values": lhs, "grad": grad, "rhs": rhs, "product": product}.items()
    }
    in_bytes["out"] = jnp.dtype(results["rhs"][0].dtype).itemsize if has["rhs"] else 0
    found = _run(
        kernel,
        (steps, pl.cdiv(columns, tile.block_n), count),
        ("parallel", "parallel", "arbitrary"),
        items,
        operands,
        list(results.values()),
        [pltpu.VMEM((tile.block_k, tile.block_n), jnp.float32)] if multiplied else [],
        matrices_bytes(tile, **in_bytes, scaled=has["rhs_scale"]),
        _matrices_cost(
            product,
            batch,
            matrices,
            (grad, lhs) if multiplied else (grad,),
            [*((rhs,) if has["rhs_scale"] else ()), *(result for result, _ in results.values())],
        ),
        "ejkernel_grouped_matmul_matrices",
    )
    gradients = dict(zip(results, found, strict=True))
    if "rhs_scale" in gradients:  # a part from every tile of K
        gradients["rhs_scale"] = jnp.sum(gradients["rhs_scale"], axis=1)[:, :, 0]
    if "bias" in gradients:  # whole with the first of them
        gradients["bias"] = gradients["bias"][:, 0, :, 0]
    return {name: gradient_like(per_matrix[name], value) for name, value in gradients.items()}


def _product(call: GroupedMatmulCall, rows: int, inner: int, columns: int, tile: Tile, transposed: bool) -> _Product:
    return _Product(rows, inner, columns, tile, jnp.dtype(call.product_dtype), _precision(call), transposed)


def _with_inner(call: GroupedMatmulCall, inputs: GroupedMatmulInputs) -> tuple[GroupedMatmulCall, GroupedMatmulInputs]:
    """One column of zeros where K = 0: there are no empty blocks, and rows with a matrix still become their bias."""
    lhs, rhs = inputs.lhs, inputs.rhs
    axis = 3 if call.transpose_rhs else 2
    lhs = jnp.pad(lhs, ((0, 0), (0, 0), (0, 1)))
    rhs = jnp.pad(rhs, [(0, int(i == axis)) for i in range(4)])
    call = dataclasses.replace(call, lhs=ArraySpec.of(lhs), rhs=ArraySpec.of(rhs))
    return call, inputs._replace(lhs=lhs, rhs=rhs)


def forward(call: GroupedMatmulCall, inputs: GroupedMatmulInputs, config: Config) -> GroupedMatmulOutputs:
    if multiplies_nothing(call):
        return forward_of_nothing(call, inputs)
    lhs, existing, dtype = inputs.lhs, inputs.existing_out, jnp.dtype(call.preferred_element_type)
    (_, rows, inner), matrices, columns = lhs.shape, call.rhs.shape[1], call.columns
    if inner == 0:
        return forward(*_with_inner(call, inputs), config)
    scale, bias = (
        None if value is None else _per_matrix(value, matrices, columns) for value in (inputs.rhs_scale, inputs.bias)
    )
    product = _product(call, rows, inner, columns, config.tile(rows, inner, columns), call.transpose_rhs)
    return GroupedMatmulOutputs(_multiply_rows(product, inputs, lhs, dtype, scale=scale, bias=bias, existing=existing))


def backward(
    call: GroupedMatmulCall,
    inputs: GroupedMatmulInputs,
    outputs: GroupedMatmulOutputs,
    cotangents: GroupedMatmulOutputs,
    config: BackwardConfig,
) -> GroupedMatmulInputs:
    """The cotangent, scaled for the gradient of lhs, is rounded to the dtype of the products before it is multiplied."""
    lhs, rhs, grad, existing = inputs.lhs, inputs.rhs, cotangents.out, inputs.existing_out
    if multiplies_nothing(call):
        return backward_of_nothing(inputs, grad)
    (_, rows, inner), matrices, columns = lhs.shape, call.rhs.shape[1], call.columns
    if inner == 0:
        found = backward(*_with_inner(call, inputs), outputs, cotangents, config)
        return found._replace(lhs=jnp.zeros_like(lhs), rhs=jnp.zeros_like(rhs) if has_gradient(rhs) else None)
    scale = None if inputs.rhs_scale is None else _per_matrix(inputs.rhs_scale, matrices, columns)
    product = _product(call, rows, columns, inner, config.lhs_tile(rows, inner, columns), not call.transpose_rhs)
    gradients = {"lhs": _multiply_rows(product, inputs, grad, lhs.dtype, inner_scale=scale)}
    if has_gradient(rhs) or scale is not None or inputs.bias is not None:
        gradients |= _sum_over_rows(call, inputs, grad, config.rhs_tile(rows, inner, columns), scale)
    if existing is not None:
        gradients["existing_out"] = jnp.where(
            has_matrix(inputs.group_sizes, inputs.group_offset, rows, matrices)[..., None], 0, grad
        )
    return gradients_of(gradients)
