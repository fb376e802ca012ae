"""Triton kernels without a GPU: in Triton's interpreter over NumPy, and compiled ahead of time for a GPU that is not there.

`interpreted_call` replaces `call_kernel` in a kernel module, so a test runs the real launch code. A `Recorder` replaces it to
compile what is launched. Under a JAX transformation `EJKERNEL_TRITON_INTERPRET=1` does the same.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import triton
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ejkernel_triton._interpreter import interpreted_call, traced_call

__all__ = [
    "Compilation",
    "Recorder",
    "Resources",
    "interpreted_call",
    "resources",
    "spilling_of",
    "stack_bytes",
    "tolerated_stack",
    "traced_call",
]


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A recorded launch: a kernel and everything needed to compile it.

    Attributes:
        kernel: the kernel.
        types: Triton types of its inputs and outputs; "1" for an integer equal to 1, which Triton specialises on.
        constants: `tl.constexpr` parameters.
        num_warps: warps per program.
        num_stages: stages of the software pipeline.
        fp_fusion: whether FMA fusion is enabled.
    """

    kernel: Any
    types: tuple[str, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    fp_fusion: bool = True

    @property
    def identity(self) -> tuple[Any, ...]:
        """Hashable; compilations with equal identity give the same machine code."""
        return (
            id(self.kernel),
            self.types,
            repr(sorted(self.constants.items())),
            self.num_warps,
            self.num_stages,
            self.fp_fusion,
        )

    def compile(self, capability: int) -> Any:
        """Compile to machine code with the pointer alignment that jax-triton guarantees."""
        names = self.kernel.arg_names
        constants = {**self.constants, **{name: 1 for name, kind in zip(names, self.types, strict=False) if kind == "1"}}
        signature = {**dict(zip(names, self.types, strict=False)), **dict.fromkeys(constants, "constexpr")}
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(self.types) if kind.startswith("*")}
        source = ASTSource(self.kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fp_fusion}
        return triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@dataclasses.dataclass(frozen=True)
class Resources:
    """Resource usage of a compiled kernel.

    Attributes:
        registers: per thread.
        stack: bytes per thread of stack and local memory; above 0 the kernel spills.
        shared: bytes of shared memory per program.
        spilling: largest share, over innermost loops, of instructions that only load or store spilled registers. Spills outside
            of loops do not count: they cost next to nothing.
    """

    registers: int
    stack: int
    shared: int
    spilling: float = 0.0


def resources(compiled: Any) -> Resources:
    """Registers and stack from `cuobjdump`, shared memory from Triton's metadata."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = _tool("cuobjdump", "--dump-resource-usage", file.name)
        numbers = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
        stack = numbers["STACK"] + numbers["LOCAL"]
        spilling = spilling_of(_tool("nvdisasm", "--print-code", file.name)) if stack else 0.0
    return Resources(numbers["REG"], stack, compiled.metadata.shared, spilling)


def _tool(name: str, *arguments: str) -> str:
    """Output of one of the CUDA binary tools that Triton ships."""
    path = pathlib.Path(str(triton.__file__)).parent / "backends/nvidia/bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


def spilling_of(disassembly: str) -> float:
    """`Resources.spilling` of a disassembled kernel."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in disassembly.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            labels[label[1]] = len(instructions)
        elif re.match(r"\s*/\*[0-9a-f]+\*/", line):
            instructions.append(line)
    targets = ((i, re.search(r"\bBRA\b.*(\.L_x_\d+)", line)) for i, line in enumerate(instructions))
    jumps = [(labels[target[1]], i) for i, target in targets if target and labels.get(target[1], i + 1) <= i]
    innermost = [(a, b) for a, b in jumps if not any((c, d) != (a, b) and a <= c and d <= b for c, d in jumps)]
    shares = (sum(bool(re.search(r"\b(LDL|STL)\b", x)) for x in instructions[a : b + 1]) / (b + 1 - a) for a, b in innermost)
    return max(shares, default=0.0)


def tolerated_stack(elsewhere: int = 16) -> int:
    """Bytes per thread that may spill: none with the Triton version that the kernels were tuned with, and `elsewhere` with others,
    whose register allocation differs."""
    return 0 if triton.__version__.startswith("3.6.") else elsewhere


def stack_bytes(compiled: Any) -> int:
    """Bytes per thread that the compiled kernel spills."""
    return resources(compiled).stack


_TYPES = {
    "bool": "*i1",
    "int8": "*i8",
    "int16": "*i16",
    "int32": "*i32",
    "int64": "*i64",
    "uint8": "*u8",
    "uint16": "*u16",
    "uint32": "*u32",
    "uint64": "*u64",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float32": "*fp32",
}


def _type(value: Any) -> str:
    if isinstance(value, int):
        return "1" if value == 1 else "i32" if -(2**31) <= value < 2**31 else "i64"
    return _TYPES[jnp.dtype(value.dtype).name]


class Recorder:
    """Replaces `call_kernel`: records each launch and returns zeros."""

    def __init__(self) -> None:
        self.compilations: list[Compilation] = []

    def __call__(
        self,
        kernel: Any,
        inputs: Any,
        outputs: Any,
        *,
        grid: int,
        num_warps: int,
        num_stages: int = 1,
        input_output_aliases: Mapping[int, int] | None = None,
        fp_fusion: bool = True,
        **constants: Any,
    ) -> list[Any]:
        types = (*map(_type, inputs), *(_TYPES[jnp.dtype(dtype).name] for _, dtype in outputs))
        self.compilations.append(Compilation(kernel, types, constants, num_warps, num_stages, fp_fusion))
        return [jnp.zeros(shape, dtype) for shape, dtype in outputs]
