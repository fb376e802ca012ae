"""What every Mosaic GPU kernel here needs: which devices can run it, how it is called, and the interpreter in its place.

Nothing of Mosaic GPU is imported before a kernel is built: `supports` asks `refusal` on machines that have no part of it.
"""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call import ArraySpec
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import GPU_PROPERTIES, HALVES, array_problem, device_problem
from ejkernel_pallas._jax_interpreter import gpu_interpreter_is_on

CAPABILITY = (9, 0)
SHARED_MEMORY = GPU_PROPERTIES[CAPABILITY].shared_memory
"""Bytes of shared memory of one block."""
ALIGNMENT = 1024
"""Of every array that Pallas places in shared memory."""
SHARED_MEMORY_SLACK = 1024
"""Left for barriers."""

_NEEDED = ("kernel", "wgmma_accumulator_load", "broadcasted_iota", "warp_map", "layout_cast")
"""What kernels take from `jax.experimental.pallas.mosaic_gpu`; absent before jax 0.11."""


def refusal(target: Target, specs: Mapping[str, ArraySpec | None], dtypes: Sequence[str] = HALVES) -> str | None:
    """Why kernels cannot run there or read these arrays, as far as it holds for every kernel; None if nothing is known.

    Args:
        target: of the call.
        specs: the arrays that are read by name; absent ones are None.
        dtypes: those that are read.
    """
    problem = device_problem(target, oldest=CAPABILITY, newest=CAPABILITY) or array_problem(specs, dtypes)
    return problem or (None if gpu_interpreter_is_on() else version_problem())


@functools.cache
def version_problem() -> str | None:
    """One sentence saying what the installed jax lacks; None if nothing is known to be missing."""
    if not any(re.fullmatch(r"jax_cuda\d+_plugin", module.name) for module in pkgutil.iter_modules()):
        return "jax is installed without its CUDA part, in which Mosaic GPU kernels are lowered; pip install 'jax[cuda13]'"
    try:
        from jax.experimental.pallas import mosaic_gpu
    except ImportError as error:
        return f"jax {jax.__version__} has no usable Pallas Mosaic GPU: {error}"
    missing = [name for name in _NEEDED if not hasattr(mosaic_gpu, name)]
    if missing:
        return f"Pallas Mosaic GPU of jax {jax.__version__} has no {' and no '.join(missing)}; jax 0.11 has"
    return None


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
    """The kernel as a function of its arrays.

    Args:
        body: of the kernel; takes references to arrays, to results, and scratch by its names.
        name: of the kernel in profiles.
        results: shape and dtype of each result.
        like: an operand over whose manual mesh axes the results vary.
        grid: names and sizes of the grid's axes, the fastest first.
        warpgroups: of a block; a thread of the kernel is one of them, its index is on the axis "wg".
        scratch: shared memory and barriers.
        cluster: names and sizes of the axes of blocks that may signal each other and share copies; None = each block for itself.
        **compiler: fields of `CompilerParams`; without scratch for reductions, which those along a row do not need.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

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


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as the tensor cores read it: tiles of 8 rows by as many bytes as the widest swizzle that divides a row."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    size = jnp.dtype(dtype).itemsize
    width = next(width for width in (128, 64, 32) if shape[-1] * size % width == 0)
    tiling = plgpu.TilingTransform((8, width // size))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(width)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def tiled_bytes(shape: tuple[int, ...], itemsize: int = 2) -> int:
    """What such an array, or an untiled one, takes of shared memory."""
    size = itemsize
    for extent in shape:
        size *= extent
    return -(-size // ALIGNMENT) * ALIGNMENT


_NAMED = 8
"""The first hardware barrier that is free; Mosaic GPU takes the lower ones for its own."""


def turns(consumers: int) -> dict[str, Any]:
    """Scratch by which consumers take turns. Hardware has barriers for it, which wake a warp sooner than those in shared memory
    do; the interpreter has the latter only."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return {"turn": plgpu.Barrier(num_barriers=consumers)} if gpu_interpreter_is_on() else {}


def take_turn(scratch: Mapping[str, Any], consumer: Any) -> None:
    """Wait until it is this consumer's turn."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if gpu_interpreter_is_on():
        plgpu.barrier_wait(scratch["turn"].at[consumer])
    else:
        _named_barrier("sync", consumer + _NAMED)


def give_turn(scratch: Mapping[str, Any], consumer: Any) -> None:
    """It is that consumer's turn once all threads of this one are here."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if gpu_interpreter_is_on():
        plgpu.barrier_arrive(scratch["turn"].at[consumer])
    else:
        _named_barrier("arrive", consumer + _NAMED)


def _named_barrier(instruction: str, barrier: Any) -> None:
    """`bar.sync` or `bar.arrive` of PTX for two warpgroups."""
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def issue(_: Any, number: Any) -> None:
        nothing = ir.Type.parse("!llvm.void")
        llvm.inline_asm(nothing, [number.registers[()]], f"bar.{instruction} $0, 256;", "r", has_side_effects=True)

    issue(barrier)  # pyright: ignore[reportCallIssue]


class Accumulator:
    """An accumulator of the tensor cores that starts from a value.

    JAX's interpreter knows neither such a start nor factors in registers: there products are formed at once, in their place.
    """

    def __init__(self, acc: Any, b_sum: Any) -> None:
        """`acc` is a reference to an accumulator that holds `b_sum`; None in the interpreter."""
        self.acc, self.b_sum = acc, b_sum

    def add(self, left: Any, right: Any) -> None:
        """Issue `left @ right`; `left` is an array in registers or, like `right`, in shared memory."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if self.acc is not None:
            plgpu.wgmma(self.acc, left, right)
            return
        factors = [jnp.asarray(factor[...]).astype(jnp.float32) for factor in (left, right)]
        plgpu.commit_smem()  # to the race detector these were ordinary reads
        self.b_sum = self.b_sum + jnp.dot(*factors, preferred_element_type=jnp.float32)

    def value(self, *, outstanding: int) -> Any:
        """The sum, once no more than so many products issued by this warpgroup are unfinished."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return self.b_sum if self.acc is None else plgpu.wgmma_accumulator_load(self.acc, wait_n=outstanding)


def accumulate(b_sums: Sequence[Any], body: Callable[..., Any], results: Sequence[tuple[int, ...]] = ()) -> list[Any]:
    """`body` adds products to an `Accumulator` for each of `b_sums`; the sums, once all products are finished.

    They are followed by what `body` returns, float32 arrays of the shapes `results`.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

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


def with_product(shape: tuple[int, ...], body: Callable[[Any], Any], others: Sequence[Accumulator]) -> Any:
    """`body` of a new accumulator, which is zero; `others` are those that it adds to.

    Right before its product: the assembler then sees the zeros, and the product starts a sum. Elsewhere it would clear registers.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    acc = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)  # pyright: ignore[reportArgumentType]
    if not gpu_interpreter_is_on():
        return pl.run_scoped(body, acc)
    returned, b_sums = pl.run_scoped(lambda acc: (body(acc), [each.b_sum for each in others]), acc)
    for each, b_sum in zip(others, b_sums, strict=True):
        each.b_sum = b_sum
    return returned


def wait_for_products(outstanding: int) -> None:
    """Until no more than so many products issued by this warpgroup are unfinished; the interpreter has none."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not gpu_interpreter_is_on():
        plgpu.wgmma_wait(outstanding)


def add_product(b_sum: Any, left: Any, right: Any) -> Any:
    """`b_sum + left @ right`, waited for."""
    return accumulate([b_sum], lambda total: total.add(left, right))[0]
