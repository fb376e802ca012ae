"""From a Python function of one score to a `ScoreFunction`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.core import Tracer

from ejkernel.call.partition import unify_manual_axes
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.flash_attention.score_functions.record import (
    SCALARS,
    Capture,
    Captured,
    Constant,
    Node,
    Ref,
    Result,
    Scalar,
    ScoreFunction,
)

_ACCESSES = frozenset({"dynamic_slice", "gather", "squeeze", "slice", "reshape", "transpose"})
"""Primitives that take elements out of their first operand."""

_INLINED = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat")
_VARYING = ("pvary", "pcast", "pbroadcast")
"""Notes on the axes of a `shard_map`, which are made anew where a function is evaluated."""

_CUSTOM = ("custom_jvp_call", "custom_vjp_call")


class Tracing:
    """The functions of one call, which share the vectors of their numbers."""

    def __init__(self, dtype: Any) -> None:
        """`dtype`: of the scores, float32 or float64."""
        self.dtype = jnp.dtype(dtype)
        self.arrays: list[tuple[Capture, Any]] = []

    def traced(self, name: str, function: Callable[..., Any], mod_inputs: Any, *, masks: bool) -> ScoreFunction:
        """A function as data; its arrays are added to `arrays`.

        Args:
            name: of the argument, for errors.
            function: of a score (unless it `masks`), batch, head, query index and key index, and of mod_inputs if there are any.
            mod_inputs: a pytree of arrays, or None.
            masks: whether it returns a bool.

        Raises:
            ValueError: it returns another shape or dtype, has side effects, or takes other arguments.
            TypeError: it is no function, branches on traced values, or reads what is no array of numbers.
        """
        if not callable(function):
            raise wrong_type(name, type(function).__name__, "a function")
        try:
            program = _traced(name, function, mod_inputs, self.dtype, masks=masks)
            return _Reading(name, self).read(program, SCALARS[1:] if masks else SCALARS)
        except jax.errors.UnexpectedTracerError as error:
            remedy = "pass arrays of this trace by mod_inputs="
            raise wrong_type(
                name, "a function that reads a tracer of a trace that has ended", "one without", remedy=remedy
            ) from error

    def captured(self, name: str, array: Any, read_as: Any = None) -> Captured:
        """An array's place among those of the call; `read_as` the dtype of its elements, if that is not its own."""
        for index, (capture, known) in enumerate(self.arrays):
            if known is array and (read_as or array.dtype) == capture.dtype:
                return Captured(index)
        dtype = jnp.dtype(array.dtype) if not jnp.issubdtype(array.dtype, jax.dtypes.extended) else None
        if dtype is None or not (jnp.issubdtype(dtype, jnp.floating) or dtype.kind in "biu"):
            raise wrong_type(name, f"a function that reads an array of dtype {array.dtype}", "real numbers, integers or bools")
        if dtype.name in ("uint32", "uint64", "int64"):
            raise wrong_type(
                name,
                f"a function that reads an array of dtype {dtype}",
                "int32 at most",
                remedy="cast it, for example by .astype(int32)",
            )
        kind = "values" if jnp.issubdtype(dtype, jnp.floating) else "integers"
        start = sum(capture.size for capture, _ in self.arrays if capture.kind == kind)
        jnp.shape(jnp.ravel(array))  # refuses a tracer of another trace here, where its function is known
        self.arrays.append((Capture(kind, start, tuple(array.shape), jnp.dtype(read_as or dtype).name), array))
        return Captured(len(self.arrays) - 1)


def _traced(name: str, function: Callable[..., Any], mod_inputs: Any, dtype: Any, *, masks: bool) -> Any:
    index, score = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), dtype)
    given = (index,) * 4 if masks else (score, *(index,) * 4)
    last = () if mod_inputs is None else (mod_inputs,)
    meaning = "(batch, head, query index, key index)" if masks else "(score, batch, head, query index, key index)"
    remedy = f"it is called with {meaning}{', and then with mod_inputs' if last else ''}"
    try:
        _check_signature(name, function, len(given) + len(last), remedy)
        program = jax.make_jaxpr(lambda *scalars: function(*scalars, *last))(*given)
    except jax.errors.TracerArrayConversionError as error:
        got = "a function that takes elements of a NumPy array by a traced index"
        raise wrong_type(name, got, "one that reads arrays of JAX", remedy="convert it by jnp.asarray") from error
    except jax.errors.ConcretizationTypeError as error:
        raise wrong_type(
            name, "a function that branches on the score or on an index", "one without", remedy="choose by jnp.where"
        ) from error
    if program.effects:
        raise invalid(name, "a function with side effects", "one that only computes")
    wanted = jnp.dtype(bool) if masks else dtype
    got: Any = program.out_avals
    if len(got) != 1 or got[0].shape != () or got[0].dtype != wanted:
        said = ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in got) or "nothing"
        raise invalid(name, f"a function that returns {said}", f"one {wanted} scalar", remedy=remedy)
    return program


def _check_signature(name: str, function: Any, count: int, remedy: str) -> None:
    import inspect

    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        raise wrong_type(name, f"a function of other arguments ({error})", f"one of {count}", remedy=remedy) from None
    except ValueError:  # a builtin without a signature
        return


class _Reading:
    """The walk over a program: calls are opened, what depends on arrays alone is computed beforehand."""

    def __init__(self, name: str, tracing: Tracing, *, opened: bool = False) -> None:
        """`opened`: gradients are taken already, and what brings rules of its own for them is opened like any call."""
        self.name, self.tracing, self.opened = name, tracing, opened
        self.nodes: list[Node] = []
        self.places: dict[Any, Result] = {}

    def read(self, closed: Any, scalars: Sequence[str]) -> ScoreFunction:
        jaxpr = closed.jaxpr
        known = {var: self._known(array) for var, array in zip(jaxpr.constvars, closed.consts, strict=True)}
        known |= {var: Scalar(name) for var, name in zip(jaxpr.invars, scalars, strict=True)}
        (output,) = self._walk(jaxpr, known)
        return self._function(output)

    @staticmethod
    def _known(array: Any) -> Any:
        """A number of NumPy as a constant. One of JAX is an array: functions that read another are the same program."""
        return Constant(array[()]) if isinstance(array, (np.generic, np.ndarray)) and array.ndim == 0 else _Array(array)

    def _walk(self, jaxpr: Any, known: dict[Any, Any]) -> list[Any]:
        def ref(atom: Any) -> Any:
            return Constant(np.asarray(atom.val, atom.aval.dtype)[()]) if hasattr(atom, "val") else known[atom]

        for eqn in jaxpr.eqns:
            operands = [ref(atom) for atom in eqn.invars]
            inner = self._inner(eqn)
            if inner is not None:
                consts = getattr(inner, "consts", ())
                inner = getattr(inner, "jaxpr", inner)
                inside = {var: self._known(array) for var, array in zip(inner.constvars, consts, strict=True)}
                results = self._walk(inner, inside | dict(zip(inner.invars, operands, strict=True)))
            elif all(isinstance(operand, (Constant, _Array)) for operand in operands):
                found = equation(jaxpr, eqn)([_number(operand) for operand in operands])
                if all(isinstance(operand, Constant) for operand in operands) and not any(map(_is_traced, found)):
                    found = [np.asarray(array) for array in found]
                results = [self._known(array) for array in found]
            else:
                results = [self._node(jaxpr, eqn, operands, place) for place in range(len(eqn.outvars))]
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [ref(atom) for atom in jaxpr.outvars]

    def _inner(self, eqn: Any) -> Any:
        """The program that an equation calls, if it does nothing else."""
        if self.opened and eqn.primitive.name in _CUSTOM:
            return eqn.params.get("call_jaxpr")
        return eqn.params.get("jaxpr") if eqn.primitive.name in _INLINED else None

    def _node(self, jaxpr: Any, eqn: Any, operands: list[Any], place: int) -> Any:
        """The ref of one result; indices are not negative, and what is computed twice is computed once."""
        primitive = eqn.primitive.name
        if primitive == "lt" and isinstance(operands[0], Scalar) and operands[0].name != "score" and operands[1] == Constant(0):
            return Constant(np.False_)
        if primitive in _VARYING:
            return operands[0]
        if primitive == "select_n" and isinstance(operands[0], Constant) and np.ndim(operands[0].value) == 0:
            return operands[1 + int(operands[0].value)]
        source = operands[0] if operands else None
        from_array = isinstance(source, _Array) or (isinstance(source, Result) and self.nodes[source.node].accesses)
        run = equation(jaxpr, eqn)
        node = Node(
            primitive,
            dict(eqn.params),
            tuple(operands),
            tuple(eqn.outvars[place].aval.shape),
            str(eqn.outvars[place].aval.dtype),
            primitive in _ACCESSES and from_array,
            lambda values: run(values)[place],
            _derivative(run, eqn) if primitive in _CUSTOM else "",
        )
        key = (primitive, _spelt_params(node), tuple(operands), place, node.derivative)
        if key not in self.places:
            self.nodes.append(node)
            self.places[key] = Result(len(self.nodes) - 1)
        return self.places[key]

    def _function(self, output: Any) -> ScoreFunction:
        """What the output needs, with the arrays as captures of the call."""
        output, wide = self._widened(output)
        captured: dict[int, Captured] = {}
        needed = self._needed(output)
        for ref in (*(operand for result in needed for operand in self.nodes[result.node].operands), output):
            if isinstance(ref, _Array) and id(ref.array) not in captured:
                read_as = self.tracing.dtype if id(ref.array) in wide else None
                captured[id(ref.array)] = self.tracing.captured(self.name, ref.array, read_as)
        renamed = {ref: Result(place) for place, ref in enumerate(needed)}

        def final(ref: Any) -> Any:
            return captured[id(ref.array)] if isinstance(ref, _Array) else renamed.get(ref, ref)

        nodes: list[Node] = []
        for ref in needed:
            node = self.nodes[ref.node]
            nodes.append(dataclasses.replace(node, operands=tuple(map(final, node.operands))))
        output = final(output)
        used = [operand for node in nodes for place, operand in enumerate(node.operands) if not (node.accesses and place == 0)]
        loads = dict.fromkeys(ref for ref in (*used, output) if _is_load(ref, nodes))
        scalars = {ref.name for ref in (*used, output) if isinstance(ref, Scalar)}
        captures = tuple(capture for capture, _ in self.tracing.arrays)
        text = _text(nodes, output, captures)
        return ScoreFunction(text, tuple(nodes), output, captures, tuple(loads), frozenset(scalars))

    def _needed(self, output: Any) -> dict[Result, None]:
        """The nodes that an output needs, in order."""
        found: set[Result] = set()
        waiting = [output]
        while waiting:
            ref = waiting.pop()
            if isinstance(ref, Result) and ref not in found:
                found.add(ref)
                waiting += self.nodes[ref.node].operands
        return dict.fromkeys(sorted(found, key=lambda ref: ref.node))

    def _widened(self, output: Any) -> tuple[Any, set[int]]:
        """Elements that are computed with in the dtype of the scores alone are read in it: their gradients, sums over many scores,
        are then not rounded one by one. Returns the output, and the ids of the arrays that are read so."""
        wide = self.tracing.dtype
        uses: dict[int, list[Any]] = {}
        for ref in (*self._needed(output), None):
            node = None if ref is None else self.nodes[ref.node]
            for place, operand in enumerate((output,) if node is None else node.operands):
                source = self._array_of(operand)
                if source is not None and not (node is not None and node.accesses and place == 0):
                    uses.setdefault(id(source), []).append((source, ref))

        def widens(ref: Any) -> bool:
            node = None if ref is None else self.nodes[ref.node]
            return node is not None and node.primitive == "convert_element_type" and node.params["new_dtype"] == wide

        narrow = {
            key: [ref for _, ref in found]
            for key, found in uses.items()
            if jnp.issubdtype(found[0][0].dtype, jnp.floating) and found[0][0].dtype.itemsize < wide.itemsize
        }
        chosen = {key: refs for key, refs in narrow.items() if all(map(widens, refs))}
        alias = {ref: self.nodes[ref.node].operands[0] for refs in chosen.values() for ref in refs}
        self.nodes = [
            dataclasses.replace(node, operands=tuple(alias.get(operand, operand) for operand in node.operands))
            for node in self.nodes
        ]
        return alias.get(output, output), {*chosen}

    def _array_of(self, ref: Any) -> Any:
        """The array whose elements a ref holds, or None."""
        while isinstance(ref, Result) and self.nodes[ref.node].accesses:
            ref = self.nodes[ref.node].operands[0]
        return ref.array if isinstance(ref, _Array) else None


def equation(jaxpr: Any, eqn: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """An equation of a program as a function of its operands."""
    if eqn.primitive.name in _CUSTOM:  # JAX alone knows how their rules become arguments again
        variables = tuple(dict.fromkeys(atom for atom in eqn.invars if not hasattr(atom, "val")))
        places = [eqn.invars.index(variable) for variable in variables]
        unnamed = jaxpr.debug_info.with_unknown_names()
        alone = jaxpr.replace(constvars=[], invars=[*variables], outvars=[*eqn.outvars], eqns=[eqn], debug_info=unnamed)
        return lambda values: core.eval_jaxpr(alone, (), *(values[place] for place in places))

    def run(values: Sequence[Any]) -> Sequence[Any]:
        results = eqn.primitive.bind(*unify_manual_axes([*values]), **eqn.params)
        return results if eqn.primitive.multiple_results else [results]

    return run


def _derivative(run: Callable[[Sequence[Any]], Sequence[Any]], eqn: Any) -> str:
    """The text of the gradient that an equation brings itself: two with equal values may differ in it."""
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    moving = [place for place, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.floating)]

    def gradient(*values: Any) -> Any:
        def of(*floats: Any) -> Any:
            given = dict(zip(moving, floats, strict=True))
            return tuple(run([given.get(place, value) for place, value in enumerate(values)]))

        outputs, pull = jax.vjp(of, *(values[place] for place in moving))
        return pull(jax.tree.map(jnp.ones_like, outputs))

    return f" with {jax.make_jaxpr(gradient)(*avals)}"


@dataclasses.dataclass(frozen=True, eq=False)
class _Array:
    """An array that a function reads, while it is walked."""

    array: Any


def _is_traced(array: Any) -> bool:
    return isinstance(array, Tracer) or jnp.issubdtype(array.dtype, jax.dtypes.extended)


def _number(ref: Any) -> Any:
    return ref.array if isinstance(ref, _Array) else ref.value


def _is_load(ref: Any, nodes: Sequence[Node]) -> bool:
    return isinstance(ref, Captured) or (isinstance(ref, Result) and nodes[ref.node].accesses)


def _text(nodes: Sequence[Node], output: Ref, captures: Sequence[Capture]) -> str:
    """What is computed, so that equal texts mean equal results and equal gradients."""
    lines = [
        f"@{place} = {capture.kind}[{capture.start}:] {capture.dtype}{list(capture.shape)}"
        for place, capture in enumerate(captures)
    ]
    for place, node in enumerate(nodes):
        operands = " ".join(map(_spelt, node.operands))
        lines.append(f"%{place} = {node.primitive}{_spelt_params(node)} {operands}{node.derivative}")
    return "; ".join((*lines, f"return {_spelt(output)}"))


def _spelt_params(node: Node) -> str:
    params = ", ".join(f"{name}={value}" for name, value in sorted(node.params.items()) if value is not None)
    return f"[{params}]" if params else ""


def _spelt(ref: Ref) -> str:
    if isinstance(ref, Scalar):
        return ref.name
    if isinstance(ref, Constant):
        return f"{np.asarray(ref.value).item()!r}:{np.asarray(ref.value).dtype}"
    return f"@{ref.index}" if isinstance(ref, Captured) else f"%{ref.node}"


class Parts(NamedTuple):
    """A function of single loads as its parts for kernels: what it makes of a score and of `load 0`, `load 1`, ..., which are
    scalars like the others, and its derivatives by the score and by every load (None of one that is not floating)."""

    result: ScoreFunction
    by_score: ScoreFunction | None
    by_loads: tuple[ScoreFunction | None, ...]


@functools.lru_cache(maxsize=256)
def parts_of(function: ScoreFunction, dtype: str, *, masks: bool = False) -> Parts:
    """The parts of a traced function of scores in this dtype; rules of its own for gradients are opened."""
    names = (*SCALARS, *(f"load {place}" for place in range(len(function.loads))))
    integer = jax.ShapeDtypeStruct((), jnp.int32)
    dtypes = [function.dtype_of(load) for load in function.loads]
    given = (jax.ShapeDtypeStruct((), dtype), *(integer,) * 4, *(jax.ShapeDtypeStruct((), one) for one in dtypes))

    def computed(*scalars: Any) -> Any:
        return function.computed(dict(zip(SCALARS, scalars[: len(SCALARS)], strict=True)), scalars[len(SCALARS) :])

    def derivative(place: int) -> Callable[..., Any]:
        def of(*scalars: Any) -> Any:
            varied = jax.vjp(lambda one: computed(*scalars[:place], one, *scalars[place + 1 :]), scalars[place])
            return varied[1](jnp.ones((), dtype))[0]

        return of

    def read(run: Callable[..., Any]) -> ScoreFunction:
        reading = _Reading("score_mod", Tracing(dtype), opened=True)
        return reading.read(jax.make_jaxpr(run)(*given), names)

    if masks:
        return Parts(read(computed), None, ())
    moving = [place for place, one in enumerate(dtypes) if jnp.issubdtype(one, jnp.floating)]
    by_loads = [read(derivative(len(SCALARS) + place)) if place in moving else None for place in range(len(dtypes))]
    result = read(lambda *scalars: jax.vjp(lambda one: computed(one, *scalars[1:]), scalars[0])[0])
    return Parts(result, read(derivative(0)), tuple(by_loads))
