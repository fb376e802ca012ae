"""`ejkernel.callib`: plain `jax.jit` and lazily imported entry points for kernels."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import callib
from ejkernel.callib import _triton, cdiv, ejit

X = jnp.arange(4.0)


@pytest.fixture(autouse=True)
def nothing_kept() -> Any:
    _triton._jax_triton.cache_clear()
    yield
    _triton._jax_triton.cache_clear()


def test_bare_with_options_and_as_a_factory() -> None:
    @ejit
    def double(x):
        return 2 * x

    @ejit(static_argnames="power", static_argnums=(1,))
    def raised(x, power):
        return x**power if power > 1 else x

    np.testing.assert_array_equal(double(X), [0, 2, 4, 6])
    np.testing.assert_array_equal(raised(X, power=2), [0, 1, 4, 9])
    np.testing.assert_array_equal(raised(X, 3), [0, 1, 8, 27])
    np.testing.assert_array_equal(ejit(raised.__wrapped__, static_argnums=1)(X, 2), [0, 1, 4, 9])


def test_lowers_and_compiles() -> None:
    compiled = ejit(lambda x: x + 1).lower(X).compile()
    np.testing.assert_array_equal(compiled(X), [1, 2, 3, 4])
    assert "func.func public @main" in ejit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((2,), jnp.float32)).as_text()


def test_shardings_and_donation() -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    program = ejit(lambda x: x + 1, in_shardings=(sharding,), out_shardings=sharding, donate_argnums=(0,), keep_unused=True)
    given = X + 0
    text = program.lower(given).as_text()
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text
    assert program(given).sharding == sharding
    named = ejit(lambda *, x: x + 1, donate_argnames="x").lower(x=given + 0).as_text() if not given.is_deleted() else text
    assert "tf.aliasing_output" in named or "jax.buffer_donor" in named


def test_refusals() -> None:
    with pytest.raises(TypeError, match="fn: got 3, expected a function"):
        ejit(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="turbo"):
        ejit(lambda x: x, turbo=True)


def test_cdiv() -> None:
    assert [cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    np.testing.assert_array_equal(cdiv(jnp.array([7, 8]), 4), [2, 2])
    assert callib.next_power_of_2(5) == 8


def test_pallas_call_is_jaxs() -> None:
    from jax.experimental import pallas

    assert callib.pallas_call is pallas.pallas_call
    assert {*callib.__all__} <= {*dir(callib)}
    with pytest.raises(AttributeError, match="has no attribute 'cute_call'"):
        _ = callib.cute_call


def test_import_is_light(python: Any) -> None:
    assert python(
        "import sys, ejkernel.callib; print('jax.experimental.pallas' in sys.modules, 'jax_triton' in sys.modules)"
    ) == ("False False\n")


def test_triton_call_without_jax_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(ImportError, match="triton_call: jax_triton is not installed; pip install ejkernel-triton"):
        callib.triton_call(X, kernel=None, out_shape=X, grid=(1,))


def test_triton_call_passes_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    module: Any = types.ModuleType("jax_triton")
    module.triton_call = lambda *args, **options: seen.append((args, options)) or "result"
    monkeypatch.setitem(sys.modules, "jax_triton", module)
    assert callib.triton_call(1, 2, kernel="k", out_shape="o", grid=(3,), num_warps=4, BLOCK=8) == "result"
    assert seen == [((1, 2), {"kernel": "k", "out_shape": "o", "grid": (3,), "num_warps": 4, "BLOCK": 8})]


def test_importing_jax_triton_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "jax_triton.py").write_text(
        "import os\nos.environ['TRITON_CACHE_DIR'] = 'theirs'\ntriton_call = lambda **_: 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delitem(sys.modules, "jax_triton", raising=False)
    assert callib.triton_call(kernel=None, out_shape=None, grid=None) == 1
    assert os.environ["TRITON_CACHE_DIR"] == "mine"
    monkeypatch.delitem(sys.modules, "jax_triton")


def test_known_bad_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "_installed", lambda: {"jax": "0.12.0.1", "jax-triton": "0.4.1", "triton": "3.9.0"})
    with pytest.raises(ImportError, match=r"triton_call: .*; pip install"):
        callib.triton_call(kernel=None, out_shape=None, grid=None)
