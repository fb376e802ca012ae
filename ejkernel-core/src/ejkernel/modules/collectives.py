"""Matrix products overlapped with the collective that feeds them or that they feed."""

from __future__ import annotations

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public
from ejkernel.compositions.collective_matmul import all_gather, invoke, reduce_scatter
from ejkernel.modules._class_api import class_api

__all__ = ["AllGatherMatmul", "ReduceScatterMatmul", "all_gather_matmul", "reduce_scatter_matmul"]


@public(dispatches=False)
def all_gather_matmul(
    x: t.ShardedRows,
    y: t.ShardedMatrix,
    axis_name: t.AxisNames,
    *,
    rhs_transpose: t.Flag = False,
    preferred_element_type: t.DTypeLike | None = None,
    precision: t.PrecisionLike | None = None,
    tp_size: t.Count | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.ShardedProduct:
    """Rows of all devices times this device's matrix: `all_gather(x, axis=-2) @ y`, without gathering x.

    Pieces of x go round the devices and are multiplied as they arrive. The gradient of x is a `reduce_scatter_matmul`; that of
    y goes round once more.

    Args:
        x: `[..., M/W, K]`, this device's rows out of M, floating; W devices along `axis_name`. With `mesh` the whole array.
        y: `[K, N]`, or `[N, K]` with rhs_transpose: whatever this device holds of it, split along N or whole.
        axis_name: mesh axis, or axes, over which the rows are split.
        rhs_transpose: y is `[N, K]`.
        preferred_element_type: dtype of the result; None = the common dtype of x and y. Sums are float32 in any case.
        precision: of the products; None = full precision of the common dtype.
        tp_size: if given, the number of devices that the caller expects; another one is an error.
        mesh: make the `jax.shard_map` here.
        in_specs: PartitionSpecs of x and y.
        out_specs: PartitionSpec of the result.

    Returns:
        `[..., M, N]` on every device.

    Raises:
        ValueError: a shape, axis or number of devices does not fit.
        TypeError: a dtype does not fit.

    Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023.
    """
    options = {"rhs_transpose": rhs_transpose, "preferred_element_type": preferred_element_type, "precision": precision}
    return invoke(all_gather, x, y, axis_name, options, tp_size, mesh, in_specs, out_specs)


@public(dispatches=False)
def reduce_scatter_matmul(
    x: t.ShardedRows,
    y: t.ShardedMatrix,
    axis_name: t.AxisNames,
    *,
    rhs_transpose: t.Flag = True,
    preferred_element_type: t.DTypeLike | None = None,
    precision: t.PrecisionLike | None = None,
    tp_size: t.Count | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.ShardedProduct:
    """A product whose inner axis is split, summed over devices and scattered by rows: `psum_scatter(x @ y.T, axis=-2)`.

    Partial sums of the rows go round the devices, in float32, while each device makes its next part. The gradient of x is an
    `all_gather_matmul`; that of y goes round once more.

    Args:
        x: `[..., M, K/W]`, floating, W devices along `axis_name`; M a multiple of W. With `mesh` the whole array.
        y: `[N, K/W]`, or `[K/W, N]` with `rhs_transpose=False`.
        axis_name: mesh axis, or axes, over which K is split.
        rhs_transpose: y is `[N, K/W]`.
        preferred_element_type: dtype of the result; None = the common dtype of x and y.
        precision: of the products; None = full precision of the common dtype.
        tp_size: if given, the number of devices that the caller expects; another one is an error.
        mesh: make the `jax.shard_map` here.
        in_specs: PartitionSpecs of x and y.
        out_specs: PartitionSpec of the result.

    Returns:
        `[..., M/W, N]`: this device's rows of the sum.

    Raises:
        ValueError: a shape, axis or number of devices does not fit.
        TypeError: a dtype does not fit.

    Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023.
    """
    options = {"rhs_transpose": rhs_transpose, "preferred_element_type": preferred_element_type, "precision": precision}
    return invoke(reduce_scatter, x, y, axis_name, options, tp_size, mesh, in_specs, out_specs)


AllGatherMatmul = class_api("AllGatherMatmul", all_gather_matmul)
ReduceScatterMatmul = class_api("ReduceScatterMatmul", reduce_scatter_matmul)
