"""Batches of all kinds against full attention over one request alone, by the trainer's own forward pass in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from recomputed import greedy, logits, prompts

from ejkernel_serve import device
from ejkernel_serve.config import EngineConfig, Sampling
from ejkernel_serve.engine import Engine
from ejkernel_serve.vocabulary import TOKENS
from ejkernel_train.config import MODELS
from ejkernel_train.model import Model

Engines = Callable[..., Engine]
GREEDY = Sampling(max_tokens=12, temperature=0.0)


@pytest.mark.parametrize("buckets", [(4, 32), (4, 128)], ids=str)
def test_mixed_batches(model: Model, engine_of: Engines, buckets: tuple[int, ...]):
    """Prompts of 2 to 40 tokens that arrive at different times, in chunks beside requests that decode: in blocks of few tokens all,
    and in those of the trainer where there may be more."""
    engine, requests = engine_of(buckets=buckets), []
    for prompt in prompts(12):
        requests.append(engine.submit(prompt, GREEDY))
        engine.step()
    engine.finish()
    for request, prompt in zip(requests, prompts(12), strict=True):
        assert request.generated == greedy(model, prompt)


def test_log_probabilities(model: Model, engine_of: Engines):
    engine = engine_of()
    request = engine.submit(prompts(1)[0], Sampling(max_tokens=4, temperature=2.0, seed=5))
    engine.finish()
    for number, token in enumerate(request.generated):
        expected = jax.nn.log_softmax(logits(model, request.tokens[: request.prompt + number]))[token]
        assert request.logprobs[number] == pytest.approx(float(expected), abs=1e-4)


def test_chunks_change_nothing(model: Model, engine_of: Engines):
    prompt = prompts(1, seed=3)[0]
    engine = engine_of(buckets=(8,))
    request = engine.submit(prompt, GREEDY)
    engine.finish()
    assert len(prompt) > 16
    assert request.generated == greedy(model, prompt)


def test_reused_prefixes_change_nothing(model: Model, engine_of: Engines):
    engine, start = engine_of(), prompts(1, seed=1)[0][:24]
    for end in ([], [1], [2, 3], [1]):
        request = engine.submit([*start, *end], GREEDY)
        engine.finish()
        assert request.generated == greedy(model, [*start, *end])
    assert request.reused == len(start) // 4 * 4 and request.reused > 8


def test_preemption_changes_nothing(model: Model, engine_of: Engines):
    engine = engine_of(pages=20)
    sampling = [Sampling(max_tokens=12, temperature=temperature, seed=7) for temperature in (0.0, 1.0)]
    small = [engine.submit(prompt, which) for prompt in prompts(6, seed=2) for which in sampling]
    engine.finish()
    assert sum(request.preemptions for request in small) > 0
    large = engine_of(prefix_reuse=False)
    for request in small:
        alone = large.submit(request.tokens[: request.prompt], request.sampling)
        large.finish()
        assert request.generated == alone.generated
    assert small[0].generated == greedy(model, prompts(1, seed=2)[0])


@pytest.mark.parametrize("end", ["length", "stop", "text"])
def test_bursts_change_nothing(model: Model, engine_of: Engines, end: str):
    """Several tokens from one program: as one after the other, also of a request that ends within, beside others that go on."""
    prompt = prompts(1, seed=4)[0]
    expected = greedy(model, prompt)
    stop = {"stop": (tuple(expected[3:5]),)} if end == "stop" else {}
    found: list[list[Any]] = []
    for burst in (1, 5, 8):
        engine = engine_of(burst=burst)
        if end == "text":
            engine.scheduler.ends = {expected[6]}
        sampling = [
            Sampling(max_tokens=12 - number, temperature=number / 2, seed=number, top_logprobs=2, **stop) for number in range(4)
        ]
        requests = [engine.submit(prompt, each) for each in sampling]
        steps = 0
        while engine.busy:
            engine.step()
            steps += 1
        found.append([(each.generated, each.reason, [top[0][0] for top in each.top_logprobs]) for each in requests])
        assert steps < 9 or burst == 1
        assert engine.scheduler.cache.held == 0
    assert found[0] == found[1] == found[2]
    assert found[0][0][0] == expected[: {"length": 12, "stop": 5, "text": 7}[end]]


def test_neighbours_do_not_matter(engine_of: Engines):
    """Drawn with the same seed alone, and among requests with other settings."""
    prompt, own = [256, *b"The "], Sampling(max_tokens=20, temperature=0.9, top_k=40, top_p=0.95, seed=2**63 + 11)
    engine = engine_of()
    alone = engine.submit(prompt, own)
    engine.finish()
    others = [Sampling(max_tokens=5 + seed, temperature=seed / 4, top_k=seed, seed=seed) for seed in range(5)]
    requests = [engine.submit(prompt, each) for each in (*others, own, Sampling(max_tokens=20, temperature=0.9, seed=1))]
    engine.finish()
    assert requests[5].generated == alone.generated
    assert requests[6].generated != alone.generated


def test_top_k_and_top_p(model: Model, engine_of: Engines):
    engine, prompt = engine_of(), [256, *b"A"]
    order = np.argsort(-logits(model, prompt)[:TOKENS])
    most = float(jax.nn.softmax(logits(model, prompt)[:TOKENS])[order[0]])
    drawn: dict[str, set[int]] = {}
    for name, settings in {"all": {}, "top_k": {"top_k": 3}, "top_p": {"top_p": most / 2}}.items():
        requests = [engine.submit(prompt, Sampling(max_tokens=1, seed=seed, **settings)) for seed in range(64)]
        engine.finish()
        drawn[name] = {request.generated[0] for request in requests}
    assert drawn["top_p"] == {order[0]}
    assert drawn["top_k"] == {*order[:3].tolist()}
    assert len(drawn["all"]) > 20


def test_cancelled_at_any_time(model: Model, engine_of: Engines):
    engine = engine_of()
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts(12)]
    for number in range(3):
        engine.step()
        engine.cancel(requests[number])  # one that runs
        engine.cancel(requests[-1 - number])  # one that waits, or has just begun
        engine.check()
    engine.finish()
    assert engine.scheduler.cache.held == 0
    for request, prompt in zip(requests[3:-3], prompts(12)[3:-3], strict=True):
        assert request.generated == greedy(model, prompt)
    assert {request.reason for request in (*requests[:3], *requests[-3:])} == {"cancelled"}


def test_pages_are_written_in_place(model: Model):
    """No layer of the cache is copied, in a step with drafts either."""
    weights = device.prepare(model, "float32", 64, TOKENS)
    for drafts in (0, 3):
        engine = Engine(model, EngineConfig(pages=1000, max_length=64, max_requests=4, buckets=(4,), drafts=drafts))
        pages = device.empty_pages(model.config, 1000, 16, "float32")
        program = jax.jit(device.step, donate_argnums=1).lower(weights, pages, engine.batch([])).compile()
        size = sum(each.nbytes for each in jax.tree.leaves(pages))
        memory = program.memory_analysis()
        assert memory is not None and memory.alias_size_in_bytes == size
        assert memory.temp_size_in_bytes < size / 20


def test_a_mixture_of_experts():
    """The trainer's blocks run as they are, so its other model with attention is served too."""
    model = Model(MODELS["moe"]["tiny"], jax.random.key(1))
    engine = Engine(model, EngineConfig(pages=32, page_size=8, max_length=64, max_requests=4, buckets=(16,), dtype="float32"))
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts(3)]
    engine.finish()
    for request, prompt in zip(requests, prompts(3), strict=True):
        assert request.generated == greedy(model, prompt)


def test_models_that_keep_states_are_refused():
    model = Model(MODELS["mamba2"]["tiny"], jax.random.key(0))
    with pytest.raises(ValueError, match="blocks of state_space, whose states have no slots; serve llama, moe or hybrid"):
        Engine(model, EngineConfig())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pages": 3}, "pages is 3; a request of max_length=1024 needs 64"),
        ({"buckets": (16, 4)}, "rising"),
        ({"buckets": (16,)}, "at least max_requests, 64"),
        ({"page_size": 0}, "page_size is 0"),
    ],
)
@pytest.mark.unsampled
def test_sizes_that_do_not_fit(sizes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**sizes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"stop": ((1,), ())}, "stop has an empty sequence"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; give a number in .0.01, 100., 1 for none"),
        ({"presence_penalty": -2.5}, "presence_penalty is -2.5; give a number in .-2, 2."),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": {5: 101.0}}, "logit_bias has 101.0 for token 5"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias has 1.0 for token -1"),
        ({"top_logprobs": 21}, "top_logprobs is 21; give an int in .0, 20."),
    ],
)
@pytest.mark.unsampled
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


def test_tokens_that_are_no_bytes(engine_of: Engines):
    with pytest.raises(ValueError, match="token 257; give bytes, or 256 before a document"):
        engine_of().submit([1, 257], GREEDY)
    with pytest.raises(ValueError, match="logit_bias has the token 257; give tokens below 257"):
        engine_of().submit([1], Sampling(logit_bias={257: 1.0}))
