"""The Operation machinery: caching, residual names, batching and the rules for splitting."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call.arrays import parse_dims
from ejkernel.call.partition import Layout, sharding_rule

X = jax.random.normal(jax.random.key(0), (2, 3, 8))


def count_stamps(jaxpr, stamp, inside=False):
    """Kernel calls in a program, by the name that dispatch stamps on them, or on the function that they are in."""
    found = 0
    for equation in jaxpr.eqns:
        here = inside or stamp in str(equation.source_info.name_stack)
        if equation.primitive.name == "rsqrt" and here:
            found += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += count_stamps(inner, stamp, here)
    return found


def test_warm_eager_call_does_not_trace_again(registered):
    traced = registered("counted", priority=1)
    for _ in range(3):
        ejkernel.rms_norm(X)
    assert len(traced) == 1
    ejkernel.rms_norm(X, epsilon=1e-3)
    assert len(traced) == 2


def test_vmap_becomes_one_larger_call(registered):
    traced = registered("counted", priority=1)
    out = jax.vmap(jax.vmap(ejkernel.rms_norm))(jnp.stack([X[None]] * 5))
    assert out.shape == (5, 1, 2, 3, 8)
    assert traced[-1].x.shape == (5 * 1 * 2, 3, 8)


def test_parameters_shared_by_the_batch_are_not_copied_forward(registered):
    traced = registered("counted", priority=1)
    jax.vmap(ejkernel.rms_norm, in_axes=(0, None))(jnp.stack([X] * 5), jnp.ones(8))
    assert traced[-1].scale.shape == (1, 8)
    jax.vmap(ejkernel.rms_norm, in_axes=(None, 0))(X, jnp.ones((5, 8)))
    assert (traced[-1].x.shape, traced[-1].scale.shape) == ((10, 3, 8), (10, 8))


def test_saved_names_spare_the_second_forward():
    def loss(x):
        return jnp.sum(ejkernel.rms_norm(jnp.sin(x)) ** 2)

    def kernels(policy):
        return count_stamps(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(X).jaxpr, "ejkernel.rms_norm[xla]")

    named = jax.checkpoint_policies.save_only_these_names("rms_norm.out", "rms_norm.rstd")
    assert kernels(jax.checkpoint_policies.nothing_saveable) > kernels(named)


def test_stamp_is_in_the_program():
    lowered = jax.jit(jax.grad(lambda x: ejkernel.rms_norm(x).sum())).lower(X).as_text(debug_info=True)
    assert "ejkernel.rms_norm[xla]" in lowered
    assert "ejkernel.rms_norm.backward[xla]" in lowered


def test_traced_option_is_refused_by_name():
    with pytest.raises(TypeError, match="epsilon: got a traced value"):
        jax.jit(lambda x, e: ejkernel.rms_norm(x, epsilon=e))(X, 1e-6)


def test_config_for_an_implementation_without_knobs_is_refused():
    with pytest.raises((TypeError, ValueError), match="cfg"):
        ejkernel.rms_norm(X, cfg={"block": 3})


def layout(arguments, results, shardable=("b", "h"), sources=()):
    parsed = tuple(parse_dims(sources[index]) if index < len(sources) else None for index in range(len(results)))
    return Layout(tuple(map(parse_dims, arguments)), tuple(map(parse_dims, results)), shardable, parsed)


def test_rule_splits_query_heads_over_key_heads():
    rule, whole, sizes = sharding_rule(
        layout(["b t h d", "b s h d"], ["b t h d"]), [(2, 5, 8, 4), (2, 7, 2, 4)], [(2, 5, 8, 4)]
    )
    query, key = rule.split(" -> ")[0].split(", ")
    batch, _, heads, group, _ = query.replace("(", "").replace(")", "").split()
    assert key.split()[0] == batch
    assert key.split()[2] == heads
    assert f"({heads} {group})" in query
    assert group in whole
    assert heads not in whole
    assert sizes == {group: 4}


class _Mesh:
    def __init__(self, **shape):
        self.shape = shape


def test_assignment_needs_every_array_to_follow():
    attention = layout(["b t h d", "b s h d"], ["b t h d"])
    shapes = [(4, 5, 8, 4), (4, 7, 2, 4)]
    spec = ("data", None, "model", None)
    assert attention.assign(shapes, [spec, ()], _Mesh(data=4, model=2)) == {"b": ("data",), "h": ("model",)}
    assert attention.assign(shapes, [spec, ()], _Mesh(data=4, model=8)) == {"b": ("data",)}
    assert attention.assign([shapes[0], (4, 7, 1, 4)], [spec, ()], _Mesh(data=2, model=8)) == {"b": ("data",), "h": ("model",)}


def test_one_mesh_axis_splits_one_factor():
    attention = layout(["b t h d", "b s h d"], ["b t h d"])
    found = attention.assign([(4, 5, 8, 4), (4, 7, 8, 4)], [("data", None, None), (None, None, "data")], _Mesh(data=4))
    assert found == {"b": ("data",)}


def test_gradient_of_a_shared_parameter_is_summed():
    norm = layout(["b r d", "b? d"], ["b r d", "b? d"], ("b", "r"))
    assigned = {"b": ("data",), "r": ("model",)}
    assert norm.summed(1, (1, 8), assigned) == ("data", "model")
    assert norm.summed(0, (4, 2, 8), assigned) == ()


def test_gradient_that_forward_formed_is_summed_over_what_it_still_has():
    loss = layout(["b r d", "b? d v", "b d v"], ["b r d", "b? d v"], ("b", "r"), sources=("b r d", "b d v"))
    assigned = {"b": ("data",), "r": ("model",)}
    assert loss.summed(1, (1, 8, 5), assigned) == ("data",)
    assert not loss.is_inferable


def test_devices_do_not_part_units():
    pages = layout(["n h d", "p s h*2 d"], ["n h d"], ("h",))
    assert pages.assign([(3, 8, 4), (6, 2, 4, 4)], [(None, "model", None), ()], _Mesh(model=2)) == {"h": ("model",)}
    assert pages.assign([(3, 8, 4), (6, 2, 4, 4)], [(None, "model", None), ()], _Mesh(model=4)) == {}


PERSISTENT = """
import sys, jax, jax.numpy as jnp, ejkernel
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.jit(jax.grad(lambda x: ejkernel.rms_norm(x, x[0]).sum()))(jnp.ones((4, 8))).block_until_ready()
print(hits.count("/jax/compilation_cache/cache_hits"), hits.count("/jax/compilation_cache/cache_misses"))
"""


def test_persistent_compilation_cache_hits_in_another_process(tmp_path):
    def run():
        done = subprocess.run(
            [sys.executable, "-c", PERSISTENT, str(tmp_path)], env=os.environ, capture_output=True, text=True, check=True
        )
        return [int(word) for word in done.stdout.split()]

    _, first_misses = run()
    hits, misses = run()
    assert first_misses > 0
    assert misses == 0
    assert hits == first_misses


def test_float64_is_kept_when_jax_enables_it():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5)), jnp.float64)
        out = ejkernel.rms_norm(x)
    expected = np.asarray(x) / np.sqrt(np.mean(np.asarray(x) ** 2, -1, keepdims=True) + 1e-6)
    assert out.dtype == np.float64
    assert np.max(np.abs(np.asarray(out) - expected)) < 1e-14
