"""Warnings name the line of the caller, however deep they come from and whatever JAX traces in between."""

from __future__ import annotations

import ast
import inspect
import itertools
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel._dispatch import execution
from ejkernel.errors import CacheWarning, EjkernelWarning, FallbackWarning
from ejkernel.utils import warn_once as _warn

X = jnp.ones((2, 8))
Q = jnp.ones((1, 4, 2, 8))
ROOT = Path(__file__).parents[2]


def line() -> int:
    """The line that this is called from."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


@pytest.fixture
def seen(monkeypatch):
    """What was warned of, each time anew."""
    monkeypatch.setattr(_warn, "_said", set())
    monkeypatch.setattr(execution, "_warned", set())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def check(seen, at: int, category: type[Warning], text: str) -> None:
    (only,) = seen
    assert issubclass(only.category, category) and text in str(only.message), only
    assert (only.filename, only.lineno) == (__file__, at)


RATES = (n / 1000 for n in itertools.count(1))
"""A program is traced once, so that each test has one of its own."""


def test_eager(seen):
    at, _ = line(), ejkernel.flash_attention(Q, Q, Q, dropout_prob=next(RATES))
    check(seen, at, EjkernelWarning, "dropout_prob: without dropout_seed it drops the same entries at every call")


def test_of_code_that_is_no_module(seen):
    """Its globals have no name."""
    code = compile("\n\nattend(q, q, q, dropout_prob=rate)", "<typed>", "exec")
    exec(code, {"attend": ejkernel.flash_attention, "q": Q, "rate": next(RATES)})
    assert [(one.filename, one.lineno) for one in seen] == [("<typed>", 3)]


def test_of_an_executor_and_a_class(seen):
    at, _ = line(), ejkernel.Executor()(ejkernel.FlashAttention(), Q, Q, Q, dropout_prob=next(RATES))
    check(seen, at, EjkernelWarning, "without dropout_seed")


def test_of_an_explanation(seen):
    at, _ = line(), ejkernel.explain("flash_attention", Q, Q, Q, dropout_prob=next(RATES))
    check(seen, at, EjkernelWarning, "without dropout_seed")


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, lambda f: jax.jit(jax.grad(f)), jax.checkpoint])
def test_under_transformations(seen, transform):
    rate = next(RATES)

    def loss(q):
        return ejkernel.flash_attention(q, q, q, dropout_prob=rate).sum()

    transform(loss)(Q[None] if transform is jax.vmap else Q)
    check(seen, loss.__code__.co_firstlineno + 1, EjkernelWarning, "without dropout_seed")


def test_fallback(seen, registered):
    registered("faulty", supports=lambda call, target: {}["table"], priority=10)
    at, _ = line(), ejkernel.rms_norm(X, epsilon=1e-4)
    check(seen, at, FallbackWarning, "runs on xla: faulty: supports() raised KeyError")


def test_cache(seen, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file"))
    at, _ = line(), ejkernel.rms_norm(X, epsilon=1e-3)
    assert seen, "nothing was warned of"
    check(seen[:1], at, CacheWarning, "cannot be read")


def test_former_positions_and_paths(seen):
    at, _ = line(), ejkernel.flash_attention(Q, Q, Q, jnp.zeros((4, 4)))
    check(seen, at, DeprecationWarning, "flash_attention: pass bias= by name")
    seen.clear()
    at, former = line(), ejkernel.kernels._xla.flash_attention
    check(seen, at, DeprecationWarning, "is now ejkernel.flash_attention")
    seen.clear()
    at, _ = line(), former(Q, Q, Q, jnp.zeros((4, 4)))
    check(seen, at, DeprecationWarning, "flash_attention: pass bias= by name")
    seen.clear()
    at, _ = line(), ejkernel.kernels.kernel_registry
    check(seen, at, DeprecationWarning, "ejkernel.kernel_registry")


def test_one_query_at_the_first_key(seen):
    at, _ = line(), ejkernel.flash_attention(Q[:, :1], Q, Q, causal=True)
    check(seen, at, EjkernelWarning, "causal_alignment='bottom_right'")
    ejkernel.flash_attention(Q[:, :1], Q, Q, causal=True, softmax_scale=0.5)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"causal_alignment": "top_left"},
        {"causal_alignment": "bottom_right"},
        {"mask_info": ejkernel.MaskInfo(causal_offset=3)},
        {"mask_info": ejkernel.MaskInfo(query_positions=np.array([[3]]))},
        {"mask_info": ejkernel.MaskInfo(causal=True, prefix=3), "causal": False},
        {"causal": False},
    ],
    ids=str,
)
def test_a_query_whose_place_was_said_is_not_warned_of(seen, options):
    ejkernel.flash_attention(Q[:, :1], Q, Q, **{"causal": True, **options})
    ejkernel.flash_attention(Q[:, :1], Q[:, :1], Q[:, :1], causal=True)
    ejkernel.flash_attention(Q[:, :2], Q, Q, causal=True)
    assert not seen


SOURCES = [path for source in ROOT.glob("ejkernel-*/src") for path in source.rglob("*.py")]


def test_nothing_warns_by_another_way():
    """`errors.warn` alone finds the caller's line."""
    assert len(SOURCES) > 300
    found = [
        f"{path}:{node.lineno}"
        for path in SOURCES
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit") and ast.unparse(node.value) == "warnings"
    ]
    assert not found
