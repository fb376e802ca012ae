"""A chunk one token at a time. It does less arithmetic than the chunk's matmuls, which pays on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_xla.linear_recurrence.chunk import Chunk, Shared, Tokens


class TokenByToken(Chunk):
    """The arithmetic of `Chunk`, in the order of the recurrence."""

    def run(self, state: Any, tokens: Tokens, shared: Shared, valid: Any) -> tuple[Any, Any]:
        def step(state: Any, token: tuple[Any, ...]) -> tuple[Any, Any]:
            query, key, value, *decays = token
            after = self._next(state, key, value, decays)
            if shared.bonus is None:
                return after, self.dot("xkrd,xkrdv->xkrv", query, after)
            own = jnp.sum(query * key * shared.bonus, axis=-1)[..., None] * value
            return after, self.dot("xkrd,xkrdv->xkrv", query, state) + own

        arrays = (tokens.query * self.call.softmax_scale, tokens.key, tokens.value, *self._factors(tokens, shared, valid))
        state, out = jax.lax.scan(step, state, jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), arrays))
        return state, jnp.moveaxis(out, 0, 1)

    def advance(self, state: Any, tokens: Tokens, shared: Shared, valid: Any) -> Any:
        def step(state: Any, token: tuple[Any, ...]) -> tuple[Any, None]:
            key, value, *decays = token
            return self._next(state, key, value, decays), None

        arrays = (tokens.key, tokens.value, *self._factors(tokens, shared, valid))
        return jax.lax.scan(step, state, jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), arrays))[0]

    def _factors(self, tokens: Tokens, shared: Shared, valid: Any) -> tuple[Any, Any]:
        """What is left of the state per token: `[x,i,k,r,d,1]`, and `[x,i,k,r,1,v]`; None where nothing is lost."""
        logs = self._logs(tokens, shared, valid)
        rows, columns = (None if log is None else jnp.exp(log) for log in (logs.key, logs.value))
        if logs.scalar is not None:
            rows = jnp.exp(logs.scalar)[..., None]
        return None if rows is None else rows[..., None], None if columns is None else columns[..., None, :]

    def _next(self, state: Any, key: Any, value: Any, decays: list[Any]) -> Any:
        for factor in decays:
            state = state if factor is None else state * factor
        return state + key[..., None] * value[..., None, :]
