"""The operations that the demo's model is built from: ejkernel's, and the same in plain JAX to compare with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_demo.model import Primitives, Shape

_THETA = 10000.0
_EPSILON = 1e-6


def ejkernel_primitives() -> Primitives:
    """Attention, norm and rotary embedding through ejkernel's dispatcher."""
    import ejkernel

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return ejkernel.flash_attention(query, key, value, causal=True)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return ejkernel.rms_norm(x, scale, epsilon=_EPSILON)

    def rotate(query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotate_at(query, key, jnp.arange(query.shape[1]))

    return Primitives(attention, norm, rotate)


def rotate_at(query: jax.Array, key: jax.Array, positions: Any) -> tuple[jax.Array, jax.Array]:
    """Rotary embedding of `q [B,T,H,D]` and `k [B,T,K,D]` at these positions `[T]`, through ejkernel's dispatcher."""
    import ejkernel

    cos, sin = ejkernel.LlamaRotaryEmbedding(query.shape[-1], _THETA)(positions[None])
    return ejkernel.llama_rope(query, key, cos=cos, sin=sin)


def explanations(shape: Shape, batch: int) -> list[Any]:
    """What dispatch says about the model's calls under the settings in force: one `Explanation` per operation."""
    import ejkernel

    def array(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    query = array(batch, shape.length, shape.heads, shape.head_size)
    key = array(batch, shape.length, shape.key_heads, shape.head_size)
    angles = array(1, shape.length, shape.head_size)
    return [
        ejkernel.explain("flash_attention", query, key, key, causal=True),
        ejkernel.explain("rms_norm", array(batch, shape.length, shape.width), array(shape.width), epsilon=_EPSILON),
        ejkernel.explain("llama_rope", query, key, cos=angles, sin=angles),
    ]


def serving_explanations(shape: Shape) -> list[Any]:
    """The same for what serving adds: attention over pages, and the update of the pages."""
    import ejkernel
    from ejkernel_demo.serve import Capacity

    room = Capacity()

    def array(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    new = array(room.tokens, shape.key_heads, shape.head_size)
    pages = array(room.pages, room.page_size, shape.key_heads, shape.head_size)
    described = (
        array(room.slots, dtype=jnp.int32),
        array(room.slots, -(-shape.length // room.page_size), dtype=jnp.int32),
        array(room.slots + 1, dtype=jnp.int32),
    )
    return [
        ejkernel.explain("paged_cache_update", new, new, pages, pages, *described),
        ejkernel.explain("unified_attention", array(room.tokens, shape.heads, shape.head_size), pages, pages, *described),
    ]


def plain_primitives() -> Primitives:
    """The same three written with `jax.nn` and `jax.numpy` alone."""

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    return Primitives(attention, _plain_norm, lambda query, key: (_plain_rotate(query), _plain_rotate(key)))


def _plain_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + _EPSILON) * scale[None, None]


def _plain_rotate(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    frequencies = _THETA ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1], dtype=frequencies.dtype)[None, :, None, None] * frequencies[None, None, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
