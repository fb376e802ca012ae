"""Text from a trained model, drawn one byte at a time inside one compiled loop."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_demo.model import Parameters, Primitives, Shape, logits

PROMPT = "LOVE, n.  "


def sample(
    parameters: Parameters,
    shape: Shape,
    primitives: Primitives,
    *,
    seed: int,
    prompt: str = PROMPT,
    count: int = 240,
    temperature: float = 0.7,
) -> str:
    """Continue a prompt by `count` bytes; the context is the last `shape.length` bytes."""
    start = np.frombuffer(prompt.encode("ascii"), np.uint8).astype(np.int32)
    drawn = _draw(parameters, jnp.asarray(start), jax.random.key(seed), shape, primitives, count, temperature)
    return prompt + bytes(np.asarray(drawn, np.uint8)).decode("ascii", "replace")


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _draw(
    parameters: Parameters,
    start: jax.Array,
    key: jax.Array,
    shape: Shape,
    primitives: Primitives,
    count: int,
    temperature: float,
) -> jax.Array:
    """The context grows to the right until it is full, then slides; attention is causal, so what is beyond is never seen."""
    context = jnp.zeros(shape.length, jnp.int32).at[: len(start)].set(start)

    def step(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        context, used = carry
        scores = logits(parameters, context[None], shape, primitives)[0, used - 1]
        token = jax.random.categorical(key, scores / temperature).astype(jnp.int32)
        context = jnp.where(used == shape.length, jnp.roll(context, -1), context)
        position = jnp.minimum(used, shape.length - 1)
        return (context.at[position].set(token), position + 1), token

    return jax.lax.scan(step, (context, jnp.int32(len(start))), jax.random.split(key, count))[1]
