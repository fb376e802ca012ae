"""What kernels tell XLA of their cost, against what the operation counts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from ejkernel.operations import get_operation
from ejkernel.operations.flash_attention.interface import FlashAttentionOutputs
from ejkernel.operations.grouped_matmul.interface import GroupedMatmulOutputs
from ejkernel.operations.rms_norm.interface import RmsNormOutputs
from ejkernel.plugin import Target
from ejkernel.targets import building_for
from ejkernel_pallas.tpu.flash_attention import kernel as attention
from ejkernel_pallas.tpu.flash_attention.config import BackwardConfig, ForwardConfig
from ejkernel_pallas.tpu.grouped_matmul import config as grouped_config, kernel as grouped
from ejkernel_pallas.tpu.rms_norm import config as norm_config, kernel as norm

V6E = Target("tpu", "TPU v6 lite")
ATTENTION, BACKWARD = "ejkernel_flash_attention", "ejkernel_flash_attention_backward_"


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def bound(operation, options=None, **arrays):
    """The canonical call, its inputs as shapes, and what the operation counts."""
    calls = []

    def bind(arrays):
        found = get_operation(operation).canonicalise(**arrays, **(options or {}))
        calls.append(found.call)
        return found.inputs

    inputs = jax.eval_shape(bind, arrays)
    return calls[0], inputs, functools.partial(get_operation(operation).cost, calls[0])


def pallas_calls(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["name"], equation.params["cost_estimate"]
            continue
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
            if hasattr(value, "jaxpr"):
                yield from pallas_calls(value.jaxpr)


def costs(function, call, *arguments, config):
    """kernel -> its estimate, of every kernel of a phase."""
    with building_for(V6E):
        traced = jax.make_jaxpr(lambda *arrays: function(call, *arrays, config))(*arguments)
    found = dict(pallas_calls(traced.jaxpr))
    assert found and all(estimate is not None for estimate in found.values())
    return found


def attention_of(queries, keys=None, heads=4, key_heads=4, size=128, value_size=128, options=None, **arrays):
    keys = keys or queries
    given = {
        "query": shape(2, queries, heads, size),
        "key": shape(2, keys, key_heads, size),
        "value": shape(2, keys, key_heads, value_size),
    }
    call, inputs, counted = bound("flash_attention", options, **given, **arrays)
    out = FlashAttentionOutputs(shape(2, queries, heads, value_size), shape(2, queries, heads, dtype=jnp.float32))
    return call, inputs, counted, out


def forward_of(problem, config):
    call, inputs, _, _ = problem
    return costs(attention.forward, call, inputs, config=config)[ATTENTION]


def backward_of(problem, config):
    call, inputs, _, out = problem
    found = costs(attention.backward, call, inputs, out, out._replace(lse=None), config=config)
    return {name.removeprefix(BACKWARD): estimate for name, estimate in found.items()}


@pytest.mark.parametrize(("size", "value_size", "key_heads"), [(128, 128, 4), (192, 128, 2), (64, 64, 1)])
def test_attention_in_one_tile_is_what_the_operation_counts(size, value_size, key_heads):
    """Nothing is copied twice, and nothing is computed in vain; the list of tiles is 4 bytes."""
    problem = attention_of(512, size=size, value_size=value_size, key_heads=key_heads)
    found, counted = forward_of(problem, ForwardConfig(512, 512, 256)), problem[2]("forward")
    assert found.flops == counted.flops
    assert found.bytes_accessed == counted.bytes + 4
    assert found.transcendentals == 2 * 4 * 512 * 512


def test_attention_counts_the_tiles_that_run():
    """Of 8 x 8 causal tiles 36 run; the operation counts pairs, of which the diagonal tiles hold a little more than half."""
    problem = attention_of(2048, options={"causal": True})
    found = forward_of(problem, ForwardConfig(256, 256, 256))
    assert found.flops == 2 * 36 * 256 * 256 * 256 * 8
    pairs = problem[2]("forward").flops / (2 * 256 * 8)
    assert pairs == 2048 * 2049 / 2
    # Queries and results once for each of 8 walks; a block of keys and values for each tile but where it stays: one for two rows.
    blocks = 2 * 8 * 8 + 2 * 8 * 36
    assert found.bytes_accessed <= blocks * 256 * 128 * 2 + 4 * 36
    assert found.bytes_accessed >= problem[2]("forward").bytes


def test_attention_within_a_window_costs_in_proportion():
    wide, narrow = (
        forward_of(attention_of(4096, options={"causal": True, "sliding_window": (left, 0)}), ForwardConfig(128, 128, 128))
        for left in (4095, 255)
    )
    tiles = (32 * 33 // 2, 32 * 3 - 3)
    assert wide.flops / narrow.flops == tiles[0] / tiles[1]


def test_a_soft_cap_doubles_the_transcendentals_and_a_bias_is_read():
    plain, capped = attention_of(512), attention_of(512, options={"logits_soft_cap": 5.0})
    config = ForwardConfig(512, 512, 256)
    assert forward_of(capped, config).transcendentals == 2 * forward_of(plain, config).transcendentals
    biased = attention_of(512, bias=shape(1, 4, 512, 512))
    # The bias of a head is copied for each of two batches.
    assert forward_of(biased, config).bytes_accessed - forward_of(plain, config).bytes_accessed == 2 * 4 * 512 * 512 * 2


def test_lists_made_on_device_count_all_candidates():
    plain = attention_of(1024)
    segments = shape(2, 1024, dtype=jnp.int32)
    packed = attention_of(1024, query_segments=segments, key_segments=segments)
    config = ForwardConfig(256, 256, 256)
    assert forward_of(packed, config).flops == forward_of(plain, config).flops
    assert forward_of(packed, config).bytes_accessed > forward_of(plain, config).bytes_accessed


@pytest.mark.parametrize("key_heads", [1, 4])
def test_backward_takes_seven_products_where_five_are_needed(key_heads):
    """Both kernels form the weights and their gradients."""
    problem = attention_of(512, key_heads=key_heads)
    found = backward_of(problem, BackwardConfig(512, 512, 512, 512))
    assert set(found) == {"key", "query"}
    counted = problem[2]("backward")
    assert 5 * sum(estimate.flops for estimate in found.values()) == 7 * counted.flops
    assert all(estimate.transcendentals == 2 * 4 * 512 * 512 for estimate in found.values())
    queries, keys = 2 * 4 * 512 * 128 * 2, 2 * key_heads * 512 * 128 * 2
    statistics = 2 * 2 * 4 * 512 * 4
    assert found["key"].bytes_accessed == 2 * queries + statistics + 4 * keys + 4
    assert found["query"].bytes_accessed == 3 * queries + statistics + 2 * keys + 4


def test_backward_of_a_bias_visits_every_tile():
    problem = attention_of(512, bias=shape(1, 1, 512, 512))
    found = backward_of(problem, BackwardConfig(256, 256, 256, 256))
    assert found["bias"].flops == 2 * 8 * 512 * 512 * 256
    assert found["bias"].bytes_accessed >= 512 * 512 * (4 + 8 * 2)


def grouped_of(rows, inner, columns, groups, **arrays):
    given = {
        "lhs": shape(rows, inner),
        "rhs": shape(groups, inner, columns),
        "group_sizes": shape(groups, dtype=jnp.int32),
    }
    return bound("grouped_matmul", None, **given, **arrays)


def test_a_product_of_one_group_is_what_the_operation_counts():
    call, inputs, counted = grouped_of(1024, 512, 768, 1)
    found = costs(grouped.forward, call, inputs, config=grouped_config.Config(256, 512, 768))
    (estimate,) = found.values()
    assert estimate.flops == counted("forward").flops
    assert estimate.bytes_accessed == counted("forward").bytes - 4  # without the sizes of the groups


def test_groups_that_share_tiles_are_counted_as_often_as_may_be():
    call, inputs, counted = grouped_of(1024, 512, 768, 8)
    (estimate,) = costs(grouped.forward, call, inputs, config=grouped_config.Config(256, 512, 768)).values()
    assert estimate.flops == counted("forward").flops * (4 + 7) // 4
    assert estimate.bytes_accessed == counted("forward").bytes - 4 * 8


def test_gradients_of_a_product():
    call, inputs, counted = grouped_of(1024, 512, 768, 1)
    config = grouped_config.BackwardConfig(256, 512, 768, 256, 512, 768)
    out = GroupedMatmulOutputs(shape(1, 1024, 768))
    found = costs(grouped.backward, call, inputs, out, out, config=config)
    assert sum(estimate.flops for estimate in found.values()) == counted("backward").flops
    arrays = 1024 * 512 * 2, 512 * 768 * 2, 1024 * 768 * 2
    assert sum(estimate.bytes_accessed for estimate in found.values()) == 2 * sum(arrays)


def test_norms_cost_what_the_operation_counts():
    call, inputs, counted = bound("rms_norm", None, x=shape(64, 512), scale=shape(512))
    forward = costs(norm.forward, call, inputs, config=norm_config.Config(16))["ejkernel_rms_norm"]
    assert (forward.flops, forward.bytes_accessed) == (counted("forward").flops, counted("forward").bytes)
    assert forward.transcendentals == 64
    out = RmsNormOutputs(inputs.x, shape(*inputs.x.shape[:-1], dtype=jnp.float32))
    backward = costs(norm.backward, call, inputs, out, out._replace(rstd=None), config=norm_config.Config(16))
    assert backward["ejkernel_rms_norm_backward"].bytes_accessed == counted("backward").bytes - 4 * 64
