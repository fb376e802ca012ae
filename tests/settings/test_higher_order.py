"""Derivatives for which there are no kernels: every public function names plain JAX code, eager and under jit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from public_calls import CALLS

DERIVATIVES = {
    "jvp": lambda loss, x: jax.jvp(loss, (x,), (x,)),
    "jacfwd": lambda loss, x: jax.jacfwd(loss)(x),
    "hessian": lambda loss, x: jax.hessian(loss)(x),
    "jit of hessian": lambda loss, x: jax.jit(jax.hessian(loss))(x),
    "hessian of jit": lambda loss, x: jax.hessian(jax.jit(loss))(x),
    "grad of grad": lambda loss, x: jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(x),
    "jit of grad of grad": lambda loss, x: jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x))))(x),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.differentiable])
def test_names_plain_jax_code(name: str, derivative: str) -> None:
    call = CALLS[name]
    arrays = call.in_dtype("float32")

    def loss(x: Any) -> Any:
        floating = [leaf for leaf in jax.tree.leaves(call.run({**arrays, call.floating[0]: x})) if has_gradient(leaf)]
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in floating)

    with pytest.raises(TypeError, match=r'^\w+: .* `with ejkernel\.use\("xla", custom_gradients=False\):`'):
        DERIVATIVES[derivative](loss, arrays[call.floating[0]])


def has_gradient(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
