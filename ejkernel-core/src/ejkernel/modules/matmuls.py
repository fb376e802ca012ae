"""Matrix products."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel._policy import PlatformChoice
from ejkernel.modules._forms import class_form
from ejkernel.operations.grouped_matmul.interface import OPERATION as _GROUPED_MATMUL


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: Any = None,
    group_offset: jax.Array | int | None = None,
    existing_out: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    transpose_rhs: bool = False,
    precision: jax.lax.Precision | str | None = None,
    platform: PlatformChoice = None,
    cfg: Any = None,
) -> jax.Array:
    """Rows in groups times a matrix per group: `out[i] = lhs[i] @ rhs[g] * rhs_scale[g] + bias[g]` for row i of group g.

    With `group_offset=o`, rhs holds the matrices of groups o, o + 1, ... alone (experts sharded over devices). Rows without a
    matrix, past the sum of the sizes or of groups held elsewhere, are 0 or those of existing_out, and take no part in any
    gradient, whatever lhs holds there.

    Args:
        lhs: `[M,K]`, float32, bfloat16 or float16.
        rhs: `[G,K,N]`, or `[G,N,K]` with transpose_rhs. Its dtype may differ: the product is formed in the common dtype
            (bfloat16 with float32: float32) and summed in float32. int8 and float8 matrices are multiplied in the dtype of lhs,
            which holds their values exactly, and have no gradient.
        group_sizes: integers `[G]`, >= 0, sum at most M; may be traced. `[S]` with S >= G beside group_offset.
        preferred_element_type: dtype of the result; None = the dtype of the products.
        group_offset: integer, may be traced; None = 0.
        existing_out: `[M,N]` in the result's dtype: the rows that have no matrix.
        rhs_scale: `[G]`, or `[G,N]` for one number per column; multiplies the summed products in float32. None = 1.
        bias: `[G,N]`; added in float32, to rows that have a matrix. None = 0.
        transpose_rhs: rhs is `[G,N,K]`.
        precision: of the products; None = full precision of the common dtype.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.

    Returns:
        `[M,N]`.

    Raises:
        ValueError: a shape does not fit, or group_sizes (if concrete) are negative or sum to more than M.
        TypeError: a dtype does not fit.
        NoKernelError: no admitted platform supports the call.

    Source: Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022; positional arguments as
        `jax.lax.ragged_dot`.
    """
    return _GROUPED_MATMUL.invoke(
        {
            "lhs": lhs,
            "rhs": rhs,
            "group_sizes": group_sizes,
            "group_offset": group_offset,
            "existing_out": existing_out,
            "rhs_scale": rhs_scale,
            "bias": bias,
        },
        {"preferred_element_type": preferred_element_type, "transpose_rhs": transpose_rhs, "precision": precision},
        platform=platform,
        cfg=cfg,
    )


GroupedMatmul = class_form("GroupedMatmul", grouped_matmul)
