"""The only module that imports jax-triton.

Importing jax-triton overwrites `TRITON_CACHE_DIR` for the whole process; the user's value is restored. jax-triton takes the
compute capability from the host's first device; here it comes from the target that core builds for.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from ejkernel.plugin import current_target
from ejkernel_triton._interpret import interpreting
from ejkernel_triton._kernel_cache import install, keep, patch_problem, versions_key
from ejkernel_triton._versions import version_problem

_CACHE_VARIABLE = "TRITON_CACHE_DIR"
_ALWAYS_COMPILE = "TRITON_ALWAYS_COMPILE"
_ON = ("1", "on", "true", "yes", "y")
_SETTINGS = ("ALLOW_LHS_TMEM", "DISABLE_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_", "TRITON_", "USE_IR_LOC")
"""How environment variables begin that Triton's compiler reads."""
_TYPED_CALL, _UNTYPED_CALL = "triton_kernel_call_ffi", "triton_kernel_call"
_interceptor: contextvars.ContextVar[Callable[..., list[Any]] | None] = contextvars.ContextVar("ejkernel_triton", default=None)


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
        from jax_triton import triton_lib
    install(triton_lib)
    if patch_problem(triton_lib) is None:
        lower = functools.partial(triton_lib.triton_kernel_call_lowering, triton_lib.get_cuda_backend)
        mlir.register_lowering(triton_lib.triton_kernel_call_p, functools.partial(_lower_typed, lower), platform="cuda")
    return jax_triton


def _lower_typed(lower: Callable[..., Any], context: Any, *arrays: Any, **parameters: Any) -> Any:
    """jax-triton's lowering, whose call is turned into XLA's typed one if that is its name.

    XLA puts runs of kernels into CUDA graphs, which the untyped call that jax-triton makes ends. It also joins a typed call with
    slices around it: the kernel would get pointers of any alignment, and results would lose the operands that they alias. Barriers
    keep slices apart; XLA drops them once it has fused.
    """
    if parameters["custom_call_target_name"] != _TYPED_CALL:
        return lower(context, *arrays, **parameters)
    results = lower(context, *_barrier(arrays), **parameters)
    attributes = results[0].owner.attributes
    attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4)
    attributes["backend_config"] = ir.DictAttr.get({"opaque": attributes["backend_config"]})
    return _barrier(results)


def _barrier(values: Sequence[Any]) -> Sequence[Any]:
    return hlo.OptimizationBarrierOp(values).results if values else values


@functools.cache
def call_name() -> str:
    """Of the custom call that runs a kernel: the typed one if jaxlib has it and jax-triton is a version that is known here."""
    library = getattr(importlib.import_module("jaxlib.gpu_triton"), "_cuda_triton", None)
    typed = library is not None and _TYPED_CALL in library.registrations() and cache_problem() is None
    return _TYPED_CALL if typed else _UNTYPED_CALL


@contextlib.contextmanager
def intercept_launches(call: Callable[..., list[Any]]) -> Generator[None]:
    """Replace `call_kernel` by `call` in programs that are traced inside the block."""
    token = _interceptor.set(call)
    try:
        yield
    finally:
        _interceptor.reset(token)


def _interpreted_launch() -> Callable[..., list[Any]]:
    from ejkernel_triton._interpreter import traced_call

    return traced_call


def call_kernel(
    kernel: Any,
    inputs: Sequence[Any],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    *,
    grid: int,
    num_warps: int,
    num_stages: int = 1,
    input_output_aliases: Mapping[int, int] | None = None,
    fp_fusion: bool = True,
    **constants: Any,
) -> list[jax.Array]:
    """Call a `triton.jit` kernel whose parameters are: inputs in order, outputs in order, constants by name.

    With `EJKERNEL_TRITON_INTERPRET=1` the program calls Triton's interpreter on the host.

    Args:
        kernel: the kernel.
        inputs: arrays, and integers that the compiled kernel does not depend on.
        outputs: shape and dtype of each.
        grid: number of programs.
        num_warps: warps per program.
        num_stages: stages of the software pipeline.
        input_output_aliases: index of an array among `inputs` -> index of the output that is initialised with it, in the same
            buffer if XLA can donate it. The kernel gets both pointers.
        fp_fusion: whether multiplications and additions may be fused to FMA.
        **constants: `tl.constexpr` parameters.
    """
    interceptor = _interceptor.get() or (_interpreted_launch() if interpreting() else None)
    if interceptor is not None:
        launch = {"num_warps": num_warps, "num_stages": num_stages, "fp_fusion": fp_fusion}
        return interceptor(kernel, inputs, outputs, grid=grid, input_output_aliases=input_output_aliases, **launch, **constants)
    keep(kernel)
    capability = current_target().capability
    if capability is None:
        raise ValueError(f"target: got {current_target()}, expected a GPU with a known compute capability")
    arrays = [i for i, value in enumerate(inputs) if not isinstance(value, int)]
    aliases = {arrays.index(given): result for given, result in (input_output_aliases or {}).items()}
    return list(
        _jax_triton().triton_call(
            *inputs,
            kernel=kernel,
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs],
            grid=(grid,),
            name=kernel.fn.__name__,
            num_warps=num_warps,
            num_stages=num_stages,
            enable_fp_fusion=fp_fusion,
            input_output_aliases=aliases,
            compute_capability=capability[0] * 10 + capability[1],
            custom_call_target_name=call_name(),
            **constants,
        )
    )


def lowered_from() -> str | None:
    """What lowered kernels depend on beside their sources; None while kernels are not compiled as ever, or not kept."""
    if _interceptor.get() is not None or interpreting() or os.environ.get("JAX_TRITON_DUMP_DIR"):
        return None
    # Knobs that are set in Python, of which Triton need not tell the environment, and compilations that are asked for.
    knobs = sys.modules.get("triton.knobs")
    if knobs is not None and any(vars(group) for group in vars(knobs).values() if isinstance(group, knobs.base_knobs)):
        return None
    if os.environ.get(_ALWAYS_COMPILE, "").lower() in _ON:
        return None
    importlib.import_module("jaxlib.gpu_triton")  # registers the custom call

    settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    settings.pop(_CACHE_VARIABLE, None)
    return repr((versions_key(), sorted(settings.items())))


def has_scratch() -> bool:
    """Whether kernels may use global scratch memory, which `tl.make_tensor_descriptor` needs; see `_kernel_cache`."""
    stands_in = _interceptor.get() is not None or interpreting()
    return stands_in or (version_problem() is None and cache_problem() is None)


def cache_problem() -> str | None:
    """Why compiled kernels are not cached on disk; None if they are."""
    return patch_problem(_jax_triton().triton_lib)
