"""Matrix products overlapped with the collective that feeds them or that they feed.

They are compositions, not operations that platforms implement: their meaning needs a mesh axis of a surrounding `shard_map`,
their inner step is one plain product, for which XLA already picks the fastest routine, and what makes them fast is that the next
piece travels while this one is multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.call.partition import vary_like
from ejkernel.call.policy import current_policy
from ejkernel.compositions.axes import Axes, as_axes, axis_size, check_mesh_axes, rotated
from ejkernel.compositions.mesh import over_mesh
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.options import as_flag, as_precision
from ejkernel.utils.checks import check_compute
from ejkernel.utils.dtypes import accumulator, common_dtype


class _Product(NamedTuple):
    """The static part: axes, their size, axis of y that is contracted, dtypes of result and sums, precision."""

    axes: Axes
    size: int
    contracted: int
    dtype: Any
    wide: Any
    precision: Any

    def of(self, rows: Any, matrix: Any) -> Any:
        """`rows [..., m, a]` times `matrix`, wide."""
        contracting = (((rows.ndim - 1,), (self.contracted,)), ((), ()))
        return jax.lax.dot_general(rows, matrix, contracting, precision=self.precision, preferred_element_type=self.wide)

    def transposed(self) -> _Product:
        return self._replace(contracted=1 - self.contracted)


def invoke(
    function: Callable[..., Any],
    x: Any,
    y: Any,
    axis_name: Any,
    options: dict[str, Any],
    tp_size: Any,
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
) -> Any:
    """`all_gather` or `reduce_scatter` as a public function is called: checked, and inside `jax.shard_map` when there is a mesh."""
    axes = as_axes(axis_name)
    if not axes:
        raise invalid("axis_name", axis_name, "a mesh axis")
    if mesh is not None:
        check_mesh_axes(axes, mesh)
    check_compute("x", x)
    check_compute("y", y, ndim=2)
    if len(x.shape) < 2:
        raise invalid("x", f"shape {tuple(x.shape)}", "[..., M, K]")
    options = {
        "axes": axes,
        "tp_size": tp_size,
        "rhs_transpose": as_flag("rhs_transpose", options["rhs_transpose"]),
        "dtype": _dtype(options["preferred_element_type"], common_dtype(x.dtype, y.dtype)),
        "precision": as_precision(options["precision"]),
        "plain": not current_policy().custom_gradients,
    }
    arrays = {"x": x, "y": y}
    return over_mesh(function, arrays, options, positional=("x", "y"), mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def _dtype(wanted: Any, common: Any) -> str:
    try:
        found = jnp.dtype(common if wanted is None else wanted)
    except TypeError:
        raise wrong_type("preferred_element_type", repr(wanted), "a floating dtype") from None
    if not jnp.issubdtype(found, jnp.floating):
        raise wrong_type("preferred_element_type", f"dtype {found}", "a floating dtype")
    return found.name


def all_gather(*, x: Any, y: Any, plain: bool, **options: Any) -> Any:
    """Rows of all devices times this device's matrix."""
    product, x, y = _bound(x, y, **options)
    return (_gathered if plain else _all_gather)(product, x, y)


def reduce_scatter(*, x: Any, y: Any, plain: bool, **options: Any) -> Any:
    """A product whose inner axis is split, summed over devices and scattered by rows."""
    product, x, y = _bound(x, y, **options)
    if x.shape[-2] % product.size:
        raise invalid("x", f"{x.shape[-2]} rows", f"a multiple of the {product.size} devices of {product.axes}; pad it")
    return (_scattered if plain else _reduce_scatter)(product, x, y)


def _bound(
    x: Any, y: Any, *, axes: Axes, tp_size: int | None, rhs_transpose: bool, dtype: str, precision: str | None
) -> tuple[_Product, Any, Any]:
    size = axis_size(axes)
    if tp_size is not None and tp_size != size:
        raise invalid("tp_size", tp_size, f"{size}, the number of devices of {axes}")
    contracted = 1 if rhs_transpose else 0
    if x.shape[-1] != y.shape[contracted]:
        meaning = "[N, K]" if rhs_transpose else "[K, N]"
        raise invalid("y", f"shape {tuple(y.shape)}", f"{meaning} with K = {x.shape[-1]} as in x (each as one device holds it)")
    common = common_dtype(x.dtype, y.dtype)
    exact = precision is None and common.itemsize >= 4
    chosen = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision[(precision or "default").upper()]
    wide = accumulator(common)
    # A replicated y takes part on every device, so its gradient must be summed over them.
    like = (x, y, jax.lax.axis_index(axes))
    x, y = vary_like(x, like), vary_like(y, like)
    return _Product(axes, size, contracted, dtype, wide, chosen), x.astype(common), y.astype(common)


# all-gather, product


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_gather(product: _Product, x: Any, y: Any) -> Any:
    return _gathered(product, x, y)


def _all_gather_forward(product: _Product, x: Any, y: Any) -> Any:
    return _all_gather(product, x, y), (x, y)


def _all_gather_backward(product: _Product, residuals: Any, cotangent: Any) -> Any:
    x, y = residuals
    cotangent = cotangent.astype(x.dtype)
    d_x = _reduce_scatter(product.transposed()._replace(dtype=x.dtype.name), cotangent, y)
    d_y = _weights(product, x, cotangent)  # [K, N]
    return d_x, (d_y.T if product.contracted else d_y).astype(y.dtype)


_all_gather.defvjp(_all_gather_forward, _all_gather_backward)


def _gathered(product: _Product, x: Any, y: Any) -> Any:
    rows, columns = x.shape[-2], y.shape[1 - product.contracted]
    out = jnp.zeros((*x.shape[:-2], rows * product.size, columns), product.dtype)

    def put(out: Any, piece: Any, source: Any) -> Any:
        done = product.of(piece, y).astype(out.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, done, source * rows, axis=-2)

    return _around(product, x, vary_like(out, (x, y)), put)


def _weights(product: _Product, piece: Any, whole: Any) -> Any:
    """`all_gather(piece)^T @ whole` `[a, b]`, from a piece `[..., m, a]` and the whole `[..., M, b]`."""
    rows, axes = piece.shape[-2], tuple(range(piece.ndim - 1))
    total = vary_like(jnp.zeros((piece.shape[-1], whole.shape[-1]), product.wide), (piece, whole))

    def add(total: Any, piece: Any, source: Any) -> Any:
        own = jax.lax.dynamic_slice_in_dim(whole, source * rows, rows, axis=-2)
        contracting = ((axes, axes), ((), ()))
        return total + jax.lax.dot_general(
            piece, own, contracting, precision=product.precision, preferred_element_type=product.wide
        )

    return _around(product, piece, total, add)


def _around(product: _Product, piece: Any, state: Any, work: Callable[[Any, Any, Any], Any]) -> Any:
    """`work(state, piece, device that it comes from)` on every device's piece, each next one under way meanwhile."""
    device, size = jax.lax.axis_index(product.axes), product.size

    def step(carry: Any, shift: Any) -> Any:
        piece, state = carry
        following = rotated(piece, product.axes, size, 1)
        return (following, work(state, piece, (device - shift + size) % size)), None

    (piece, state), _ = jax.lax.scan(step, (piece, state), jnp.arange(size - 1, dtype=jnp.int32))
    return work(state, piece, (device + 1) % size)


# product, reduce-scatter


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce_scatter(product: _Product, x: Any, y: Any) -> Any:
    return _scattered(product, x, y)


def _reduce_scatter_forward(product: _Product, x: Any, y: Any) -> Any:
    return _reduce_scatter(product, x, y), (x, y)


def _reduce_scatter_backward(product: _Product, residuals: Any, cotangent: Any) -> Any:
    x, y = residuals
    cotangent = cotangent.astype(x.dtype)
    d_x = _all_gather(product.transposed()._replace(dtype=x.dtype.name), cotangent, y)
    d_y = _weights(product, cotangent, x)  # [N, K]
    return d_x, (d_y if product.contracted else d_y.T).astype(y.dtype)


_reduce_scatter.defvjp(_reduce_scatter_forward, _reduce_scatter_backward)


def _scattered(product: _Product, x: Any, y: Any) -> Any:
    """The sum of device d's rows starts on device d + 1 and comes to d last."""
    device, size = jax.lax.axis_index(product.axes), product.size
    rows = x.shape[-2] // size

    def part(shift: Any) -> Any:
        piece = jax.lax.dynamic_slice_in_dim(x, (device - 1 - shift + 2 * size) % size * rows, rows, axis=-2)
        return product.of(piece, y)

    def step(total: Any, shift: Any) -> Any:
        return rotated(total, product.axes, size, 1) + part(shift), None

    total, _ = jax.lax.scan(step, part(0), jnp.arange(1, size, dtype=jnp.int32))
    return total.astype(product.dtype)
