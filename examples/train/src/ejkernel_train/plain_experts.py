"""A mixture of experts with jax alone. `plain.py` names these functions.

Rows move to experts and back in gathers, in both phases: the gradients that JAX would take of them are scatters with additions.
On a Hopper GPU the products of groups are the Mosaic GPU kernels that JAX brings, elsewhere `jax.lax.ragged_dot`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.partition import vary_like

FLOAT32 = jnp.float32

TILES: dict[str, Any] = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 8}
"""Of the kernels, from the middle of their own search."""


def moe_route(logits: jax.Array, chosen: int) -> tuple[jax.Array, jax.Array]:
    """Weights, which sum to 1, and numbers of each token's likeliest experts: `[N, E] -> [N, k], [N, k]`."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(FLOAT32), axis=-1), chosen)
    return weights / jnp.sum(weights, axis=-1, keepdims=True), experts


def moe_permute(x: jax.Array, experts: jax.Array, number: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """k copies of each token `[N, d]` in the order of their experts `[N, k]`, copies for each expert, and places of copies.

    Those of experts that are none of the `number`, which other devices have, come last.
    """
    experts = jnp.where((experts >= 0) & (experts < number), experts, number)
    copies = experts.reshape(-1)
    order = jnp.argsort(copies)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    sizes = jnp.sum(copies[:, None] == jnp.arange(number), axis=0, dtype=jnp.int32)  # `bincount` adds with atomics
    places = places.reshape(experts.shape)
    return _copies(x, order, places), sizes, places


def moe_unpermute(rows: jax.Array, positions: jax.Array, weights: jax.Array) -> jax.Array:
    """Each token's weighted sum of its copies: `[N k, d], [N, k], [N, k] -> [N, d]`."""
    arrays = rows, positions, weights.astype(FLOAT32)
    return _sum(*vary_like(arrays, arrays))


def _at(rows: jax.Array, places: jax.Array) -> jax.Array:
    return rows.at[places].get(mode="promise_in_bounds")


@jax.custom_vjp
def _copies(x: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
    return _at(x, order // places.shape[1])


def _copies_backward(places: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    total = sum(_at(cotangent, places[:, choice]).astype(FLOAT32) for choice in range(places.shape[1]))
    return jnp.asarray(total).astype(cotangent.dtype), None, None


_copies.defvjp(lambda x, order, places: (_copies(x, order, places), places), _copies_backward)


@jax.custom_vjp
def _sum(rows: jax.Array, places: jax.Array, weights: jax.Array) -> jax.Array:
    # a gather for each choice, summed as it is read: one of all copies would be written first
    chosen = (_at(rows, places[:, choice]).astype(FLOAT32) * weights[:, choice, None] for choice in range(places.shape[1]))
    return jnp.asarray(sum(chosen)).astype(rows.dtype)


def _sum_backward(saved: Any, cotangent: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    rows, places, weights = saved
    order = jnp.zeros(places.size, places.dtype).at[places.reshape(-1)].set(
        jnp.arange(places.size, dtype=places.dtype), unique_indices=True
    )  # fmt: skip
    weight = _at(weights.reshape(-1), order)[:, None]
    d_rows = (_at(cotangent, order // places.shape[1]).astype(FLOAT32) * weight).astype(rows.dtype)
    wide = cotangent.astype(FLOAT32)
    d_weights = [jnp.sum(_at(rows, places[:, choice]) * wide, axis=-1) for choice in range(places.shape[1])]
    return d_rows, None, jnp.stack(d_weights, axis=-1)


_sum.defvjp(lambda rows, places, weights: (_sum(rows, places, weights), (rows, places, weights)), _sum_backward)


def grouped_matmul(rows: jax.Array, matrices: jax.Array, sizes: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Consecutive groups of rows times a matrix each, and a bias each `[G, N]`: `[M, K], [G, K, N], [G] -> [M, N]`; rows past the
    last group become 0."""
    if _by_kernels(rows, matrices):
        arrays = rows, matrices, sizes.astype(jnp.int32)
        return with_bias(_product(*vary_like(arrays, arrays)), sizes, bias)
    return with_bias(jax.lax.ragged_dot(rows, matrices, sizes), sizes, bias)


def with_bias(products: jax.Array, sizes: jax.Array, bias: jax.Array | None) -> jax.Array:
    """A bias for each group, of products `[M, N]`; none for the rows past the last group."""
    if bias is None:
        return products
    ends = jnp.cumsum(sizes)
    group = jnp.searchsorted(ends, jnp.arange(len(products)), side="right")
    own = bias.astype(FLOAT32).at[group].get(mode="fill", fill_value=0)
    return (products + own).astype(products.dtype)


def _by_kernels(rows: jax.Array, matrices: jax.Array) -> bool:
    """Those of JAX are for Hopper, and take whole tiles of channels."""
    device = jax.devices()[0]
    fits = all(size % TILES["block_n"] == 0 for size in matrices.shape[1:]) and len(rows) >= TILES["block_m"]
    return device.platform == "gpu" and device.compute_capability == "9.0" and rows.dtype == jnp.bfloat16 and fits


def _groups(rows: jax.Array, matrices: jax.Array, sizes: jax.Array, transpose: bool) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    out = ragged_dot(rows, matrices, group_sizes=sizes, transpose_rhs=transpose, **TILES)
    written = jnp.arange(len(rows)) < jnp.sum(sizes)  # the kernel leaves the rows after them as they were
    return jnp.where(written[:, None], vary_like(out, rows), 0)


@jax.custom_vjp
def _product(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    return _groups(rows, matrices, sizes, transpose=False)


def _product_backward(saved: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    rows, matrices, sizes = saved
    d_matrices = vary_like(transposed_ragged_dot(rows, cotangent, group_sizes=sizes, **TILES), rows)
    return _groups(cotangent, matrices, sizes, transpose=True), d_matrices, None


_product.defvjp(lambda rows, matrices, sizes: (_product(rows, matrices, sizes), (rows, matrices, sizes)), _product_backward)
