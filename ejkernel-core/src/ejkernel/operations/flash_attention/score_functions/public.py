"""Score functions of a public call, before it is compiled."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.operations.flash_attention.score_functions.functions import Functions, indices_of
from ejkernel.operations.flash_attention.score_functions.named import check_named

_NAMED = ("alibi_slopes", "forget_gate")


def traced_before(arrays: dict[str, Any], options: dict[str, Any], *, split: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and options of a public call with its functions as data: arrays that they close over may be traced by the caller.

    If devices `split` the call, the indices of its rows and heads are arrays too, so that every device is told those of the whole.
    """
    score_mod, mask_mod = options["score_mod"], options["mask_mod"]
    named = {name: arrays.get(name) for name in _NAMED}
    mod_inputs = arrays.pop("mod_inputs", None)
    if all(given is None for given in (score_mod, mask_mod, *named.values(), mod_inputs)):
        return arrays, options
    if split:
        shape = arrays["query"].shape
        batch, heads = (shape[0] if len(shape) == 4 else 1), shape[-2]
        check_named(batch, heads, arrays["key"].shape[-3], **named)
        arrays |= indices_of(batch, heads)
    dtypes = [jax.dtypes.canonicalize_dtype(arrays[name].dtype) for name in ("query", "key", "value")]
    traced = Functions.of(score_mod, mask_mod, mod_inputs, max(dtypes, key=lambda dtype: dtype.itemsize))
    numbers = {"mod_values": traced.values, "mod_integers": traced.integers}
    arrays |= {name: array for name, array in numbers.items() if array is not None}
    return arrays, {**options, "score_mod": traced.score_mod, "mask_mod": traced.mask_mod}
