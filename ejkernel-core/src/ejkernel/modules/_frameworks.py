"""Keywords that neural-network libraries hand to an attention function.

Flax Linen looks at a function's signature and drops, without a word, what is not in it: a mask, dropout. So every function that
can stand in that place has these keywords in its signature, and honours them or refuses them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ejkernel._pipeline.arguments import REFUSED
from ejkernel.errors import invalid, wrong_type
from ejkernel.masks import MaskInfo

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


def honours_masks(function: Function) -> Function:
    """Give a function of query, key and value these keywords: masks and dropout join what it has for them."""

    def call(args: tuple[Any, ...], options: dict[str, Any], given: Mapping[str, Any]) -> Any:
        for name in (*_EINSUMS, "module"):
            if given.get(name) is not None:
                expected = f"None: {function.__name__} neither takes products nor stores weights"
                raise invalid(name, type(given[name]).__name__, expected)
        if given.get("mask") is not None:
            options["mask_info"] = _masked(given["mask"], options.get("mask_info"))
        if given.get("is_causal"):
            options["causal"] = True
        if given.get("dropout_rate") and not given.get("deterministic"):
            options |= _dropout(given, options)
        if given.get("dtype") is not None:
            args = tuple(array.astype(given["dtype"]) for array in args[:3]) + args[3:]
        return function(*args, **options)

    return _with_keywords(function, call, honoured=True)


def refuses_masks(remedy: str) -> Callable[[Function], Function]:
    """Give a function these keywords, of which it refuses all that ask for something."""

    def decorate(function: Function) -> Function:
        def call(args: tuple[Any, ...], options: dict[str, Any], given: Mapping[str, Any]) -> Any:
            idle = {"deterministic", "force_fp32_for_softmax"}
            if given.get("deterministic") or not given.get("dropout_rate"):
                idle |= {"dropout_rng", "dropout_rate", "broadcast_dropout"}
            if given.get("dtype") is not None and args and args[0].dtype == given["dtype"]:
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
    function: Function, call: Callable[[tuple[Any, ...], dict[str, Any], Mapping[str, Any]], Any], *, honoured: bool = False
) -> Function:
    """The function itself but for calls with one of the keywords that it does not have by itself."""
    signature = inspect.signature(function)
    added = {name: default for name, default in _KEYWORDS.items() if name not in signature.parameters}

    @functools.wraps(function)
    def with_keywords(*args: Any, **options: Any) -> Any:
        if added.keys().isdisjoint(options):
            return function(*args, **options)
        given = {name: options.pop(name) for name in added if name in options}
        return call(args, options, given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, keyword, default=default, annotation=Any) for name, default in added.items()]
    vars(with_keywords)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *more])
    if not honoured:
        vars(with_keywords)[REFUSED] = (*added,)
    return with_keywords  # pyright: ignore[reportReturnType]


def _masked(mask: Any, info: MaskInfo | None) -> MaskInfo:
    """A mask `[B|1, H|1, T|1, S|1]`, `[H|1, T|1, S|1]` or `[T|1, S|1]` of booleans or of 0 and 1, beside a `MaskInfo`."""
    if not hasattr(mask, "dtype") or not hasattr(mask, "shape"):
        raise wrong_type("mask", type(mask).__name__, "an array of booleans, or of 0 and 1")
    if jnp.issubdtype(mask.dtype, jnp.floating):  # as linen.make_causal_mask and its like make them
        if not isinstance(mask, Tracer) and not np.isin(np.asarray(mask), (0, 1)).all():
            raise invalid("mask", "other numbers", "0 for hidden and 1 for visible", remedy="pass additive values as bias")
        mask = mask != 0
    if not 2 <= len(mask.shape) <= 4:
        raise invalid("mask", f"shape {tuple(mask.shape)}", "[B or 1, H or 1, T or 1, S or 1], or its last two or three axes")
    dense = MaskInfo(dense=mask.reshape((1,) * (4 - len(mask.shape)) + tuple(mask.shape))).dense
    if info is None:
        return MaskInfo(dense=dense)
    return info.replace(dense=dense if info.dense is None else info.dense & dense)


def _dropout(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("dropout_rng") is None:
        raise invalid("dropout_rng", None, "a PRNG key beside dropout_rate, or deterministic=True")
    if given.get("broadcast_dropout"):
        remedy = "every weight is dropped by itself: set broadcast_dropout=False"
        raise invalid("broadcast_dropout", True, "False beside dropout_rate", remedy=remedy)
    if options.get("dropout_prob") or options.get("dropout_seed") is not None:
        raise invalid("dropout_rate", given["dropout_rate"], "0.0 beside dropout_prob or dropout_seed")
    return {"dropout_prob": given["dropout_rate"], "dropout_seed": given["dropout_rng"]}
