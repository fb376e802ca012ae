"""Keywords that neural-network libraries hand to an attention function.

Flax Linen looks at a function's signature and drops, without a word, what is not in it: a mask, dropout. So every function that
can stand in that place has these keywords in its signature, and honours them or refuses them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ejkernel._pipeline.arguments import REFUSED
from ejkernel.errors import argument_names, invalid, wrong_type
from ejkernel.masks import MaskInfo
from ejkernel.operations.common.options import as_flag
from ejkernel.operations.flash_attention.dropout import as_dropout_rate, seed_words
from ejkernel.utils.checks import check_array, result_dtype

Function = TypeVar("Function", bound=Callable[..., Any])

_KEYWORDS = {
    "mask": None,
    "dropout_rng": None,
    "dropout_rate": 0.0,
    "broadcast_dropout": None,
    "deterministic": None,
    "dtype": None,
    "force_fp32_for_softmax": False,
    "einsum_dot_general": None,
    "qk_attn_weights_einsum": None,
    "attn_weights_value_einsum": None,
    "module": None,
    "is_causal": False,
}
"""What `flax.linen.dot_product_attention` and its like in `flax.nnx` take, and the values that ask for nothing."""

_EINSUMS = ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")
_FLAGS = ("broadcast_dropout", "deterministic", "force_fp32_for_softmax", "is_causal")
_ARRAYS = ("query", "key", "value")
_OF_ROWS = ("mask", "bias")
_BY_THEMSELVES = ("mask_info", "cum_seqlens_q", "cum_seqlens_k", "block_tables", "mesh")
"""Arguments with which the axes of arrays are what they are: rows are not folded."""


def honours_masks(function: Function) -> Function:
    """Give a function of query, key and value these keywords: masks and dropout join what it has for them.

    As in Flax, query, key and value may then have any number of axes before the length.
    """

    def call(args: tuple[Any, ...], options: dict[str, Any], given: Mapping[str, Any]) -> Any:
        _check_settings(given)
        for name in (*_EINSUMS, "module"):
            if given.get(name) is not None:
                expected = f"None: {function.__name__} neither takes products nor stores weights"
                raise invalid(name, type(given[name]).__name__, expected)
        options = {**dict(zip(_ARRAYS, args, strict=False)), **options}
        if len(args) > len(_ARRAYS) or not {*_ARRAYS} <= options.keys():
            return function(*args, **options)  # which says what is missing
        for name in _ARRAYS:
            check_array(name, options[name], floating=False)
        if given.get("is_causal"):
            options["causal"] = True
        if given.get("dropout_rate") and not given.get("deterministic"):
            options |= _dropout(given, options)
        if given.get("dtype") is not None:
            dtype = result_dtype("dtype", given["dtype"])
            options |= {name: _in_dtype(options[name], dtype) for name in _ARRAYS}
        if given.get("mask") is not None:
            options["mask"] = _as_bool(given["mask"])
        return _in_rows(own_mask if "mask" in parameters else joined, options)

    def own_mask(**options: Any) -> Any:
        return function(**options)

    def joined(*, mask: Any = None, **options: Any) -> Any:
        return function(**options) if mask is None else function(**_joining(mask, options))

    parameters = inspect.signature(function).parameters
    return _with_keywords(function, call, also=("mask",), honoured=True)


def refuses_masks(remedy: str) -> Callable[[Function], Function]:
    """Give a function these keywords, of which it refuses all that ask for something."""

    def decorate(function: Function) -> Function:
        (first, *_) = inspect.signature(function).parameters

        def call(args: tuple[Any, ...], options: dict[str, Any], given: Mapping[str, Any]) -> Any:
            _check_settings(given)
            idle = {"deterministic", "force_fp32_for_softmax"}
            if given.get("deterministic") or not given.get("dropout_rate"):
                idle |= {"dropout_rng", "dropout_rate", "broadcast_dropout"}
            own = getattr(args[0] if args else options.get(first), "dtype", None)
            if given.get("dtype") is not None and own is not None and result_dtype("dtype", given["dtype"]) == own.name:
                idle.add("dtype")
            for name, value in given.items():
                if name not in idle and value is not None and value is not False:
                    shown = value if isinstance(value, (bool, int, float)) else type(value).__name__
                    expected = f"{_KEYWORDS[name]}: {function.__name__} has no such thing"
                    raise invalid(name, shown, expected, remedy=remedy)
            return function(*args, **options)

        return _with_keywords(function, call)

    return decorate


def no_attention_function(reason: str) -> Callable[[Function], Function]:
    """Give a function these keywords, all of which it refuses: its arrays or results are not what these libraries expect."""

    def decorate(function: Function) -> Function:
        def call(args: tuple[Any, ...], options: dict[str, Any], given: Mapping[str, Any]) -> Any:
            name, value = next(iter(given.items()))
            got = value if isinstance(value, (bool, int, float, type(None))) else type(value).__name__
            raise wrong_type(name, got, f"nothing: {reason}", remedy="use flash_attention as an attention function")

        return _with_keywords(function, call)

    return decorate


def _with_keywords(
    function: Function,
    call: Callable[[tuple[Any, ...], dict[str, Any], Mapping[str, Any]], Any],
    *,
    also: Collection[str] = (),
    honoured: bool = False,
) -> Function:
    """The function itself but for calls with one of the keywords that it does not have by itself, or with one of `also`."""
    signature = inspect.signature(function)
    added = {name: default for name, default in _KEYWORDS.items() if name not in signature.parameters}
    taken = {*added, *also}

    @functools.wraps(function)
    def with_keywords(*args: Any, **options: Any) -> Any:
        if taken.isdisjoint(options):
            return function(*args, **options)
        given = {name: options.pop(name) for name in taken if name in options}
        return call(args, options, given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, keyword, default=default, annotation=Any) for name, default in added.items()]
    vars(with_keywords)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *more])
    if not honoured:
        vars(with_keywords)[REFUSED] = (*added,)
    return with_keywords  # pyright: ignore[reportReturnType]


@argument_names(dropout_prob="dropout_rate", dropout_seed="dropout_rng")
def _check_settings(given: Mapping[str, Any]) -> None:
    """Settings of a wrong type or value are refused also where they would change nothing."""
    for name in _FLAGS:
        if given.get(name) is not None:
            as_flag(name, given[name])
    if "dropout_rate" in given:
        as_dropout_rate(given["dropout_rate"])
    if given.get("dropout_rng") is not None:
        seed_words(given["dropout_rng"])


def _as_bool(mask: Any) -> Any:
    """A mask `[B|1, H|1, T|1, S|1]`, or its last two or more axes, of booleans or of 0 and 1, as booleans."""
    if not hasattr(mask, "dtype") or not hasattr(mask, "shape"):
        raise wrong_type("mask", type(mask).__name__, "an array of booleans, or of 0 and 1")
    if len(mask.shape) < 2:
        raise invalid("mask", f"shape {tuple(mask.shape)}", "[B or 1, H or 1, T or 1, S or 1], or its last two or three axes")
    if mask.dtype == bool:
        return mask
    if not jnp.issubdtype(mask.dtype, jnp.floating) and not jnp.issubdtype(mask.dtype, jnp.integer):
        raise wrong_type("mask", f"dtype {mask.dtype}", "booleans, or 0 and 1")
    if isinstance(mask, jax.ShapeDtypeStruct):  # as `explain` may be given it
        return mask.update(dtype=bool)
    if not isinstance(mask, Tracer) and not np.isin(np.asarray(mask), (0, 1)).all():
        raise invalid("mask", "other numbers", "0 for hidden and 1 for visible", remedy="pass additive values as bias")
    return mask != 0  # as linen.make_causal_mask and its like make them


def _in_dtype(array: Any, dtype: str) -> Any:
    return array.update(dtype=dtype) if isinstance(array, jax.ShapeDtypeStruct) else array.astype(dtype)


def _joining(mask: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with a mask in their `MaskInfo`."""
    if len(mask.shape) > 4:
        raise invalid("mask", f"shape {tuple(mask.shape)}", "[B or 1, H or 1, T or 1, S or 1], or its last two or three axes")
    dense = MaskInfo(dense=mask.reshape((1,) * (4 - len(mask.shape)) + tuple(mask.shape))).dense
    info = options.get("mask_info")
    if info is None:
        return {**options, "mask_info": MaskInfo(dense=dense)}
    return {**options, "mask_info": info.replace(dense=dense if info.dense is None else info.dense & dense)}


def _in_rows(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Fold the axes before the length, as many as there are, into one."""
    leading = tuple(options["query"].shape[:-3])
    if len(leading) == 1 or any(options.get(name) is not None for name in _BY_THEMSELVES):
        return function(**options)
    for name in _ARRAYS:
        if len(options[name].shape) < 3 or tuple(options[name].shape[:-3]) != leading:
            raise invalid(
                name, f"shape {tuple(options[name].shape)}", "[..., length, heads, size] as query, key and value alike"
            )
    folded = {name: _folded(options[name], leading) for name in _ARRAYS}
    rows = {name: _folded_rows(name, options[name], leading) for name in _OF_ROWS if options.get(name) is not None}
    results = function(**{**options, **folded, **rows})
    return jax.tree.map(lambda array: array.reshape(*leading, *array.shape[1:]), results)


def _folded(array: Any, leading: tuple[int, ...]) -> Any:
    return array.reshape(math.prod(leading), *array.shape[-3:])


def _folded_rows(name: str, array: Any, leading: tuple[int, ...]) -> Any:
    """A mask or bias `[..., H|1, T|1, S|1]` as `[B|1, H|1, T|1, S|1]`."""
    axes = len(leading) + 3
    shape = (1,) * (axes - len(array.shape)) + tuple(array.shape)
    if len(shape) != axes or any(size not in (1, full) for size, full in zip(shape, leading, strict=False)):
        raise invalid(name, f"shape {tuple(array.shape)}", f"{leading}, or 1 each, before its last three axes")
    array = array.reshape(shape)
    if all(size == 1 for size in shape[:-3]):
        return array.reshape(1, *shape[-3:])
    return _folded(jnp.broadcast_to(array, (*leading, *shape[-3:])), leading)


def _dropout(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("dropout_rng") is None:
        raise invalid("dropout_rng", None, "a PRNG key beside dropout_rate, or deterministic=True")
    if options.get("dropout_prob") or options.get("dropout_seed") is not None:
        raise invalid("dropout_rate", given["dropout_rate"], "0.0 beside dropout_prob or dropout_seed")
    return {"dropout_prob": given["dropout_rate"], "dropout_seed": given["dropout_rng"]}
