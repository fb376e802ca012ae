"""Data, parameters and tensors over eight virtual devices: the losses of one device, and the collectives that this must cost."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import jax
import numpy as np
import pytest

from ejkernel_train import data, report
from ejkernel_train.config import MODELS, TrainConfig
from ejkernel_train.operations import choose
from ejkernel_train.sharding import Layout, spec_of
from ejkernel_train.step import initialise, split

TINY = TrainConfig(dtype="float32", steps=4, length=96, learning_rate=1e-3)
"""No parameter has an axis of 96, so that shapes tell activations."""

MESH = "data=2,fsdp=2,tensor=2"
STREAM = ("f32", (1, 96, 64))
"""Activations `[B, T, d]` on one of four parts of the batch."""

BUILDS = [*((model, "ejkernel") for model in MODELS), ("llama", "plain"), ("moe", "plain"), ("mamba2", "plain")]


@functools.cache
def build(model: str, kernels: str = "ejkernel", mesh: str = "", layers: str = "scan") -> report.Build:
    config = dataclasses.replace(TINY, model=model, kernels=kernels, mesh=mesh, layers=layers)
    found, tokens = report.Build(config), data.load()
    for step in range(config.steps):
        found.advance(data.batch(tokens, config.seed, step, config.batch, config.length))
    return found


@pytest.mark.unsampled
@pytest.mark.parametrize(("model", "kernels"), BUILDS)
def test_losses_are_those_of_one_device(model: str, kernels: str):
    np.testing.assert_allclose(build(model, kernels, MESH).losses, build(model).losses, atol=1e-4, rtol=0)


@pytest.mark.unsampled
@pytest.mark.parametrize("mesh", ["", MESH])
@pytest.mark.parametrize("model", MODELS)
def test_losses_of_layers_with_parameters_of_their_own_are_those_of_stacked_ones(model: str, mesh: str):
    np.testing.assert_allclose(build(model, "ejkernel", mesh, "unroll").losses, build(model).losses, atol=1e-4, rtol=0)


EXPERTS = "fsdp=2,expert=2,tensor=2"


@pytest.mark.unsampled
@pytest.mark.parametrize("mesh", [EXPERTS, "expert=4"])
@pytest.mark.parametrize("kernels", ["ejkernel", "plain"])
def test_experts_on_devices_have_the_losses_of_one_device(kernels: str, mesh: str):
    """The fourth loss is of parameters that three gradients moved."""
    np.testing.assert_allclose(build("moe", kernels, mesh).losses, build("moe").losses, atol=1e-4, rtol=0)


def gradients(mesh: str):
    config = dataclasses.replace(TINY, model="moe", mesh=mesh)
    state, layout = initialise(config), Layout.parse(mesh)
    window = data.batch(data.load(), 0, 0, config.batch, config.length)
    run = jax.jit(
        jax.grad(lambda model: model.loss(window, choose("ejkernel", ()), "float32", layout)),
        in_shardings=None if layout.mesh is None else (layout.shardings(state.model),),
    )
    return run(state.model)


@pytest.mark.unsampled
def test_experts_on_devices_have_the_gradients_of_one_device():
    for (path, found), wanted in zip(
        jax.tree_util.tree_leaves_with_path(gradients(EXPERTS)), jax.tree.leaves(gradients("")), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=2e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.unsampled
def test_tokens_are_gathered_for_experts_and_their_sums_scattered():
    """Once each in the loop's one block, forward; backward, the other way round. A device has 96 tokens, four have 384."""
    found = report.collectives(build("moe", "ejkernel", "expert=4").compiled.program)
    moved = Counter((one.kind, result) for one in found for result in one.results if result[1][-1:] == (64,))
    assert moved["all-gather", ("f32", (384, 64))] == 2
    assert moved["reduce-scatter", ("f32", (96, 64))] == 2
    assert {one.kind for one in found} == {"all-gather", "all-reduce", "reduce-scatter"}


def test_experts_are_on_different_devices():
    gate = build("moe", "ejkernel", "expert=4").state.model.blocks[0].feed_forward.gate
    assert gate.shape[1] == 4 and gate.addressable_shards[0].data.shape[1] == 1
    with pytest.raises(ValueError, match="--mesh has expert=8; make it a divisor of the model's 4 experts"):
        build("moe", "ejkernel", "expert=8")


def parameters_in_use(model: str) -> set[tuple[int, ...]]:
    """Shapes of parameters of one block that are whole along "fsdp", and along "tensor" too, without axes of size 1."""
    shapes: set[tuple[int, ...]] = set()
    state = jax.eval_shape(lambda: initialise(dataclasses.replace(TINY, model=model)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.model):
        name = jax.tree_util.keystr(path)
        spec = [*spec_of(name, leaf.ndim), *[None] * leaf.ndim][: leaf.ndim]
        first = 1 if ".blocks[" in name else 0
        for parts in (1, 2):
            sizes = (size // (parts if axis == "tensor" else 1) for size, axis in zip(leaf.shape, spec, strict=True))
            shapes.add(tuple(size for size in list(sizes)[first:] if size > 1))
    return shapes


@pytest.mark.unsampled
@pytest.mark.parametrize(("model", "kernels"), BUILDS)
def test_only_parameters_are_gathered(model: str, kernels: str):
    found = report.collectives(build(model, kernels, MESH).compiled.program)
    assert {one.kind for one in found} == {"all-gather", "all-reduce"}
    gathered = {
        tuple(size for size in shape if size > 1) for one in found if one.kind == "all-gather" for _, shape in one.results
    }
    assert gathered and gathered <= parameters_in_use(model)


@pytest.mark.unsampled
@pytest.mark.parametrize("kernels", ["ejkernel", "plain"])
def test_each_parameter_of_a_llama_is_gathered_once(kernels: str):
    """Those of the loop's one block, in the forward, and the embedding."""
    found = report.collectives(build("llama", kernels, MESH).compiled.program)
    gathered = Counter(shape for one in found if one.kind == "all-gather" for _, shape in one.results)
    # halves over "tensor" of query, key, value, output, gate, up, down and the embedding
    weights = [(64, 32), (64, 16), (64, 16), (32, 64), (64, 80), (64, 80), (80, 64)]
    assert gathered == Counter([*((1, *shape) for shape in weights), (132, 64)])


@pytest.mark.unsampled
@pytest.mark.parametrize("kernels", ["ejkernel", "plain"])
def test_activations_are_summed_where_tensor_parallelism_must(kernels: str):
    """The lookup, and what leaves attention and feed-forward; backward, what enters the products with five weights and the head."""
    found = report.collectives(build("llama", kernels, MESH).compiled.program)
    summed = [result for one in found if one.kind == "all-reduce" for result in one.results]
    assert summed.count(STREAM) == (1 + 2) + (5 + 1)
    # the loss exchanges numbers of tokens, never logits
    assert max(np.prod(shape, dtype=int) for _, shape in summed) == 132 * 64


def test_scales_of_float8_are_those_of_one_device():
    """They follow what is largest on any device."""
    config = dataclasses.replace(TINY, model="mamba2", dtype="bfloat16", float8=True)
    builds = [report.Build(dataclasses.replace(config, mesh=mesh)) for mesh in ("", MESH)]
    window = data.batch(data.load(), 0, 0, config.batch, config.length)
    for each in builds:
        each.advance(window)
    one, several = (jax.tree.leaves(split(each.state.model)[1]) for each in builds)
    assert len(one) == 3
    for found, wanted in zip(several, one, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0.02)


def test_parameters_and_moments_are_split():
    state = build("llama", "ejkernel", MESH).state
    for tree in (state.model, state.moments[1][0].mu, state.moments[1][0].nu):
        query, embedding = tree.blocks[0].mixer.query.weight, tree.embedding
        assert query.addressable_shards[0].data.shape == (2, 32, 32)
        assert embedding.addressable_shards[0].data.shape == (132, 32)


def test_axes_that_are_left_out_have_one_device():
    assert dict(Layout.parse("fsdp=4").mesh.shape) == {"data": 1, "fsdp": 4, "expert": 1, "tensor": 1}
    assert Layout.parse("").mesh is None
