"""Logits that a head makes of some rows at a time: XLA's products, with Triton's kernels over the logits between them.

Arrays over rows are `[b, n, ...]`; a chunk has all logits of its rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.utils.dtypes import common_dtype


@dataclasses.dataclass(frozen=True)
class Head:
    """Attributes:
    matrix: `[1 or b, d, v]`, or `[1 or b, v, d]` if `transposed`.
    bias: `[1 or b, v]` or None.
    transposed: see matrix.
    precision: of the products, as in a call.
    """

    matrix: Any
    bias: Any
    transposed: bool
    precision: str | None

    @property
    def _shared(self) -> bool:
        return self.matrix.shape[0] == 1

    def common(self, x: Any) -> Any:
        """The dtype of the products."""
        return common_dtype(x.dtype, self.matrix.dtype)

    def logits(self, x: Any, dtype: Any) -> Any:
        """`[b, n, v]` in a dtype, to which they are rounded from float32."""
        found = self._rows(x, 2 if self.transposed else 1, dtype if self.bias is None else jnp.float32)
        return found if self.bias is None else (found + self.bias[:, None].astype(jnp.float32)).astype(dtype)

    def d_rows(self, d_logits: Any, dtype: Any) -> Any:
        """The gradient of x `[b, n, d]`."""
        return self._rows(d_logits, 1 if self.transposed else 2, dtype)

    def d_head(self, x: Any, d_logits: Any, summed: bool, dtype: Any) -> tuple[Any, Any]:
        """The gradients of matrix and bias that these rows make, the matrix's in a dtype: one for all members of the batch if
        `summed`, else one for each."""
        left, right = (d_logits, x) if self.transposed else (x, d_logits)
        common = common_dtype(x.dtype, d_logits.dtype)
        axes, batch = ((0, 1), ()) if summed else ((1,), (0,))
        matrix = jax.lax.dot_general(
            left.astype(common), right.astype(common), ((axes, axes), (batch, batch)), **self._options(common, dtype)
        )
        bias = None if self.bias is None else jnp.sum(d_logits.astype(jnp.float32), axes)
        return (matrix[None], None if bias is None else bias[None]) if summed else (matrix, bias)

    def _rows(self, rows: Any, contracted: int, dtype: Any) -> Any:
        common = common_dtype(rows.dtype, self.matrix.dtype)
        matrix, rows = self.matrix.astype(common), rows.astype(common)
        if self._shared:
            matrix, axes, batch = matrix[0], ((2,), (contracted - 1,)), ()
        else:
            axes, batch = ((2,), (contracted,)), (0,)
        return jax.lax.dot_general(rows, matrix, (axes, (batch, batch)), **self._options(common, dtype))

    def _options(self, common: Any, dtype: Any) -> dict[str, Any]:
        wide = jax.lax.Precision.HIGHEST if common == jnp.float32 else jax.lax.Precision.DEFAULT
        precision = wide if self.precision is None else jax.lax.Precision[self.precision.upper()]
        return {"precision": precision, "preferred_element_type": dtype}


def clean(x: Any, valid: Any) -> Any:
    """Rows that are not valid hold 0: 0 times what they hold would be NaN in the head's gradient."""
    return jnp.where(valid[..., None], x, jnp.zeros((), x.dtype))


def merged(x: Any, trailing: int) -> Any:
    """`[b, ..., <trailing>]` as `[b, n, <trailing>]`."""
    rows = math.prod(x.shape[1 : x.ndim - trailing])
    return x.reshape(x.shape[0], rows, *x.shape[x.ndim - trailing :])


def chunk_count(batch: int, rows: int, chunk: int) -> int:
    """In how many chunks of about `chunk` rows of all members: the fewest, or a few more where that divides them."""
    fewest = max(-(-rows * batch // chunk), 1)
    return next((count for count in range(fewest, min(2 * fewest, rows + 1)) if rows % count == 0), fewest)


def over_chunks(work: Callable[[Any], tuple[Any, Any]], arrays: Any, count: int) -> tuple[Any, Any]:
    """The sum over chunks of the first result of `work`, and the second of all rows.

    Arrays and results are pytrees of `[b, n, ...]`. Rows that fill up the last chunk are 0 in every array.
    """
    if count == 1:
        return work(arrays)
    rows = jax.tree.leaves(arrays)[0].shape[1]
    size = -(-rows // count)

    def split(x: Any) -> Any:
        x = jnp.pad(x, ((0, 0), (0, count * size - rows), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    def step(sums: Any, chunk: Any) -> tuple[Any, Any]:
        parts, results = work(chunk)
        return jax.tree.map(jnp.add, sums, parts), results

    chunks = jax.tree.map(split, arrays)
    sums, first = work(jax.tree.map(lambda x: x[0], chunks))
    sums, others = jax.lax.scan(step, sums, jax.tree.map(lambda x: x[1:], chunks))

    def join(first: Any, others: Any) -> Any:
        x = jnp.moveaxis(jnp.concatenate([first[None], others]), 0, 1)
        return x.reshape(x.shape[0], count * size, *x.shape[3:])[:, :rows]

    return sums, jax.tree.map(join, first, others)
