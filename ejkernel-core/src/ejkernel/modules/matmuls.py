"""Matrix products."""

from __future__ import annotations

from typing import Any

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.errors import invalid, wrong_type
from ejkernel.modules._class_api import class_api
from ejkernel.operations.fused_linear.interface import OPERATION as _FUSED_LINEAR
from ejkernel.operations.grouped_matmul.interface import OPERATION as _GROUPED_MATMUL
from ejkernel.operations.newton_schulz.interface import OPERATION as _NEWTON_SCHULZ
from ejkernel.operations.quantize_float8.interface import OPERATION as _QUANTIZE_FLOAT8, QuantizedFloat8
from ejkernel.operations.quantized_matmul.interface import OPERATION as _QUANTIZED_MATMUL
from ejkernel.operations.scaled_matmul.interface import OPERATION as _SCALED_MATMUL

__all__ = [
    "FusedLinear",
    "GroupedMatmul",
    "NewtonSchulz",
    "QuantizeFloat8",
    "QuantizedFloat8",
    "QuantizedMatmul",
    "ScaledMatmul",
    "fused_linear",
    "grouped_matmul",
    "newton_schulz",
    "quantize_float8",
    "quantized_matmul",
    "scaled_matmul",
]

_TPU_PATHS = ("hybrid", "packed", "predecode")


@public()
def grouped_matmul(
    lhs: t.LhsRows,
    rhs: t.GroupMatrices,
    group_sizes: t.GroupSizes,
    *,
    preferred_element_type: t.DTypeLike | None = None,
    group_offset: t.GroupOffset | None = None,
    existing_out: t.ResultRows | None = None,
    rhs_scale: t.GroupScale | None = None,
    bias: t.GroupBias | None = None,
    lhs_scale: t.RowFactor | None = None,
    transpose_rhs: t.Flag = False,
    precision: t.PrecisionLike | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.ProductRows:
    """Rows in groups times a matrix per group.

    For row i of group g, `out[i] = lhs[i] @ rhs[g] * lhs_scale[i] * rhs_scale[g] + bias[g]`.

    With `group_offset=o`, rhs holds the matrices of groups o, o + 1, ... alone (experts sharded over devices). Rows without a
    matrix, past the sum of the sizes or of groups held elsewhere, are 0 or those of existing_out, and take no part in any
    gradient, whatever lhs and lhs_scale hold there.

    Args:
        lhs: `[M,K]`, float32, bfloat16 or float16; or float8_e4m3fn or float8_e5m2, where rhs is one of these two as well.
        rhs: `[G,K,N]`, or `[G,N,K]` with transpose_rhs. Its dtype may differ: the product is formed in the common dtype
            (bfloat16 with float32: float32) and summed in float32. int8 and float8 matrices are multiplied in the dtype of lhs,
            which holds their values exactly, and have no gradient. Products of float8 with float8 are exact; such a lhs has no
            gradient either.
        group_sizes: integers `[G]`, >= 0, sum at most M; may be traced. `[S]` with S >= G beside group_offset.
        preferred_element_type: dtype of the result, float32, bfloat16 or float16; None = the dtype of the products, and bfloat16
            for float8 with float8.
        group_offset: integer, may be traced; None = 0.
        existing_out: `[M,N]` in the result's dtype: the rows that have no matrix.
        rhs_scale: `[G]`, or `[G,N]` for one number per column; multiplies the summed products in float32. None = 1.
        bias: `[G,N]`; added in float32, after the scales, to rows that have a matrix. None = 0.
        lhs_scale: `[M]`, or one number; multiplies the summed products in float32. None = 1.
        transpose_rhs: rhs is `[G,N,K]`.
        precision: of the products; None = full precision of the common dtype.

    Returns:
        `[M,N]`.

    Raises:
        ValueError: a shape does not fit, or group_sizes (if concrete) are negative or sum to more than M.

    Source: Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022; positional arguments as
        `jax.lax.ragged_dot`.
    """
    arrays, options, run = split(locals(), "lhs rhs group_sizes group_offset existing_out rhs_scale bias lhs_scale")
    return _GROUPED_MATMUL.invoke(arrays, options, **run)


@public()
def quantized_matmul(
    x: t.BatchedRows,
    w: t.QuantizedWeights,
    scales: t.QuantizationScales,
    zeros: t.QuantizationScales | None = None,
    *,
    transpose: t.Flag = False,
    group_size: t.Count | None = None,
    bits: t.Count | None = None,
    mode: t.QuantizationMode = "affine",
    fuse: bool = True,
    use_best_config: bool = False,
    allow_dense_fallback: bool | None = None,
    strict_fuse: bool | None = None,
    tpu_path: t.TpuPath | None = None,
    group_sizes: t.GroupSizes | None = None,
    group_offset: t.GroupOffset | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.BatchedProduct:
    """Product with weights of a few bits: `x @ W`, or `x @ W.T` with transpose, `W = dequantize(w, scales, zeros)`.

    W is unpacked tile by tile in float32 and rounded to the dtype of x; products are summed in float32. With group_sizes, w holds
    G matrices, and consecutive rows of x are multiplied by one each, as by `grouped_matmul`: experts with quantized weights.

    Args:
        x: `[..., K]`, any number of axes, float32, bfloat16 or float16; `[M,K]` beside group_sizes.
        w: uint32 `[K, words]`, as `ejkernel.quantization.quantize` packs a matrix `[K,N]`; with transpose `[N, words]`, from
            `[N,K]`. Groups run along the last axis: along N, or along K with transpose. `[G, ...]` beside group_sizes, as quantize
            packs matrices `[G,K,N]`; so are scales and zeros.
        scales: `[K, N / group_size]`, or `[N, K / group_size]` with transpose; as quantize returns them.
        zeros: like scales for affine, else None.
        transpose: w holds `[N,K]`.
        group_size: weights that share a scale; None = the mode's default (64, 32 for mx, 16 for nv).
        bits: of a code; None = the mode's default.
        mode: "affine", "nf4", "mxfp4", "mxfp8", "nvfp4" or "nvfp8".
        fuse: a hint that never changes the result, as the four below: whichever kernel runs unpacks inside.
        use_best_config: a hint; configs are those of the tuning tiers in any case.
        allow_dense_fallback: a hint; no kernel here forms all of W first.
        strict_fuse: a hint; not True together with allow_dense_fallback=True.
        tpu_path: a hint: None, "hybrid", "packed" or "predecode".
        group_sizes: integers `[G]`, >= 0, sum at most M, rows of x for each matrix; may be traced. `[S]` with S >= G beside
            group_offset. None: one matrix for all rows.
        group_offset: integer, may be traced: w holds the matrices of the groups from this one on; None = 0.

    Returns:
        `[..., N]`, like x; 0 for rows without a matrix, past the sum of the sizes or of groups held elsewhere. Differentiable in x,
        and in scales and zeros of affine and nf4; such rows take no part, whatever x holds there.

    Raises:
        ValueError: shapes do not belong together, a value is not one of these, or group_sizes (if concrete) are negative or sum
            to more than M.
        TypeError: a dtype or type does not fit.

    Source: formats as in `ejkernel.quantization.quantize`.
    """
    arrays, options, run = split(
        locals(),
        "x w scales zeros group_sizes group_offset",
        own="fuse use_best_config allow_dense_fallback strict_fuse tpu_path",
    )
    _check_hints(fuse, use_best_config, allow_dense_fallback, strict_fuse, tpu_path)
    return _QUANTIZED_MATMUL.invoke(arrays, options, **run)


@public()
def fused_linear(
    x: t.BatchedRows,
    weight: t.LinearWeight,
    norm_scale: t.Channels | None = None,
    bias: t.LinearBias | None = None,
    residual: t.ResidualRows | None = None,
    *,
    activation: t.GateActivation | None = None,
    epsilon: t.Number = 1e-6,
    scale_offset: t.Number = 0.0,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.BatchedProduct:
    """A linear layer with the RMS norm before it, and the gate or the residual addition after it: decoding's four products.

    `act(norm(x) @ weight.T + bias) + residual`, `norm(x) = x / sqrt(mean(x^2) + epsilon) * (norm_scale + scale_offset)`, and
    `act(gate, up) = activation(gate) * up` of the two halves of the product.

    Args:
        x: `[..., K]`, float32, bfloat16 or float16.
        weight: `[N, K]`, inputs last, in the dtype of x. With an activation N / 2 rows of the gate, then those of up.
        norm_scale: `[K]`, any floating dtype. None: no norm.
        bias: `[N]`, any floating dtype; added in float32. None = 0.
        residual: like the result, in the dtype of x; added in float32, before the result is rounded. None = 0.
        activation: as of `gated_linear_unit`: "silu" (SwiGLU), "gelu", "gelu_tanh", "relu" or "sigmoid". None: no gate.
        epsilon: added to the mean square.
        scale_offset: added to `norm_scale`; 1 for checkpoints that store `scale - 1` (Gemma).

    Returns:
        `[..., N]`, or `[..., N / 2]` with an activation, in the dtype of x. Products are summed in float32, and nothing but norm(x)
        is rounded before the result.

    Raises:
        ValueError: shapes do not belong together, or N is odd beside an activation.
        TypeError: weight or residual have another dtype than x.

    Source: norm and product together as in Transformer Engine's LayerNormLinear; name as of xFormers' fused linear layer.
    """
    arrays, options, run = split(locals(), "x weight norm_scale bias residual")
    return _FUSED_LINEAR.invoke(arrays, options, **run)


@public()
def newton_schulz(
    x: t.Matrices,
    *,
    steps: t.Count | None = None,
    coefficients: t.Coefficients = (3.4445, -4.7750, 2.0315),
    eps: t.Number = 1e-7,
    dtype: t.DTypeLike = "bfloat16",
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.MatricesOutput:
    """Nearly orthogonal matrices of the same singular vectors, as the Muon optimizer takes for its update.

    `X = x / (|x| + eps)`, then in each step `A = X X'`, `X = a X + (b A + c A A) X`: singular values go to about 1 (0.7 to 1.2 by
    default). There is no gradient.

    Args:
        x: `[..., M, N]`, float32, bfloat16 or float16; squares of its elements are summed in float32.
        steps: how many; None: 5, or as many as `coefficients` has.
        coefficients: (a, b, c), or one such tuple for each step.
        eps: added to the Frobenius norm.
        dtype: of the operands of products, bfloat16 or float32; sums are float32.

    Returns:
        `[..., M, N]` in the dtype of x.

    Raises:
        ValueError: x is no matrix, dtype is another one, or `coefficients` are not three numbers for each step.

    Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """
    arrays, options, run = split(locals(), "x")
    return _NEWTON_SCHULZ.invoke(arrays, options, **run)


@public()
def quantize_float8(
    x: t.BatchedRows,
    scale: t.Scalar | None = None,
    *,
    dtype: t.DTypeLike = "float8_e4m3fn",
    transposed: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> QuantizedFloat8:
    """Float8 values that times a scale are about x, for `scaled_matmul`, in one pass that also finds the largest number.

    `values = clip(x * (1 / scale), -most, most)` in float32, rounded to the nearest, ties to even; NaN stays NaN. There is no
    gradient.

    Args:
        x: `[..., K]`, float32, bfloat16 or float16.
        scale: one number, may be traced: of the largest values of earlier steps, which saves a pass ("delayed scaling"). None:
            `max abs(x) / most`, with a pass before; 1 where x is 0.
        dtype: float8_e4m3fn, whose largest number is 448, or float8_e5m2, 57344.
        transposed: also return the values as `[K, M]`, for products that sum over the rows; x is `[M, K]` then.

    Returns:
        `QuantizedFloat8`: values `[..., K]`, scale and `largest = max abs(x)` as float32 scalars, transposed `[K, M]` or None.

    Raises:
        ValueError: dtype is another one, scale is more than one number, or x has other axes.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """
    arrays, options, run = split(locals(), "x scale")
    return _QUANTIZE_FLOAT8.invoke(arrays, options, **run)


@public()
def scaled_matmul(
    lhs: t.NarrowRows,
    rhs: t.NarrowMatrix,
    lhs_scale: t.ScaleOfRows,
    rhs_scale: t.ScaleOfColumns,
    *,
    transpose_rhs: t.Flag = False,
    out_dtype: t.DTypeLike | None = None,
    precision: t.PrecisionLike | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.BatchedProduct:
    """Product of int8 with int8, or float8 with float8: `(lhs @ rhs) * lhs_scale[..., None] * rhs_scale`.

    Products are summed in int32 or float32 and scaled in float32. lhs and rhs have no gradient; the scales have.

    Args:
        lhs: `[..., K]`, int8, float8_e4m3fn or float8_e5m2.
        rhs: `[K,N]`, or `[N,K]` with transpose_rhs; int8 beside int8, else either float8.
        lhs_scale: `[...]`, one number per row of lhs, or one number; float32, bfloat16 or float16.
        rhs_scale: `[N]`, or one number.
        transpose_rhs: rhs is `[N,K]`.
        out_dtype: float32, bfloat16 or float16; None = bfloat16.
        precision: None and "highest" sum in float32; "default" lets Hopper's tensor cores sum float8 in fewer bits.

    Returns:
        `[..., N]`.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """
    arrays, options, run = split(locals(), "lhs rhs lhs_scale rhs_scale")
    return _SCALED_MATMUL.invoke(arrays, options, **run)


def _check_hints(fuse: Any, use_best_config: Any, allow_dense_fallback: Any, strict_fuse: Any, tpu_path: Any) -> None:
    for name, value in (("fuse", fuse), ("use_best_config", use_best_config)):
        if not isinstance(value, bool):
            raise wrong_type(name, repr(value), "a bool")
    for name, value in (("allow_dense_fallback", allow_dense_fallback), ("strict_fuse", strict_fuse)):
        if value is not None and not isinstance(value, bool):
            raise wrong_type(name, repr(value), "a bool or None")
    if allow_dense_fallback and strict_fuse:
        raise invalid("strict_fuse", True, "not True together with allow_dense_fallback=True")
    if tpu_path is not None and (not isinstance(tpu_path, str) or tpu_path not in _TPU_PATHS):
        raise invalid("tpu_path", repr(tpu_path), "None, 'hybrid', 'packed' or 'predecode'")


FusedLinear = class_api("FusedLinear", fused_linear)
GroupedMatmul = class_api("GroupedMatmul", grouped_matmul)
NewtonSchulz = class_api("NewtonSchulz", newton_schulz)
QuantizeFloat8 = class_api("QuantizeFloat8", quantize_float8)
QuantizedMatmul = class_api("QuantizedMatmul", quantized_matmul)
ScaledMatmul = class_api("ScaledMatmul", scaled_matmul)
