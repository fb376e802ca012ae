"""`ejkernel.ops.Kernel`: an operation of one's own, and every tier that answers for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import tuning
from ejkernel.errors import CacheWarning, NoConfigError, NoTunerError
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    overlay_cache,
    policy_override,
)

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("world")]

X = jnp.arange(6.0).reshape(2, 3)


@dataclasses.dataclass(frozen=True)
class Blocks:
    rows: int = 8

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows: got {self.rows}, expected a value >= 1")


@dataclasses.dataclass(frozen=True)
class Other:
    rows: int = 8


class Scaled(Kernel[Blocks, jax.Array]):
    """`factor * x`; notes the configs that it ran with."""

    def __init__(self, op_id: str | None = None) -> None:
        super().__init__(op_id)
        self.seen: list[Any] = []

    def prepare(self, x: Any, *, factor: float = 2.0) -> Any:
        return (jnp.asarray(x),), {"factor": factor}

    def run(self, x: jax.Array, *, cfg: Blocks, factor: float) -> jax.Array:
        self.seen.append(cfg)
        return factor * x

    def heuristic_cfg(self, inv: Invocation) -> Blocks:
        return Blocks(inv.args[0].shape[0])


class OwnGradient(Scaled):
    """Its gradient is ten times the true one, so that it shows."""

    def fwd_with_residuals(self, x: jax.Array, *, cfg: Blocks, factor: float) -> Any:
        return self.run(x, cfg=cfg, factor=factor), factor

    def vjp(self, residuals: Any, y: Any, dy: Any, *args: Any, cfg: Blocks, **kwargs: Any) -> Any:
        assert kwargs == {"factor": residuals}
        assert args[0].shape == y.shape == dy.shape
        return (10 * residuals * dy,)


@pytest.fixture
def kernel() -> Scaled:
    return Scaled("scaled")


def entry_of(kernel: Any, rows: int, x: Any = X, **kwargs: Any) -> tuning.Entry:
    key = Invocation.of(kernel, x, **kwargs).key()
    return tuning.Entry(key, {"rows": rows}, check=tuning.Check(True, 0.5))


def test_result_and_heuristic(kernel: Scaled) -> None:
    np.testing.assert_array_equal(kernel(X, factor=3.0), 3 * X)
    assert kernel.seen == [Blocks(2)]
    assert list(kernel.candidate_cfgs(Invocation.of(kernel, X))) == [Blocks(2)]


def test_executor_runs_it_with_and_without_a_chooser(kernel: Scaled) -> None:
    np.testing.assert_array_equal(Executor()(kernel, X), 2 * X)
    np.testing.assert_array_equal(Executor(ConfigSelectorChain())(kernel, X, cfg=Blocks(5), factor=4.0), 4 * X)
    assert kernel.seen == [Blocks(2), Blocks(5)]


def test_gradients_of_jax_and_own(kernel: Scaled) -> None:
    np.testing.assert_array_equal(jax.grad(lambda x: kernel(x, factor=3.0).sum())(X), np.full((2, 3), 3.0))
    own = OwnGradient("own")
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: own(x, factor=3.0).sum()))(X), np.full((2, 3), 30.0))


def test_half_a_gradient_is_refused() -> None:
    class Half(Scaled):
        def vjp(self, residuals: Any, y: Any, dy: Any, *args: Any, cfg: Any, **kwargs: Any) -> Any:
            return (dy,)

    with pytest.raises(ValueError, match="Half: got one of fwd_with_residuals and vjp, expected both, or neither"):
        Half()(X)


@pytest.mark.parametrize("name", ["rms_norm", "a/b", "a:b"])
def test_names_that_are_taken_or_ambiguous(name: str) -> None:
    with pytest.raises(ValueError, match="op_id"):
        Scaled(name)


def test_override(kernel: Scaled) -> None:
    kernel(X, cfg=Blocks(3))
    kernel(X, cfg={"rows": 4})
    assert kernel.seen == [Blocks(3), Blocks(4)]
    with pytest.raises(TypeError, match=r"cfg: got Other\(rows=8\), expected Blocks, or a mapping of its fields"):
        kernel(X, cfg=Other())
    with pytest.raises(ValueError, match="unknown knob 'row'"):
        kernel(X, cfg={"row": 4})
    with pytest.raises(ValueError, match="rows: got -1"):
        kernel(X, cfg={"rows": -1})


def test_tiers_in_order(kernel: Scaled) -> None:
    chain, inv = ConfigSelectorChain(), Invocation.of(kernel, X)
    assert chain.select(inv) == tuning.Selected(Blocks(2), "heuristic")
    PersistentCache().put(entry_of(kernel, 10))
    assert chain.select(inv) == tuning.Selected(Blocks(10), "user cache")
    ConfigCache().put(entry_of(kernel, 11))
    assert chain.select(inv) == tuning.Selected(Blocks(11), "memory")
    with overlay_cache({kernel: {"rows": 12}}):
        assert chain.select(inv) == tuning.Selected(Blocks(12), "overlay")
        with overlay_cache({inv: Blocks(13)}):
            assert chain.choose(inv) == Blocks(13)
            over = Invocation.of(kernel, X, cfg=Blocks(14))
            assert chain.select(over) == tuning.Selected(Blocks(14), "override")
    ConfigCache().clear()
    assert chain.choose(inv) == Blocks(10)


def test_entries_are_of_one_call_and_version(kernel: Scaled) -> None:
    ConfigCache().put(entry_of(kernel, 11))
    kernel(X)
    kernel(X[:1])
    kernel(X, factor=5.0)
    kernel(X.astype(jnp.float16))
    assert [config.rows for config in kernel.seen] == [11, 1, 2, 2]
    newer = type("Newer", (Scaled,), {"version": 2})("scaled")
    newer(X)
    assert newer.seen == [Blocks(2)]


def test_compiled_program_is_traced_again(kernel: Scaled) -> None:
    program = jax.jit(lambda x: kernel(x))
    program(X)
    program(X)
    ConfigCache().put(entry_of(kernel, 11))
    np.testing.assert_array_equal(program(X), 2 * X)
    with overlay_cache({kernel: Blocks(12)}):
        program(X)
    assert [config.rows for config in kernel.seen] == [2, 11, 12]


def test_tiers_left_out(kernel: Scaled) -> None:
    inv = Invocation.of(kernel, X)
    PersistentCache().put(entry_of(kernel, 10))
    ConfigCache().put(entry_of(kernel, 11))
    assert ConfigSelectorChain(cache=None).choose(inv) == Blocks(10)
    assert ConfigSelectorChain(persistent=None).choose(inv) == Blocks(11)
    assert ConfigSelectorChain(None, persistent=None).choose(inv) == Blocks(2)
    with pytest.raises(TypeError, match=r"cache: got 3, expected ConfigCache\(\) or None"):
        ConfigSelectorChain(cache=3)


def test_policy(kernel: Scaled) -> None:
    inv, chain = Invocation.of(kernel, X), ConfigSelectorChain(policy=AutotunePolicy(allow_heuristics=False))
    with pytest.raises(NoConfigError, match="scaled: no override, overlay or stored entry has a config"):
        chain.choose(inv)
    with policy_override(chain, allow_heuristics=True) as policy:
        assert policy == chain.policy == AutotunePolicy()
        assert chain.choose(inv) == Blocks(2)
    assert not chain.policy.allow_heuristics
    with pytest.raises(TypeError, match="colour"), policy_override(chain, colour="red"):
        pass
    with pytest.raises(ValueError, match="cache_miss_fallback: got 'guess'"):
        AutotunePolicy(cache_miss_fallback="guess")  # pyright: ignore[reportArgumentType]


def test_a_kernel_is_not_searched_and_that_is_said(kernel: Scaled) -> None:
    inv, chain = Invocation.of(kernel, X), ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"))
    with pytest.raises(NoTunerError, match="scaled: the configs of a Kernel cannot be searched"):
        chain.choose(inv)
    with policy_override(chain, allow_autotune=False):
        assert chain.choose(inv) == Blocks(2)
    ConfigCache().put(entry_of(kernel, 11))
    assert chain.choose(inv) == Blocks(11)
    np.testing.assert_array_equal(jax.jit(lambda x: chain.call(kernel, x[:1]))(X), 2 * X[:1])


def test_heuristic_that_returns_no_config() -> None:
    class Bad(Scaled):
        def heuristic_cfg(self, inv: Invocation) -> Any:
            return 8

    with pytest.raises(NoConfigError, match="Bad: its heuristic_cfg returned 8"):
        Bad()(X)


def test_stored_config_of_another_form_is_a_miss_with_a_warning(kernel: Scaled) -> None:
    ConfigCache().put(dataclasses.replace(entry_of(kernel, 1), config={"columns": 3}))
    with pytest.warns(CacheWarning, match="scaled: stored config ignored"):
        kernel(X)
    assert kernel.seen == [Blocks(2)]


def test_arguments_without_a_json_form_are_not_looked_up(kernel: Scaled) -> None:
    with pytest.warns(CacheWarning, match="cannot be looked up"):
        chosen = ConfigSelectorChain().choose(Invocation("scaled", (X, 1j)), kernel)
    assert chosen == Blocks(2)


def test_invocation_keys(kernel: Scaled) -> None:
    one, same = Invocation.of(kernel, X), Invocation.of(kernel, X + 1)
    assert one.key() == same.key()
    assert one.call_key == same.call_key != Invocation.of(kernel, X[:1]).call_key
    assert (one.key().operation, one.key().implementation, one.key().version) == ("scaled", "kernel", 1)


def test_overlay_keys_of_wrong_kinds(kernel: Scaled) -> None:
    with pytest.raises(TypeError, match="expected a Kernel, an Invocation or its key"), overlay_cache({3: Blocks()}):
        pass
    with pytest.raises(ValueError, match="the name of an operation"), overlay_cache({"scald": Blocks()}):
        pass
    with pytest.raises(TypeError, match="a mapping from calls"), overlay_cache([kernel]):  # pyright: ignore[reportArgumentType]
        pass
