"""Frequencies of rotary position embeddings as public model configurations describe them; float64, outside of programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ejkernel.errors import invalid, wrong_type

_ALIASES = {"mrope": "default", "su": "longrope"}
_ORIGINAL = "original_max_position_embeddings"
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "dynamic": ("alpha",),
    "yarn": (
        "factor",
        _ORIGINAL,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    ),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_mscale", "long_mscale"),
    "llama3": (_ORIGINAL,),
    "proportional": ("factor", "partial_rotary_factor"),
}
_BESIDE_ALPHA = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Fields that HunYuan's models have and do not read."""
_EVERYWHERE = ("mrope_section", "mrope_interleaved")
_FLAGS = ("truncate", "finetuned", "mrope_interleaved")
_LISTS = ("short_factor", "long_factor", "mrope_section")


class Frequencies(NamedTuple):
    """`short` `[pairs]`, radians per position; for sequences longer than `limit`, `long`, or `short` at a base that grows.

    So for cos and sin: they are multiplied by `attention_factor`, beyond the limit by `long_attention_factor` unless that is None.
    """

    short: np.ndarray
    attention_factor: float = 1.0
    limit: int | None = None
    long: np.ndarray | None = None
    growth: float = 1.0
    long_attention_factor: float | None = None

    def stretch(self, length: Any) -> Any:
        """By how much NTK scaling stretches the slowest period at this length beyond `limit`; a traced length is fine."""
        assert self.limit is not None
        return self.growth * length / self.limit - (self.growth - 1)


def scaled_frequencies(dim: int, base: float, scaling: Mapping[str, Any], max_length: int | None) -> Frequencies:
    """Frequencies of `dim / 2` pairs. Errors name `scaling` and the field."""
    kind, fields = _checked(scaling)
    plain = frequencies_of(dim, base)
    factor: Any = fields.get("factor")
    if kind == "linear":
        return Frequencies(plain / factor)
    if kind == "proportional":
        turning = int(fields.get("partial_rotary_factor", 1.0) * dim // 2)
        return Frequencies(np.where(np.arange(dim // 2) < turning, plain, 0) / (factor or 1.0))
    if kind in ("ntk", "dynamic"):
        if dim == 2:
            raise invalid("dim", dim, f"at least 4 with rope_type {kind!r}")
        if kind == "ntk" or "alpha" in fields:
            return Frequencies(frequencies_of(dim, base * fields.get("alpha", factor) ** (dim / (dim - 2))))
        return Frequencies(plain, limit=_length("max_position_embeddings", max_length), growth=factor)
    if kind == "default":
        return Frequencies(plain)
    original = _length(_ORIGINAL, fields.get(_ORIGINAL, max_length))
    if kind == "llama3":
        return Frequencies(_llama3(plain, fields, original))
    if factor is None:
        factor = _length("max_position_embeddings", max_length, "or factor in scaling") / original
    return (_yarn if kind == "yarn" else _longrope)(dim, base, fields, original, factor)


def frequencies_of(dim: int, base: float) -> np.ndarray:
    return float(base) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def axes_of_pairs(scaling: Mapping[str, Any], pairs: int) -> np.ndarray | None:
    """Which row of the positions turns each pair `[pairs]`; None if positions have one number per token."""
    sections: Sequence[int] | None = scaling.get("mrope_section")
    if sections is None:
        return None
    if any(not isinstance(count, int) for count in sections) or sum(sections) != pairs:
        raise invalid(
            "scaling", f"mrope_section {list(sections)}", f"integers that add up to {pairs}, half of the rotated channels"
        )
    count = len(sections)
    if not scaling.get("mrope_interleaved", False):
        return np.repeat(np.arange(count), sections)
    axes = np.arange(pairs) % count
    return np.where(np.arange(pairs) < count * np.asarray(sections)[axes], axes, 0)


def _checked(scaling: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    named = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = _ALIASES.get(named, named)
    if kind not in _REQUIRED:
        raise invalid("scaling", f"rope_type {named!r}", f"one of {', '.join(_REQUIRED)}")
    fields = {name: value for name, value in scaling.items() if name not in ("rope_type", "type") and value is not None}
    known = (*_REQUIRED[kind], *_OPTIONAL.get(kind, ()), *(_BESIDE_ALPHA if "alpha" in fields else ()), *_EVERYWHERE)
    unknown, missing = sorted(set(fields) - set(known)), [name for name in _REQUIRED[kind] if name not in fields]
    if unknown:
        remedy = "leave it out if it does not change the rotation"
        raise invalid("scaling", f"{', '.join(unknown)} with rope_type {named!r}", f"only {', '.join(known)}", remedy=remedy)
    if missing:
        raise invalid("scaling", f"rope_type {named!r} without {', '.join(missing)}", "that too")
    for name, value in fields.items():
        if name in _FLAGS:
            if not isinstance(value, bool):
                raise wrong_type(f"scaling[{name!r}]", repr(value), "a bool")
        elif name in _LISTS:
            if not isinstance(value, (list, tuple, np.ndarray)) or not all(_positive(one) for one in value):
                raise invalid(f"scaling[{name!r}]", value, "a list of numbers > 0")
        elif not _positive(value) and not (name.startswith("mscale") and value == 0):  # mscale 0 stands for None
            raise invalid(f"scaling[{name!r}]", value, "a number > 0")
    return kind, fields


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and bool(0 < value < math.inf)


def _length(name: str, value: Any, alternative: str = "") -> int:
    if not _positive(value):
        raise invalid(name, value, "the number of positions that the model was trained for", remedy=alternative)
    return value


def _llama3(plain: np.ndarray, fields: Mapping[str, Any], original: int) -> np.ndarray:
    """Periods that fit in the original length less than `low` times are stretched, those more than `high` times kept."""
    low, high = fields["low_freq_factor"], fields["high_freq_factor"]
    if low > high:
        raise invalid("scaling", f"low_freq_factor {low} and high_freq_factor {high}", "the first not above the second")
    turns = original * plain / (2 * math.pi)
    # Where both factors are one number, as in Llama 4, there is a step and no ramp.
    kept = np.where(turns >= high, 1, np.clip((turns - low) / (high - low or 1), 0, 1))
    return plain * (kept + (1 - kept) / fields["factor"])


def _yarn(dim: int, base: float, fields: Mapping[str, Any], original: int, factor: float) -> Frequencies:
    """Peng et al., YaRN, 2023, section 3.2: a ramp over the pairs between `beta_fast` and `beta_slow` turns; and 3.4."""

    def pair_of(turns: float) -> float:  # which pair makes so many turns within the original length
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

    first, last = pair_of(fields.get("beta_fast", 32)), pair_of(fields.get("beta_slow", 1))
    if fields.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 1e-3  # a step where both are one pair
    stretched = np.clip((np.arange(dim // 2) - first) / width, 0, 1)

    def growth(weight: float) -> float:
        return 1 + 0.1 * weight * math.log(max(factor, 1))

    attention_factor = fields.get("attention_factor")
    if attention_factor is None:
        mscale, over_all = fields.get("mscale"), fields.get("mscale_all_dim")
        attention_factor = growth(mscale) / growth(over_all) if mscale and over_all else growth(1)
    return Frequencies(frequencies_of(dim, base) * (1 - stretched + stretched / factor), attention_factor)


def _longrope(dim: int, base: float, fields: Mapping[str, Any], original: int, factor: float) -> Frequencies:
    """Ding et al., LongRoPE, 2024: a factor per pair, others beyond the original length."""
    tables: list[np.ndarray] = []
    for name in ("short_factor", "long_factor"):
        if len(fields[name]) != dim // 2:
            raise invalid(f"scaling[{name!r}]", f"{len(fields[name])} numbers", f"{dim // 2}, one per pair")
        tables.append(frequencies_of(dim, base) / np.asarray(fields[name], np.float64))
    attention_factor = fields.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(max(factor, 1)) / math.log(original))
    short, long = (fields.get(name, attention_factor) for name in ("short_mscale", "long_mscale"))  # PhiMoE
    return Frequencies(tables[0], short, original, tables[1], long_attention_factor=None if long == short else long)
