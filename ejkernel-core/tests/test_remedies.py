"""Refusals that come out of JAX's own machinery name the argument and what to do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel import NoKernelError

X = jnp.linspace(-1.0, 2.0, 32).reshape(4, 8)
PLAIN = r'with ejkernel\.use\("xla", custom_gradients=False\)'


def loss(x):
    return (ejkernel.rms_norm(x) ** 2 * jnp.arange(8.0)[None]).sum()


SECOND_ORDER = {
    "grad of grad": lambda x: jax.grad(lambda x: jax.grad(loss)(x).sum())(x),
    "hessian": lambda x: jax.hessian(loss)(x),
    "reverse over reverse": lambda x: jax.jacrev(jax.jacrev(loss))(x),
    "hessian under jit": lambda x: jax.jit(jax.hessian(loss))(x),
    "hessian of jit": lambda x: jax.hessian(jax.jit(loss))(x),
    "under vmap": lambda x: jax.vmap(jax.hessian(loss))(x[None]),
    "jvp": lambda x: jax.jvp(loss, (x,), (x,))[1],
    "jacfwd": lambda x: jax.jacfwd(loss)(x),
}


@pytest.mark.parametrize("derivative", SECOND_ORDER.values(), ids=SECOND_ORDER)
def test_higher_derivatives_name_plain_jax_code(derivative):
    with pytest.raises(TypeError, match=rf"^rms_norm: .*{PLAIN}"):
        derivative(X)
    with ejkernel.use("xla", custom_gradients=False):
        found = derivative(X)
    assert jnp.isfinite(found).all()
    assert jnp.abs(found).max() > 0


@pytest.mark.parametrize("function", [ejkernel.rms_norm, ejkernel.layer_norm])
def test_plain_jax_code_of_norms_has_finite_derivatives(function):
    """Rows of a mean square near 1 and 0.01: nothing that is squared for range may overflow in a derivative."""

    def total(x):
        return (function(x) ** 2 * jnp.arange(8.0)[None]).sum()

    expected = jax.grad(total)(X)
    with ejkernel.use("xla", custom_gradients=False):
        assert jnp.allclose(jax.grad(total)(X), expected, atol=1e-4)
        assert jnp.allclose(jax.jvp(total, (X,), (X,))[1], (expected * X).sum(), atol=1e-3)
        assert jnp.isfinite(jax.hessian(total)(X)).all()


def test_first_derivatives_under_every_transform_are_as_before():
    expected = jax.grad(loss)(X)
    assert jnp.allclose(jax.jit(jax.grad(loss))(X), expected, atol=1e-6)
    assert jnp.allclose(jax.vmap(jax.grad(loss))(X[None])[0], expected, atol=1e-6)
    assert jnp.allclose(jax.grad(jax.checkpoint(loss))(X), expected, atol=1e-6)
    assert jnp.allclose(jax.linearize(jax.grad(lambda s: (s * loss(X)).sum()), 2.0)[0], loss(X), rtol=1e-6)


class Tensor:
    """What another framework's tensor looks like from here."""

    def __init__(self, *shape):
        self.shape, self.ndim, self.dtype = shape, len(shape), "torch.float32"


class Exchanged(Tensor):
    def __dlpack__(self, **options):
        raise NotImplementedError


CALLS = {
    "one array": (lambda q, t: ejkernel.rms_norm(t), "x"),
    "second": (lambda q, t: ejkernel.rms_norm(q, t), "scale"),
    "third": (lambda q, t: ejkernel.flash_attention(q, q, t), "value"),
    "explain": (lambda q, t: ejkernel.explain("rms_norm", t), "x"),
}


@pytest.mark.parametrize(("call", "argument"), CALLS.values(), ids=CALLS)
def test_tensors_of_other_frameworks_are_named(call, argument):
    q = jnp.ones((1, 4, 2, 8))
    for tensor, remedy in ((Tensor(1, 4, 2, 8), "numpy.asarray"), (Exchanged(1, 4, 2, 8), "jax.dlpack.from_dlpack")):
        said = rf"^{argument}: got [\w.-]+\.{type(tensor).__name__}, expected an array of JAX or NumPy"
        with pytest.raises(TypeError, match=rf"{said}; convert it, for example by {remedy}"):
            call(q, tensor)


@pytest.mark.parametrize("platform", ["elsewhere", ("elsewhere", "nowhere")])
def test_a_platform_of_another_device_says_how_to_lower_for_it(registered, platform):
    registered("elsewhere", backend="gpu")
    registered("nowhere", backend="gpu")
    function = jax.jit(lambda x: ejkernel.rms_norm(x, platform=platform))
    with pytest.raises(NoKernelError, match=r"is dispatched for cpu.*`with ejkernel\.use\(target='gpu:9\.0'\):`"):
        function.trace(X).lower(lowering_platforms=("cuda",))
    with ejkernel.use(target="gpu:9.0"):
        function.trace(X)
    with ejkernel.use(target="tpu"), pytest.raises(NoKernelError) as told:
        function.trace(X)
    assert "dispatched for" not in str(told.value)


@pytest.mark.parametrize("precision", ["ultra", 3, ("high",)])
def test_unknown_precision_of_latent_attention(precision):
    arrays = [jnp.ones(shape) for shape in ((1, 4, 2, 8), (1, 4, 16), (16, 2, 8), (16, 2, 8))]
    with pytest.raises((ValueError, TypeError), match=r"^precision: got .*, expected None"):
        ejkernel.flash_mla(*arrays, precision=precision)
