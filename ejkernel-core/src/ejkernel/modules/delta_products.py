"""Several steps of the delta rule for each token: products of Householder matrices."""

from __future__ import annotations

from typing import Literal, Required, Unpack, overload

import numpy as np

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions.mesh import over_mesh
from ejkernel.errors import invalid, wrong_type
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import SharedDeltaOptions
from ejkernel.operations.delta_rule.forms import chunked_by, dims_of, product
from ejkernel.utils.checks import check_given

__all__ = ["GatedDeltaProduct", "gated_delta_product"]


class DeltaProductOptions(SharedDeltaOptions, total=False):
    """Of `gated_delta_product`."""

    num_householder: Required[int | np.integer]


@overload
def gated_delta_product(
    query: t.SequenceHeads,
    key: t.StepHeads,
    value: t.StepValues,
    beta: t.StepPerHead,
    *,
    decay: t.PerHead | None = None,
    initial_state: t.MatrixState | None = None,
    return_state: Literal[False] = False,
    **options: Unpack[DeltaProductOptions],
) -> t.SequenceOutput: ...


@overload
def gated_delta_product(
    query: t.SequenceHeads,
    key: t.StepHeads,
    value: t.StepValues,
    beta: t.StepPerHead,
    *,
    decay: t.PerHead | None = None,
    initial_state: t.MatrixState | None = None,
    return_state: Literal[True],
    **options: Unpack[DeltaProductOptions],
) -> tuple[t.SequenceOutput, t.FinalState]: ...


@overload
def gated_delta_product(
    query: t.SequenceHeads,
    key: t.StepHeads,
    value: t.StepValues,
    beta: t.StepPerHead,
    *,
    decay: t.PerHead | None = None,
    initial_state: t.MatrixState | None = None,
    return_state: t.Flag,
    **options: Unpack[DeltaProductOptions],
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]: ...


@public("decay", "initial_state")
def gated_delta_product(
    query: t.SequenceHeads,
    key: t.StepHeads,
    value: t.StepValues,
    beta: t.StepPerHead,
    *,
    decay: t.PerHead | None = None,
    initial_state: t.MatrixState | None = None,
    num_householder: int | np.integer,
    softmax_scale: t.Scalar | None = None,
    use_qk_l2norm: t.Flag = True,
    use_chunked: t.Flag = True,
    return_state: t.Flag = False,
    chunk_size: t.Count | None = None,
    seg_ids: t.SegmentIds | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]:
    """Gated DeltaProduct: each token decays the state once, then takes n = num_householder steps of the delta rule.

    `S <- exp(g) S`, then n times `S <- S + k (beta (v - S^T k))^T`, then `out = scale * S^T q`. It is `gated_delta_rule` over
    n T steps: memory and time are those of n T tokens. With n = 1 it is `gated_delta_rule`.

    Args:
        query: `[B,T,K,D]`, float32, bfloat16 or float16; any length, 0 included.
        key: `[B,T*n,K,D]`; the steps of token t are t n to t n + n - 1, in their order. Heads as in `gated_delta_rule`.
        value: `[B,T*n,K,V]`, of the dtype of query and key.
        beta: `[B,T*n,K]`, the share of the difference that is stored, 0 to 2; above 1 with keys of length 1 the eigenvalues of a
            step's matrix may be negative.
        decay: `[B,T,K]`, natural logarithm of what is left of the state, <= 0, before the first step of the token; None = 0.
        initial_state: `[B,H,D,V]`, or `[m,H,D,V]` with cu_seqlens of m sequences; None = zeros.
        num_householder: n, steps of each token.
        softmax_scale, use_qk_l2norm, use_chunked, return_state: as in `gated_delta_rule`.
        chunk_size: steps, not tokens, of one chunk; the same as `cfg={"chunk_size": chunk_size}`.
        seg_ids, cu_seqlens: of tokens, as in `gated_delta_rule`.
        mesh, in_specs, out_specs: as in `gated_delta_rule`.

    Returns:
        `[B,T,H,V]` in the dtype of value; with return_state a pair with the state `[B,H,D,V]` (`[m,H,D,V]`), float32.

    Raises:
        ValueError: a shape does not fit, num_householder is below 1, or cu_seqlens (if concrete) decreases, does not start at 0
            or ends beyond T.

    Source: Siems et al., DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products, 2025.
    """
    arrays, options, run = split(
        locals(),
        "query key value beta decay initial_state seg_ids cu_seqlens",
        own="chunk_size",
    )
    check_given(query=query, key=key, value=value, beta=beta)
    if isinstance(num_householder, bool) or not isinstance(num_householder, (int, np.integer)):
        raise wrong_type("num_householder", repr(num_householder), "an int")
    if num_householder < 1:
        raise invalid("num_householder", num_householder, "a value >= 1")
    options["num_householder"] = int(num_householder)
    run["cfg"] = chunked_by(chunk_size, cfg)
    return over_mesh(product, arrays, options, dims=dims_of(None, cu_seqlens), **run)


GatedDeltaProduct = class_api("GatedDeltaProduct", gated_delta_product)
