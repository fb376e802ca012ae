"""Runs kernels in Triton's interpreter over NumPy, without a GPU and without torch. Very slow.

Outputs start as NaN, between guard bytes that a kernel must not write.
"""

# pyright: reportPrivateUsage=false, reportUnusedImport=false
from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl  # `_patch_lang` looks for these two among a function's globals
from triton._C.libtriton import ir
from triton.language import core  # noqa: F401
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_GUARD = 256
_NAN_BYTE = 0xFF
"""Bytes of all ones are NaN in every floating type."""

_one_at_a_time = threading.Lock()
"""The interpreter patches Triton's modules while a kernel runs, and each device calls from its own thread."""


class _Storage:
    """The storage of a `HostArray`, with the interface of a tensor's storage."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def cpu(self) -> _Storage:
        return self

    def copy_(self, other: _Storage) -> None:
        assert other.array is self.array, "the kernel worked on another buffer"


class HostArray:
    """A host array with the tensor methods that Triton's interpreter calls. Nothing is copied."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = str(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Storage:
        return _Storage(self.array)

    def new_empty(self, size: int, device: str) -> HostArray:
        return HostArray(self.array)

    def set_(self, storage: _Storage, offset: int, size: Any, stride: Any) -> None:
        assert storage.array is self.array or offset == 0

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)


def _guarded(shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """A buffer of NaN and the output array inside it, which share memory."""
    dtype = jnp.dtype(dtype)
    length = int(np.prod(shape)) * dtype.itemsize
    buffer = np.full(length + 2 * _GUARD, _NAN_BYTE, np.uint8)
    return buffer, buffer[_GUARD : _GUARD + length].view(dtype).reshape(shape)


def _interpret(function: JITFunction[Any], *args: Any, **kwargs: Any) -> Any:
    """Interpret a function that a kernel calls."""
    return InterpretedFunction(function.fn).rewrite()(*args, **kwargs)


_patch_tensor_before = interpreter._patch_lang_tensor


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """The interpreter turns arrays of one element into integers in a way that NumPy 2.5 refuses."""
    _patch_tensor_before(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda value: int(value.handle.data.item()))


_dot_before = interpreter.InterpreterBuilder.create_dot
_cast_before = interpreter.InterpreterBuilder.cast_impl


def _dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, *rest: Any) -> Any:
    """The interpreter stores bfloat16 as integers, which it would multiply, and emulates neither TF32 nor sums of float8."""
    if a.dtype.scalar in _FLOAT8:
        left, right = (x.data.view(_FLOAT8[x.dtype.scalar]).astype(np.float32) for x in (a, b))
        total = np.matmul(left, right) + d.data
        return interpreter.TensorHandle(total if rest[0] else _short(total), d.dtype.scalar)  # 14 bits, as Hopper's
    a, b = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))

    def product(left: np.ndarray, right: np.ndarray, total: Any) -> Any:
        one, other = (interpreter.TensorHandle(x, tl.float32) for x in (left, right))
        return _dot_before(builder, one, other, total, input_precision, *rest)

    if a.data.dtype == np.float32 and input_precision == ir.INPUT_PRECISION.TF32:
        return product(_tf32(a.data), _tf32(b.data), d)
    if a.data.dtype == np.float32 and input_precision == ir.INPUT_PRECISION.TF32x3:
        (a_hi, a_lo), (b_hi, b_lo) = _split(a.data), _split(b.data)
        zero = interpreter.TensorHandle(np.zeros_like(d.data), d.dtype)
        small = product(a_lo, b_hi, product(a_hi, b_lo, zero)).data
        total = product(a_hi, b_hi, d)
        # where a large part is infinite the small ones are NaN, which Triton makes 0
        return interpreter.TensorHandle(np.where(np.isnan(small), 0, small) + total.data, total.dtype)
    return _dot_before(builder, a, b, d, input_precision, *rest)


def _split(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two numbers of TF32 whose sum is nearly the array."""
    large = _tf32(array)
    return large, _tf32(array - large)


def _tf32(array: np.ndarray) -> np.ndarray:
    """Round the mantissa to 10 bits, ties away from zero. NaN and infinities stay."""
    bits = (array.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(array), bits.view(np.float32), array)


def _short(array: np.ndarray) -> np.ndarray:
    """Cut the mantissa to 13 bits. NaN and infinities stay."""
    return np.where(np.isfinite(array), (array.view(np.uint32) & np.uint32(0xFFFFFC00)).view(np.float32), array)


_load_before = interpreter.InterpreterBuilder.create_masked_load
_store_before = interpreter.InterpreterBuilder.create_masked_store


def _masked_load(builder: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
    """Newer interpreters reject a mask that was computed with a scalar, as they store it as integers."""
    return _load_before(builder, pointers, _as_bool(mask), *rest, **named)


def _masked_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
    return _store_before(builder, pointers, value, _as_bool(mask), *rest, **named)


def _as_bool(mask: Any) -> Any:
    """A load through a tensor descriptor passes a bare array."""
    if isinstance(mask, np.ndarray):
        return interpreter.TensorHandle(mask, tl.int1)
    return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)


def _cast(builder: Any, source: Any, target: Any) -> Any:
    """The interpreter truncates to bfloat16; a GPU rounds to nearest even."""
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        return interpreter.TensorHandle(source.data.astype(jnp.bfloat16).view(np.uint16), tl.bfloat16)
    return _cast_before(builder, source, target)


_float_cast_before = interpreter.InterpreterBuilder.create_fp_to_fp
_FLOAT8: Mapping[Any, Any] = {tl.float8e4nv: jnp.float8_e4m3fn, tl.float8e5: jnp.float8_e5m2}
_WIDE: Mapping[Any, Any] = {tl.float16: np.float16, tl.float32: np.float32}


def _float_cast(builder: Any, source: Any, target: Any, rounding: Any) -> Any:
    """The interpreter rounds ties away from zero, loses a carry into the exponent and makes NaN a number; a GPU rounds to nearest
    even, and what is too large, or infinite, to the largest number."""
    if source.dtype.scalar in _FLOAT8 and target.scalar in _WIDE:
        values = source.data.view(_FLOAT8[source.dtype.scalar]).astype(_WIDE[target.scalar])
        return interpreter.TensorHandle(values, target.scalar)
    dtype = _FLOAT8.get(target.scalar)
    if dtype is None or source.data.dtype not in (np.float32, np.float16):
        return _float_cast_before(builder, source, target, rounding)
    most = float(jnp.finfo(dtype).max)
    return interpreter.TensorHandle(np.clip(source.data, -most, most).astype(dtype).view(np.uint8), target.scalar)


@contextlib.contextmanager
def _library_interpreted() -> Generator[None]:
    """Triton's own library (`tl.sum`) sees the language as `core`, which a kernel's module does not name: both are patched."""
    scope = interpreter._patch_lang(_interpret)
    try:
        yield
    finally:
        scope.restore()


def interpreted_call(
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
) -> list[Any]:
    """`call_kernel` in the interpreter; `num_warps`, `num_stages` and `fp_fusion` have no meaning there."""
    return [jnp.asarray(array) for array in _interpreted(kernel, inputs, outputs, grid, input_output_aliases, constants)]


def traced_call(
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
) -> list[Any]:
    """`interpreted_call` within a program: the host is called when the program runs."""
    arrays = [value for value in inputs if not isinstance(value, int)]
    axes = jax.typeof(arrays[0]).manual_axis_type
    shapes = [jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes) for shape, dtype in outputs]  # pyright: ignore

    def host(*values: Any) -> list[np.ndarray]:
        given = iter(values)
        arguments = [value if isinstance(value, int) else np.asarray(next(given)) for value in inputs]
        with _one_at_a_time:
            return _interpreted(kernel, arguments, outputs, grid, input_output_aliases, constants)

    # Under a mesh the results of one callback after another are on one device for XLA, which JAX cannot read from a program's.
    return jax.lax.optimization_barrier(jax.pure_callback(host, shapes, *arrays))


def _interpreted(
    kernel: Any,
    inputs: Sequence[Any],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    grid: int,
    aliases: Mapping[int, int] | None,
    constants: dict[str, Any],
) -> list[np.ndarray]:
    arguments: list[Any] = [value if isinstance(value, int) else HostArray(np.array(value, order="C")) for value in inputs]
    results = [_guarded(shape, dtype) for shape, dtype in outputs]
    for given, result in (aliases or {}).items():
        results[result][1][...] = arguments[given].array
        arguments[given] = HostArray(results[result][1])
    unaliased = [a for i, a in enumerate(arguments) if isinstance(a, HostArray) and i not in (aliases or {})]
    before = [argument.array.copy() for argument in unaliased]
    with (
        mock.patch.object(JITFunction, "__call__", _interpret),
        mock.patch.object(interpreter, "_patch_lang_tensor", _patch_tensor),
        mock.patch.multiple(
            interpreter.InterpreterBuilder,
            create_dot=_dot,
            cast_impl=_cast,
            create_fp_to_fp=_float_cast,
            create_masked_load=_masked_load,
            create_masked_store=_masked_store,
        ),
        _library_interpreted(),
        np.errstate(all="ignore"),  # no arithmetic warns on a GPU
    ):
        InterpretedFunction(kernel.fn)[(grid,)](*arguments, *(HostArray(array) for _, array in results), **constants)
    for old, argument in zip(before, unaliased, strict=True):
        new = argument.array
        np.testing.assert_array_equal(old.view(np.uint8), new.view(np.uint8), "the kernel changed an input")
    for buffer, _ in results:
        assert (buffer[:_GUARD] == _NAN_BYTE).all() and (buffer[-_GUARD:] == _NAN_BYTE).all(), "written outside of an output"
    return [array for _, array in results]
