"""Triton kernels without a GPU: in Triton's interpreter over NumPy, and compiled ahead of time for a GPU that is not there.

`interpreted_call` takes the place of `call_kernel` in a kernel module, so that a test runs the launch code as it is; a
`Recorder` takes its place to compile what is launched. Under a JAX transformation `EJKERNEL_TRITON_INTERPRET=1` does the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ejkernel_triton._interpreter import interpreted_call, traced_call

__all__ = ["Compilation", "Recorder", "interpreted_call", "traced_call"]


@dataclasses.dataclass
class Compilation:
    """What `recorded_call` saw: a kernel with everything needed to compile it."""

    kernel: Any
    types: list[str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    def compile(self, capability: int) -> Any:
        """Compile to machine code, with the alignment that jax-triton promises and the fusion that it asks for."""
        names = self.kernel.arg_names
        signature = {**dict(zip(names, self.types, strict=False)), **dict.fromkeys(self.constants, "constexpr")}
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(self.types) if kind.startswith("*")}
        source = ASTSource(self.kernel, signature, {(names.index(k),): v for k, v in self.constants.items()}, aligned)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        return triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)


_TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int32": "*i32", "int64": "*i64"}


class Recorder:
    """Stands in for `call_kernel`: records each call and returns arrays of zeros."""

    def __init__(self) -> None:
        self.compilations: list[Compilation] = []

    def __call__(
        self, kernel: Any, inputs: Any, outputs: Any, *, grid: int, num_warps: int, num_stages: int = 1, **constants: Any
    ) -> list[Any]:
        types = ["i32" if isinstance(value, int) else _TYPES[str(value.dtype)] for value in inputs]
        types += [_TYPES[str(jnp.dtype(dtype))] for _, dtype in outputs]
        self.compilations.append(Compilation(kernel, types, constants, num_warps, num_stages))
        return [jnp.zeros(shape, dtype) for shape, dtype in outputs]
