"""Cosines and sines of rotary position embeddings, from positions and a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.rotary.angles import per_position, reduced_angles
from ejkernel.operations.common.rotary.model_config import head_size_of, rotation_of_layer
from ejkernel.operations.common.rotary.scaling import axes_of_pairs, scaled_frequencies

__all__ = ["LlamaRotaryEmbedding"]


@runtime_checkable
class ModelConfig(Protocol):
    """What configs of transformers have."""

    def to_dict(self) -> dict[str, Any]: ...


class LlamaRotaryEmbedding:
    """Makes cos and sin for `llama_rope` from positions: pair i turns by `position * base^(-2i / dim)`, or as `scaling` says.

    Frequencies are float64 numbers. An angle is reduced to one turn in fixed point, 48 bits of a turn per position, before it is
    rounded to float32: cos and sin are within 1e-6 of float64 up to position 5e7, and within 3e-5 for every int32. (The float32
    product of position and frequency, which many models compute, is off by up to `position * 1e-7` radians, 1 at 10^7.)
    The exception is rope_type "dynamic" with a traced length beyond the limit, whose frequencies are float32.

    Attributes: `dim`, the number of rotated channels, for `rotary_dim=`; `frequencies` `[dim / 2]`, float32, radians per position
    (of short sequences); `attention_factor`, by which cos and sin are multiplied
    (of short sequences).
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        *,
        scaling: Mapping[str, Any] | None = None,
        max_position_embeddings: int | None = None,
        interleaved: bool = False,
        per_pair: bool = False,
    ) -> None:
        """
        Args:
            dim: number of rotated channels; even.
            base: ratio of the slowest to the fastest period, for dim channels.
            scaling: None or a mapping with `rope_type` (or `type`) and its fields, as in `rope_parameters` of public models:
                "default"; "linear" and "ntk": factor; "dynamic": factor, alpha (fixes the base); "llama3": factor, low_freq_factor,
                high_freq_factor, original_max_position_embeddings; "yarn": factor, original_max_position_embeddings, beta_fast,
                beta_slow, attention_factor, mscale, mscale_all_dim, truncate; "longrope": short_factor, long_factor, factor,
                original_max_position_embeddings, attention_factor, short_mscale, long_mscale; "proportional":
                partial_rotary_factor, factor.
                With any of them `mrope_section` (pairs per row of the positions) and `mrope_interleaved`.
            max_position_embeddings: length of the model, for types that need it and have no original length of their own.
            interleaved: repeat each number for neighbouring channels instead of for both halves, as `llama_rope(interleaved=True)`
                reads them.
            per_pair: one number per pair, which fits both kinds of pairs, and is half as much to read.

        Raises:
            ValueError: dim is not even and positive, base is not positive, or scaling has an unknown type, an unknown, missing or
                wrong field.

        Source: Su et al., RoFormer, 2021; scalings as in Hugging Face transformers 5.
        """
        if not isinstance(dim, int) or dim <= 0 or dim % 2:
            raise invalid("dim", dim, "an even number of channels > 0")
        if base <= 0:
            raise invalid("base", base, "a number > 0")
        for name, flag in (("interleaved", interleaved), ("per_pair", per_pair)):
            if not isinstance(flag, bool):
                raise wrong_type(name, repr(flag), "a bool")
        if interleaved and per_pair:
            raise invalid(
                "per_pair", True, "False with interleaved=True", remedy="one number per pair has no order of channels"
            )
        self.dim, self.interleaved, self.per_pair = dim, interleaved, per_pair
        self._scaled = scaled_frequencies(dim, base, scaling or {}, max_position_embeddings)
        self._axes = axes_of_pairs(scaling or {}, dim // 2)
        self.frequencies = self._scaled.short.astype(np.float32)
        self.attention_factor = self._scaled.attention_factor
        self._described = f"dim={dim}, base={base:g}, scaling={dict(scaling or {})}"

    def __repr__(self) -> str:
        order = ", interleaved=True" if self.interleaved else ", per_pair=True" if self.per_pair else ""
        return f"LlamaRotaryEmbedding({self._described}{order})"

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | ModelConfig,
        *,
        head_size: int | None = None,
        layer_type: str | None = None,
        interleaved: bool = False,
        per_pair: bool = False,
    ) -> LlamaRotaryEmbedding:
        """The embedding that a model's configuration describes.

        Args:
            config: the mapping in a model's `config.json`, or a config of transformers. Read are `rope_parameters`, or `rope_theta`
                (`rotary_emb_base`) and `rope_scaling`; `partial_rotary_factor` (`rotary_pct`, `rotary_dim`),
                `max_position_embeddings`, `original_max_position_embeddings`, `rope_local_base_freq` (`swa_rope_theta`), sizes of
                heads.
            head_size: channels of a head, of which `partial_rotary_factor` are rotated. None = `head_dim` or `hidden_size /
                num_attention_heads`; `qk_rope_head_dim` and `rotary_dim` are numbers of rotated channels.
            layer_type: which of several rotations, e.g. "full_attention" or "sliding_attention" of Gemma 3.
            interleaved: as in the constructor.
            per_pair: as in the constructor.

        Returns:
            The embedding; pass its `dim` as `rotary_dim`.

        Raises:
            TypeError: config is neither.
            ValueError: something needed is missing, or as in the constructor.
        """
        if isinstance(config, ModelConfig):
            config = config.to_dict()
        if not isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong_type("config", type(config).__name__, "a mapping or a config of transformers")
        scaling, base = rotation_of_layer(config, layer_type)
        fraction = scaling.pop("partial_rotary_factor", None)
        fraction = next(
            (f for f in (fraction, config.get("partial_rotary_factor"), config.get("rotary_pct")) if f is not None), 1.0
        )
        counts = () if head_size else (config.get("qk_rope_head_dim"), config.get("rotary_dim"))
        dim = next((count for count in counts if count is not None), None)  # already the rotated part
        if dim is None:
            dim = head_size or head_size_of(config, layer_type)
            if scaling.get("rope_type") == "proportional":  # has frequencies for all channels, zeros among them
                scaling["partial_rotary_factor"] = fraction
            else:
                dim = int(dim * fraction)
        original = "original_max_position_embeddings"
        if scaling.get("rope_type") in ("yarn", "longrope", "llama3", "su") and config.get(original) is not None:
            scaling[original] = config[original]
        length = config.get("max_position_embeddings")
        return cls(dim, base, scaling=scaling, max_position_embeddings=length, interleaved=interleaved, per_pair=per_pair)

    def __call__(self, position_ids: jax.Array, length: jax.Array | int | None = None) -> tuple[jax.Array, jax.Array]:
        """cos and sin of positions.

        Args:
            position_ids: integers or floating numbers `[B,T]` or `[T]`, within int32; negative ones too. With `mrope_section` one
                row per section more, `[3,B,T]` or `[3,T]` (time, height, width); repeat the positions of text.
            length: of the sequence, for "dynamic" and "longrope", whose frequencies depend on it; may be traced.
                None = the largest position + 1.

        Returns:
            cos and sin, float32, `[B,T,dim]` or `[T,dim]`, one number per channel; with per_pair `[B,T,dim / 2]` or `[T,dim / 2]`.

        Raises:
            TypeError: positions are not numbers.
            ValueError: positions do not have a row per section.
        """
        position_ids = jnp.asarray(position_ids)
        if not jnp.issubdtype(position_ids.dtype, jnp.integer) and not jnp.issubdtype(position_ids.dtype, jnp.floating):
            raise wrong_type("position_ids", f"dtype {position_ids.dtype}", "integers or floating numbers")
        angles = self._angles(position_ids, length)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        factor = self._attention_factor(position_ids, length)
        if factor is not None:
            cos, sin = cos * factor, sin * factor
        return self._per_channel(cos), self._per_channel(sin)

    def _attention_factor(self, positions: jax.Array, length: Any) -> Any:
        """What multiplies cos and sin; None for 1."""
        short, long = self.attention_factor, self._scaled.long_attention_factor
        if long is None:
            return None if short == 1 else np.float32(short)
        assert self._scaled.limit is not None
        length = jnp.max(positions, initial=0) + 1 if length is None else length
        return jnp.where(jnp.asarray(length > self._scaled.limit), np.float32(long), np.float32(short))

    def _per_channel(self, table: jax.Array) -> jax.Array:
        if self.per_pair:
            return table
        return jnp.repeat(table, 2, axis=-1) if self.interleaved else jnp.concatenate([table, table], axis=-1)

    def _angles(self, positions: jax.Array, length: Any) -> jax.Array:
        scaled = self._scaled
        of_pairs = self._positions_of_pairs(positions)
        if scaled.limit is None:
            return reduced_angles(of_pairs, *per_position(scaled.short))
        if length is None:
            length = jnp.max(positions, initial=0) + 1
        known = None if isinstance(length, Tracer) else float(length)
        if scaled.long is not None:
            is_long = jnp.asarray(length > scaled.limit)
            tables = zip(per_position(scaled.long), per_position(scaled.short), strict=True)
            return reduced_angles(of_pairs, *(jnp.where(is_long, long, short) for long, short in tables))
        exponents = -np.arange(0, self.dim, 2) / (self.dim - 2)
        if known is not None:
            return reduced_angles(of_pairs, *per_position(scaled.short * max(scaled.stretch(known), 1.0) ** exponents))
        stretch = jnp.maximum(scaled.stretch(jnp.asarray(length).astype(jnp.float32)), 1)
        inside = reduced_angles(of_pairs, *per_position(scaled.short))
        frequencies = self.frequencies * stretch ** exponents.astype(np.float32)
        beyond = of_pairs.astype(jnp.float32) * frequencies.reshape((1,) * (of_pairs.ndim - 1) + (-1,))
        return jnp.where(stretch > 1, beyond, inside)

    def _positions_of_pairs(self, positions: jax.Array) -> jax.Array:
        """`[..., 1 or dim / 2]`"""
        if self._axes is None:
            return positions[..., None]
        rows = int(self._axes.max()) + 1
        if positions.ndim < 2 or positions.shape[0] != rows:
            remedy = f"jnp.broadcast_to(positions, ({rows}, *positions.shape)) for text"
            raise invalid(
                "position_ids", f"shape {positions.shape}", f"[{rows},B,T] or [{rows},T], for mrope_section", remedy=remedy
            )
        return jnp.moveaxis(positions, 0, -1)[..., self._axes]
