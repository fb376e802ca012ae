"""Data, parameters and tensors over eight virtual devices: the losses of one device, and the collectives that this must cost."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest

from ejkernel_train import data, report
from ejkernel_train.config import TrainConfig

TINY = TrainConfig(dtype="float32", steps=4)
MESH = "data=2,fsdp=2,tensor=2"
STREAM = ("f32", (1, 128, 64))
"""Activations `[B, T, d]` on one of four parts of the batch."""


def build(config: TrainConfig) -> report.Build:
    found, tokens = report.Build(config), data.load()
    for step in range(config.steps):
        found.advance(data.batch(tokens, config.seed, step, config.batch, config.length))
    return found


@functools.cache
def llama(kernels: str) -> report.Build:
    return build(dataclasses.replace(TINY, kernels=kernels, mesh=MESH))


@functools.cache
def losses_of_one_device(model: str) -> list[float]:
    return build(dataclasses.replace(TINY, model=model)).losses


@pytest.mark.unsampled
@pytest.mark.parametrize("kernels", ["ejkernel", "plain"])
def test_losses_are_those_of_one_device(kernels: str):
    np.testing.assert_allclose(llama(kernels).losses, losses_of_one_device("llama"), atol=1e-5, rtol=0)


@pytest.mark.unsampled
@pytest.mark.parametrize("model", ["mamba2", "moe"])
def test_losses_of_other_models(model: str):
    found = build(dataclasses.replace(TINY, model=model, mesh=MESH)).losses
    np.testing.assert_allclose(found, losses_of_one_device(model), atol=1e-4, rtol=0)


@pytest.mark.unsampled
@pytest.mark.parametrize("kernels", ["ejkernel", "plain"])
def test_only_parameters_are_gathered(kernels: str):
    """Once each: those of the loop's one block in forward, and the embedding. Nothing is permuted."""
    found = report.collectives(llama(kernels).compiled.program)
    assert {one.kind for one in found} == {"all-gather", "all-reduce"}
    gathered = Counter(shape for one in found if one.kind == "all-gather" for _, shape in one.results)
    # halves over "tensor" of query, key, value, output, gate, up, down and the embedding
    weights = [(64, 32), (64, 16), (64, 16), (32, 64), (64, 80), (64, 80), (80, 64)]
    assert gathered == Counter([*((1, *shape) for shape in weights), (132, 64)])


@pytest.mark.unsampled
@pytest.mark.parametrize("kernels", ["ejkernel", "plain"])
def test_activations_are_summed_where_tensor_parallelism_must(kernels: str):
    """The lookup, and what leaves attention and feed-forward; backward, what enters the products with five weights and the head."""
    found = report.collectives(llama(kernels).compiled.program)
    summed = [result for one in found if one.kind == "all-reduce" for result in one.results]
    assert summed.count(STREAM) == (1 + 2) + (5 + 1)
    # the loss exchanges numbers of tokens, never logits
    assert max(np.prod(shape, dtype=int) for _, shape in summed) == 132 * 64


def test_parameters_and_moments_are_split():
    state = llama("ejkernel").state
    for tree in (state.model, state.moments[1][0].mu, state.moments[1][0].nu):
        query, embedding = tree.blocks[0].mixer.query.weight, tree.embedding
        assert query.addressable_shards[0].data.shape == (2, 32, 32)
        assert embedding.addressable_shards[0].data.shape == (132, 32)
