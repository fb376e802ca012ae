"""Building blocks of the chunked form: decayed matmuls, and the inverse of a triangular matrix.

A decay is never the quotient of two: every exponent is a sum of decays between two tokens, so that it is not positive where
decays are not, and nothing is lost by cancellation however large they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call import vary_like

Dot = Callable[..., Any]
_BLOCK = 16
"""Tokens of a block inside of which decays by channel are applied to every pair of tokens."""


def scan(body: Callable[[Any, Any], Any], carry: Any, steps: Any, *, reverse: bool = False) -> Any:
    """`jax.lax.scan`, without a loop where there is one step."""
    if jax.tree.leaves(steps)[0].shape[0] != 1:
        return jax.lax.scan(body, vary_like(carry, (carry, steps)), steps, reverse=reverse)
    carry, out = body(carry, jax.tree.map(lambda leaf: leaf[0], steps))
    return carry, jax.tree.map(lambda leaf: leaf[None], out)


def sum_before(decay: Any) -> Any:
    """The sum of the decays of earlier tokens, `[..., c, d]`."""
    return _shift(jnp.cumsum(decay, axis=-2))


def sum_after(decay: Any) -> Any:
    """The sum of the decays of later tokens, `[..., c, d]`."""
    return jnp.flip(_shift(jnp.cumsum(jnp.flip(decay, -2), axis=-2)), -2)


def _shift(values: Any) -> Any:
    """Every row at the next one's place, the first one 0."""
    return jnp.concatenate([jnp.zeros_like(values[..., :1, :]), values[..., :-1, :]], axis=-2)


def factors_between(decay: Any) -> Any:
    """`exp(sum of decay_m, j < m < i)` for i > j and 0 elsewhere; `[..., c, d] -> [..., c, c, d]`."""
    index = jnp.arange(decay.shape[-2])
    later = (index[:, None] > index[None] + 1)[..., None]
    sums = jnp.cumsum(jnp.where(later, _shift(decay)[..., :, None, :], 0), axis=-3)
    return jnp.where((index[:, None] > index[None])[..., None], jnp.exp(sums), 0)


def decayed_products(dot: Dot, x: Any, y: Any, decay: Any) -> Any:
    """`sum_d x_id y_jd exp(sum of decay_md, j < m < i)` for i > j and 0 elsewhere.

    Args:
        dot: `jnp.einsum` in the precision wanted.
        x: `[..., r, c, d]`, r kinds of vectors; y: `[..., w, c, d]`.
        decay: `[..., c, 1]` or `[..., c, d]`.

    Returns:
        `[..., r, c, w, c]`.
    """
    if decay.shape[-1] == 1:
        return dot("...rid,...wjd->...riwj", x, y) * factors_between(decay)[..., 0][..., None, :, None, :]
    size = decay.shape[-2]
    block = min(_BLOCK, size)
    x, y, decay = (values.reshape(*values.shape[:-2], size // block, block, values.shape[-1]) for values in (x, y, decay))
    near = _products_in_blocks(dot, x, y, jnp.exp(decay))
    if size == block:
        return near[..., 0, :, :, :]
    same = jnp.eye(size // block, dtype=bool)[:, None, None, :, None]
    found = jnp.where(same, near[..., None, :], 0) + _products_across_blocks(dot, x, y, decay)
    return found.reshape(*found.shape[:-5], size, found.shape[-3], size)


def _products_in_blocks(dot: Dot, x: Any, y: Any, factor: Any) -> Any:
    """`[..., r, n, c, d], [..., w, n, c, d], [..., n, c, d] -> [..., r, n, c, w, c]`, row by row: y is decayed as rows go by."""
    index = jnp.arange(factor.shape[-2])

    def row(decayed: Any, step: Any) -> Any:
        place, x_row, y_row, factor_row = step
        found = dot("...rnd,...wnjd->...rnwj", x_row, decayed)
        here = (index == place)[:, None]
        return jnp.where(here, y_row[..., None, :], decayed * factor_row[..., None, :, None, :]), found

    rows = (index, *(jnp.moveaxis(values, -2, 0) for values in (x, y, factor)))
    return jnp.moveaxis(scan(row, jnp.zeros_like(y), rows)[1], 0, -3)


def _products_across_blocks(dot: Dot, x: Any, y: Any, decay: Any) -> Any:
    """Pairs of different blocks, `[..., r, n, c, w, n, c]`: decays up to the end of a block, between blocks, and from the start."""
    from_start = x * jnp.exp(sum_before(decay))[..., None, :, :, :]
    to_end = y * jnp.exp(sum_after(decay))[..., None, :, :, :]
    between = factors_between(jnp.sum(decay, axis=-2))[..., None, :, :, None, :]
    return dot("...rnid,...wnmjd->...rniwmj", from_start, to_end[..., None, :, :, :] * between)


@jax.custom_jvp
def unit_lower_inverse(strict: Any) -> Any:
    """The inverse of the identity plus a strictly lower triangular matrix whose size is a power of two.

    Blocks on the diagonal are inverted, then every two of them become one: `[[A, 0], [B, C]]^-1 = [[A', 0], [-C' B A', C']]`
    with A', C' the inverses of A, C. This is as stable as forward substitution, and made of products.
    """
    size = strict.shape[-1]
    block = min(_BLOCK, size)
    shape = (size // block, block, size // block, block)
    same = jnp.eye(size // block, dtype=bool)[:, None, :, None]
    blocks = jnp.sum(jnp.where(same, strict.reshape(*strict.shape[:-2], *shape), 0), axis=-2)
    index = jnp.arange(block)

    def double(inverse: Any, half: Any) -> tuple[Any, None]:
        return _merge(inverse, blocks, index, half), None

    identity = vary_like(jnp.broadcast_to(jnp.eye(block, dtype=strict.dtype), blocks.shape), strict)
    inverse = scan(double, identity, 1 << jnp.arange(block.bit_length() - 1))[0] if block > 1 else identity
    inverse = jnp.where(same, inverse[..., None, :], 0).reshape(strict.shape)
    while block < size:
        inverse = _merge(inverse, strict, jnp.arange(size), block)
        block *= 2
    return inverse


def _merge(inverse: Any, strict: Any, index: Any, half: Any) -> Any:
    """From the inverses of the blocks of size `half` on the diagonal to those of twice that size."""
    row, column = index[:, None] // half, index[None] // half
    corners = jnp.where((row == column + 1) & (column % 2 == 0), strict, 0)
    return inverse - _multiply(_multiply(inverse, corners), inverse)


def _inverse_and_tangent(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    inverse = unit_lower_inverse(*primals)
    return inverse, -_multiply(_multiply(inverse, jnp.tril(tangents[0], -1)), inverse)


unit_lower_inverse.defjvp(_inverse_and_tangent)


_multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
