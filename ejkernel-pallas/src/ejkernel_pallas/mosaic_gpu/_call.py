"""Helpers for every Mosaic GPU kernel here: kernel calls, ping-pong scheduling and wgmma, with their interpreter equivalents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from ejkernel_pallas._jax_interpreter import gpu_interpreter_is_on


def call_kernel(
    body: Callable[..., None],
    *,
    name: str,
    results: Sequence[tuple[tuple[int, ...], Any]],
    like: Any,
    grid: Mapping[str, int],
    warpgroups: int,
    scratch: Mapping[str, Any],
    cluster: Mapping[str, int] | None = None,
    **compiler: Any,
) -> Callable[..., list[Any]]:
    """Build a kernel as a function of its arrays.

    Args:
        body: of the kernel; takes references to inputs and outputs, and scratch by name.
        name: of the kernel in profiles.
        results: shape and dtype of each output.
        like: an operand over whose manual mesh axes the outputs vary.
        grid: names and sizes of the grid axes, the fastest first.
        warpgroups: of a block. Each is one Pallas thread; its index is on the axis "wg".
        scratch: shared memory and mbarriers.
        cluster: names and sizes of the axes of a thread block cluster; None = no cluster.
        **compiler: fields of `CompilerParams`. There is no reduction scratch: row reductions do not need it.
    """
    varying = getattr(jax.typeof(like), "manual_axis_type", None)
    options: dict[str, Any] = {"approx_math": True, "reduction_scratch_bytes": 0, **compiler}
    kinds: dict[str, Any] = {} if varying is None else {"manual_axis_type": varying}
    clusters: dict[str, Any] = {} if cluster is None else {"cluster": tuple(cluster.values()), "cluster_names": tuple(cluster)}
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, dtype, **kinds) for shape, dtype in results],
        scratch_types=dict(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        **clusters,
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(**options),
    )


def swizzled_smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout of wgmma: swizzle atoms of 8 rows, with the widest swizzle that divides a row."""
    size = jnp.dtype(dtype).itemsize
    width = next(width for width in (128, 64, 32) if shape[-1] * size % width == 0)
    tiling = plgpu.TilingTransform((8, width // size))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(width)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


_FIRST_FREE_BARRIER = 8
"""The first free named barrier; Mosaic GPU uses the lower ones."""


def ping_pong_barriers(consumers: int) -> dict[str, Any]:
    """Scratch for ping-pong scheduling of consumers. On hardware it uses named barriers, which wake a warp sooner than
    mbarriers; the interpreter has only the latter."""
    return {"ping_pong": plgpu.Barrier(num_barriers=consumers)} if gpu_interpreter_is_on() else {}


def ping_pong_wait(scratch: Mapping[str, Any], consumer: Any) -> None:
    """Wait until this consumer may issue its MMAs."""
    if gpu_interpreter_is_on():
        plgpu.barrier_wait(scratch["ping_pong"].at[consumer])
    else:
        _named_barrier("sync", consumer + _FIRST_FREE_BARRIER)


def ping_pong_arrive(scratch: Mapping[str, Any], consumer: Any) -> None:
    """Let the given consumer issue its MMAs, once all threads of this one have arrived."""
    if gpu_interpreter_is_on():
        plgpu.barrier_arrive(scratch["ping_pong"].at[consumer])
    else:
        _named_barrier("arrive", consumer + _FIRST_FREE_BARRIER)


def _named_barrier(instruction: str, barrier: Any) -> None:
    """`bar.sync` or `bar.arrive` of PTX for two warpgroups."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def issue(_: Any, number: Any) -> None:
        nothing = ir.Type.parse("!llvm.void")
        llvm.inline_asm(nothing, [number.registers[()]], f"bar.{instruction} $0, 256;", "r", has_side_effects=True)

    issue(barrier)  # pyright: ignore[reportCallIssue]


class Accumulator:
    """A wgmma accumulator with an initial value.

    JAX's interpreter supports neither initial values nor register operands; there each MMA is computed immediately.
    """

    def __init__(self, acc: Any, b_sum: Any) -> None:
        """`acc` is a reference to an accumulator initialised with `b_sum`; None in the interpreter."""
        self.acc, self.b_sum = acc, b_sum

    def add(self, left: Any, right: Any) -> None:
        """Issue `left @ right`; `left` is an array in registers or, like `right`, in shared memory."""
        if self.acc is not None:
            plgpu.wgmma(self.acc, left, right)
            return
        factors = [jnp.asarray(factor[...]).astype(jnp.float32) for factor in (left, right)]
        plgpu.commit_smem()  # for the race detector these were generic-proxy reads
        self.b_sum = self.b_sum + jnp.dot(*factors, preferred_element_type=jnp.float32)

    def value(self, *, outstanding: int) -> Any:
        """The sum, after waiting until at most `outstanding` wgmmas of this warpgroup are in flight."""
        return self.b_sum if self.acc is None else plgpu.wgmma_accumulator_load(self.acc, wait_n=outstanding)


def accumulate(b_sums: Sequence[Any], body: Callable[..., Any], results: Sequence[tuple[int, ...]] = ()) -> list[Any]:
    """Run `body` on an `Accumulator` for each of `b_sums`; returns the sums after all wgmmas have completed.

    They are followed by what `body` returns: float32 arrays of the shapes `results`.
    """
    if gpu_interpreter_is_on():
        accumulators = [Accumulator(None, b_sum) for b_sum in b_sums]
        returned = body(*accumulators) or ()
        return [*(each.b_sum for each in accumulators), *returned]

    def stateful(references: Any) -> None:
        accs, held = references
        returned = body(*(Accumulator(acc, None) for acc in accs)) or ()
        for reference, value in zip(held, returned, strict=True):
            reference[...] = value

    starts = [plgpu.WGMMAAccumulatorRef.init(b_sum) for b_sum in b_sums]
    sums, held = pl.run_state(stateful)((starts, [jnp.zeros(shape, jnp.float32) for shape in results]))
    return [*sums, *held]


def with_accumulator(shape: tuple[int, ...], body: Callable[[Any], Any], others: Sequence[Accumulator]) -> Any:
    """Run `body` on a new zero accumulator; `others` are the accumulators that it adds to.

    Call it right before the wgmma: ptxas then sees the zeros and does not clear registers.
    """
    acc = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)  # pyright: ignore[reportArgumentType]
    if not gpu_interpreter_is_on():
        return pl.run_scoped(body, acc)
    returned, b_sums = pl.run_scoped(lambda acc: (body(acc), [each.b_sum for each in others]), acc)
    for each, b_sum in zip(others, b_sums, strict=True):
        each.b_sum = b_sum
    return returned


def wait_for_wgmma(outstanding: int) -> None:
    """Wait until at most `outstanding` wgmmas of this warpgroup are in flight; no-op in the interpreter."""
    if not gpu_interpreter_is_on():
        plgpu.wgmma_wait(outstanding)


def wgmma_accumulate(b_sum: Any, left: Any, right: Any) -> Any:
    """`b_sum + left @ right`, completed."""
    return accumulate([b_sum], lambda total: total.add(left, right))[0]
