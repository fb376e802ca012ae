"""Score functions as programs that the kernels read: tuples, part of `MaskParams`.

A program is a tuple of instructions and the place of its result. Places count the five scalars (score, batch, head, query, key),
then one result an instruction. An instruction is the name of what it does, and its operands' places or parameters:

- `("number", value, dtype)`;
- `("load", kind, start, ((place, stride, last), ...))`: an element of the numbers of a kind, at `start` plus `stride` times each
  index, which is brought into [0, last];
- `("convert", place, dtype)`;
- `("integer_pow", place, exponent)`;
- any other of `score_tiles`, with places alone.

Halves are held in float32, rounded after each instruction.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.operations.flash_attention.score_functions.record import (
    SCALARS,
    Captured,
    Constant,
    Ref,
    Result,
    Scalar,
    ScoreFunction,
)
from ejkernel.operations.flash_attention.score_functions.tracing import Parts, parts_of

Program = tuple[tuple[tuple[Any, ...], ...], int]

ONE: Program = ((("number", 1.0, "float32"),), len(SCALARS))
"""The derivative of a logit by itself."""

_UNARY = (
    *("abs", "ceil", "cos", "erf", "exp", "exp2", "expm1", "floor", "is_finite", "log", "log1p", "logistic", "neg", "not"),
    *("one_minus_square", "rsqrt", "sign", "sin", "sqrt", "square", "tanh"),
)
_BINARY = ("add", "and", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "or", "rem", "sub", "xor")
_SIMPLE = {name: name for name in (*_UNARY, *_BINARY, "clamp", "select_n")} | {"add_any": "add"}
_SAME = (
    "copy",
    "copy_p",
    "stop_gradient",
    "reduce_precision",
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "optimization_barrier",
)
"""Primitives that leave a number as it is."""

_MOST = 2**31 - 1
"""Elements are counted by int32."""

_DTYPES = ("float32", "float16", "bfloat16", "int32", "bool")


class _UnknownError(Exception):
    """What no kernel computes; its text is the reason."""


@dataclasses.dataclass(frozen=True)
class ScoreParams:
    """Programs of a score function: its result, its derivative by the score and by each of its loads that is floating, with the
    axes (1, 2, 4, 8 for b, h, t, s) on which that load depends."""

    result: Program
    slope: Program
    load_slopes: tuple[Program, ...]
    load_axes: tuple[int, ...]
    load_places: tuple[int, ...]


class _View(NamedTuple):
    """Elements of a captured array: where they begin, and the stride and the size of each axis that is left."""

    kind: str
    start: int
    indices: tuple[tuple[int, int, int], ...]
    axes: tuple[tuple[int, int], ...]


class _Writer:
    """Writes instructions; equal ones once."""

    def __init__(self) -> None:
        self.instructions: list[tuple[Any, ...]] = []

    def add(self, *instruction: Any) -> int:
        if instruction not in self.instructions:
            self.instructions.append(instruction)
        return len(SCALARS) + self.instructions.index(instruction)

    def constant(self, value: Any) -> int:
        array = np.asarray(value)
        if array.dtype.name not in _DTYPES or array.ndim:
            raise _UnknownError(f"computes with a constant of {array.dtype}{list(array.shape)}")
        number = array.item()
        return self.add("number", "nan" if isinstance(number, float) and math.isnan(number) else number, array.dtype.name)

    def write(self, function: ScoreFunction, ref: Ref, places: dict[Ref, int]) -> int:
        """The place of a value."""
        if isinstance(ref, Constant):
            return self.constant(ref.value)
        if ref not in places:
            if isinstance(ref, Scalar):
                places[ref] = SCALARS.index(ref.name)
            elif isinstance(ref, Captured) or function.nodes[ref.node].accesses:
                places[ref] = self.load(self.view(function, ref, places))
            else:
                places[ref] = self.node(function, ref, places)
        return places[ref]

    def node(self, function: ScoreFunction, ref: Result, places: dict[Ref, int]) -> int:
        node = function.nodes[ref.node]
        if node.shape:
            raise _UnknownError(f"computes with arrays of shape {list(node.shape)}, which kernels do number by number")
        operands = [self.write(function, operand, places) for operand in node.operands]
        if node.primitive == "convert_element_type":
            dtype = jnp.dtype(node.params["new_dtype"]).name
            if dtype not in _DTYPES:
                raise _UnknownError(f"converts to {dtype}")
            return self.add("convert", operands[0], dtype)
        if node.primitive in _SAME:
            return operands[0]
        if node.primitive == "integer_pow" and 0 <= node.params["y"] <= 8:
            result = self.add("integer_pow", operands[0], node.params["y"])
        elif node.primitive in _SIMPLE and len(operands) <= 3:
            result = self.add(_SIMPLE[node.primitive], *operands)
        else:
            raise _UnknownError(f"computes {node.primitive}")
        return self.add("convert", result, node.dtype) if node.dtype in ("bfloat16", "float16") else result

    def load(self, view: _View) -> int:
        if any(size != 1 for _, size in view.axes):
            raise _UnknownError("computes with rows of arrays, which kernels do number by number")
        return self.add("load", view.kind, view.start, view.indices)

    def view(self, function: ScoreFunction, ref: Ref, places: dict[Ref, int]) -> _View:
        if isinstance(ref, Captured):
            capture = function.captures[ref.index]
            strides = [math.prod(capture.shape[axis + 1 :]) for axis in range(len(capture.shape))]
            return _View(capture.kind, capture.start, (), tuple(zip(strides, capture.shape, strict=True)))
        node = function.nodes[ref.node]  # pyright: ignore[reportAttributeAccessIssue]
        view = self.view(function, node.operands[0], places)
        if node.primitive == "squeeze":
            left = tuple(axis for place, axis in enumerate(view.axes) if place not in node.params["dimensions"])
            return view._replace(axes=left)
        if node.primitive == "dynamic_slice":
            sizes = node.params["slice_sizes"]
            indices = list(view.indices)
            for (stride, size), wanted, index in zip(view.axes, sizes, node.operands[1:], strict=True):
                if wanted != size:
                    indices.append((self.write(function, index, places), stride, size - wanted))
            axes = tuple((stride, wanted) for (stride, _), wanted in zip(view.axes, sizes, strict=True))
            return view._replace(indices=tuple(indices), axes=axes)
        raise _UnknownError(f"takes elements of an array by {node.primitive}")

    def program(self, result: int) -> Program:
        return tuple(self.instructions), result


def _program(function: ScoreFunction, part: ScoreFunction) -> Program:
    """A part of a function, behind the loads that it reads."""
    writer = _Writer()
    places: dict[Ref, int] = {}
    loads: dict[Ref, int] = {}
    for place, load in enumerate(function.loads):
        if f"load {place}" in part.scalars:
            loads[Scalar(f"load {place}")] = writer.write(function, load, places)
    return writer.program(writer.write(part, part.output, loads))


@functools.lru_cache(maxsize=256)
def _params(function: ScoreFunction) -> ScoreParams | str:
    """The programs of a score function, or why there are none."""
    try:
        _check_loads(function)
        parts: Parts = parts_of(function, "float32")
        moving = [place for place, part in enumerate(parts.by_loads) if part is not None]
        return ScoreParams(
            _program(function, parts.result),
            _program(function, _part(parts.by_score)),
            tuple(_program(function, _part(parts.by_loads[place])) for place in moving),
            tuple(_axes(function, function.loads[place]) for place in moving),
            tuple(moving),
        )
    except _UnknownError as unknown:
        return f"score_mod {unknown}"


def _check_loads(function: ScoreFunction) -> None:
    if not function.single_loads:
        raise _UnknownError("computes with rows of arrays, which kernels do number by number")
    if any(capture.start + capture.size > _MOST for capture in function.captures):
        raise _UnknownError(f"reads arrays of more than {_MOST} numbers in all")


def _part(part: ScoreFunction | None) -> ScoreFunction:
    assert part is not None  # of a score function, and of a load that is floating
    return part


@functools.lru_cache(maxsize=256)
def _mask_program(function: ScoreFunction) -> Program | str:
    try:
        _check_loads(function)
        return _program(function, parts_of(function, "float32", masks=True).result)
    except _UnknownError as unknown:
        return f"mask_mod {unknown}"


def _axes(function: ScoreFunction, load: Ref) -> int:
    """The axes on which the place of an element depends."""
    found, waiting = 0, [load]
    while waiting:
        ref = waiting.pop()
        if isinstance(ref, Scalar) and ref.name != "score":
            found |= 1 << (SCALARS.index(ref.name) - 1)
        if isinstance(ref, Result):
            waiting += function.nodes[ref.node].operands
    return found


def score_params(call: FlashAttentionCall) -> ScoreParams | None:
    """The programs of the score function of a call that `supports` accepts; None without one."""
    found = None if call.score_mod is None else _params(call.score_mod)
    return found if isinstance(found, ScoreParams) else None


def mask_program(call: FlashAttentionCall) -> Program | None:
    """The program of its mask function."""
    found = None if call.mask_mod is None else _mask_program(call.mask_mod)
    return found if isinstance(found, tuple) else None


def functions_refused(call: FlashAttentionCall, phase: str) -> str | None:
    """Why the kernels do not compute the functions of a call, or a gradient of their arrays."""
    for name in ("query_index", "key_index"):
        if getattr(call, name) is not None:
            return f"{name} tells functions of other places than those in the arrays"
    found = None if call.score_mod is None else _params(call.score_mod)
    masks = None if call.mask_mod is None else _mask_program(call.mask_mod)
    for problem in (found, masks):
        if isinstance(problem, str):
            return problem
    if phase == "backward" and isinstance(found, ScoreParams) and any(axes & 12 == 12 for axes in found.load_axes):
        return "score_mod reads elements that query and key choose together, whose gradients XLA sums"
    return None
