"""The only module that imports jax-triton.

jax-triton overwrites `TRITON_CACHE_DIR` for the whole process when it is imported; the user's value is put back. It would take
the compute capability from the first device of the host; here it comes from the target that core builds for.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Generator, Sequence
from typing import Any

import jax

from ejkernel.plugin import current_target
from ejkernel_triton._interpret import interpreting
from ejkernel_triton._kernel_cache import install, keep, seam_problem
from ejkernel_triton._versions import version_problem

_CACHE_VARIABLE = "TRITON_CACHE_DIR"


@contextlib.contextmanager
def _environment_kept() -> Generator[None]:
    before = os.environ.get(_CACHE_VARIABLE)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CACHE_VARIABLE, None)
        else:
            os.environ[_CACHE_VARIABLE] = before


@functools.cache
def _jax_triton() -> Any:
    problem = version_problem()
    if problem:
        raise ImportError(problem)
    with _environment_kept():
        import jax_triton
    install(jax_triton.triton_lib)
    return jax_triton


def call_kernel(
    kernel: Any,
    inputs: Sequence[Any],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    *,
    grid: int,
    num_warps: int,
    num_stages: int = 1,
    fp_fusion: bool = True,
    **constants: Any,
) -> list[jax.Array]:
    """Call a `triton.jit` kernel whose parameters are: inputs in order, outputs in order, constants by name.

    With `EJKERNEL_TRITON_INTERPRET=1` it runs in Triton's interpreter on the host, called from the program.

    Args:
        kernel: the kernel.
        inputs: arrays, and integers that the compiled kernel does not depend on.
        outputs: shape and dtype of each.
        grid: number of programs.
        num_warps: warps per program.
        num_stages: depth of software pipelining.
        fp_fusion: whether a product and a sum may become one instruction, which rounds once.
        **constants: `tl.constexpr` parameters.
    """
    if interpreting():
        from ejkernel_triton._interpreter import traced_call

        return traced_call(kernel, inputs, outputs, grid=grid, num_warps=num_warps, **constants)
    keep(kernel)
    capability = current_target().capability
    if capability is None:
        raise ValueError(f"target: got {current_target()}, expected a GPU with a known compute capability")
    library = _jax_triton()
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs]
    if _takes_backend_options(library):
        form: dict[str, Any] = {"out_type": shapes, "backend_options": {"enable_fp_fusion": fp_fusion}}
    else:
        form = {"out_shape": shapes, "enable_fp_fusion": fp_fusion}
    return list(
        library.triton_call(
            *inputs,
            kernel=kernel,
            grid=(grid,),
            name=kernel.fn.__name__,
            num_warps=num_warps,
            num_stages=num_stages,
            compute_capability=capability[0] * 10 + capability[1],
            **form,
            **constants,
        )
    )


@functools.cache
def _takes_backend_options(library: Any) -> bool:
    """Whether it is called as since jax-triton 0.4."""
    return "backend_options" in inspect.signature(library.triton_call).parameters


def cache_problem() -> str | None:
    """Why compiled kernels are not kept on disk; None if they are."""
    return seam_problem(_jax_triton().triton_lib)
