"""Penalties, biases, min_p and the likeliest tokens, against numbers from a full recomputation of each text."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from recomputed import all_logits, logits, logprobs, prompts

from ejkernel_serve import penalties
from ejkernel_serve.config import Sampling
from ejkernel_serve.device import adjusted_sizes
from ejkernel_serve.engine import Engine
from ejkernel_serve.scheduler import Chunk, Request
from ejkernel_serve.speculative import Draft
from ejkernel_serve.vocabulary import TOKENS
from ejkernel_train.model import Model

Engines = Callable[..., Engine]
PROMPT = [256, *b"abcabcabc"]
GREEDY = Sampling(max_tokens=16, temperature=0.0)
CHANGES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition, the other way": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {5: 3.0, 256: -100.0, 7: 2.5}},
    "all": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.3, "logit_bias": {97: 4.0, 1: -2.0}},
}


def changed(model: Model, tokens: list[int], prompt: int, sampling: Sampling) -> np.ndarray:
    """The next token's logits, `[TOKENS]`: one token after the other, by the definitions."""
    found = logits(model, tokens)[:TOKENS].astype(np.float64)
    counts = Counter(tokens[prompt:])
    for token in range(TOKENS):
        if token in tokens:
            found[token] *= 1 / sampling.repetition_penalty if found[token] > 0 else sampling.repetition_penalty
        found[token] -= sampling.presence_penalty * (counts[token] > 0) + sampling.frequency_penalty * counts[token]
        found[token] += sampling.logit_bias.get(token, 0)
    return found


def check(model: Model, request: Request) -> None:
    """Each token is the likeliest after those before it, up to rounding."""
    for place in range(request.prompt, len(request.tokens)):
        found = changed(model, request.tokens[:place], request.prompt, request.sampling)
        assert found[request.tokens[place]] > found.max() - 1e-4
    assert len(request.generated) == request.sampling.max_tokens or request.tokens[-1] == 256


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.unsampled
def test_changed_logits(model: Model, engine_of: Engines, change: str):
    """Beside a request without changes, which goes on as it did."""
    engine, sampling = engine_of(), dataclasses.replace(GREEDY, **CHANGES[change])
    beside = engine.submit(PROMPT, GREEDY)
    found = engine.submit(PROMPT, sampling)
    engine.finish()
    check(model, beside)
    check(model, found)
    assert found.generated != beside.generated
    expected = logprobs(model, found.tokens)
    np.testing.assert_allclose(  # the model's own, whatever the changes
        found.logprobs,
        [expected[place - 1, found.tokens[place]] for place in range(found.prompt, len(found.tokens))],
        atol=1e-4,
    )


def test_many_changed_logits(model: Model, engine_of: Engines):
    """Every size of the ladder, up to all tokens."""
    sizes = adjusted_sizes(TOKENS)
    for size in (1, sizes[1], sizes[1] + 1, sizes[2] + 1, TOKENS):
        engine = engine_of()
        bias = {token: 9.0 * np.sin(token + size) for token in range(size)}
        request = engine.submit(PROMPT, dataclasses.replace(GREEDY, max_tokens=3, logit_bias=bias))
        engine.finish()
        check(model, request)


def test_positive_and_negative_logits(model: Model):
    """Both occur, or the tests above say little of the two cases."""
    signs = {bool(value > 0) for value in all_logits(model, PROMPT)[:, PROMPT].flat}
    assert signs == {True, False}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.unsampled
def test_penalties_with_drafts(engine_of: Engines, temperature: float):
    """A draft's logits are penalised for the drafts before it too, so that all tokens are as without drafts."""
    settings = [Sampling(12, temperature, seed=seed, **change) for seed, change in enumerate(CHANGES.values())]

    def run(engine: Engine) -> list[Request]:
        requests = [engine.submit(PROMPT, sampling) for sampling in settings]
        engine.finish()
        return requests

    plain = run(engine_of(buckets=(32,)))
    texts = [tuple(request.tokens) for request in plain]

    def knowing(tokens: Sequence[int], number: int) -> tuple[Draft, ...]:
        """One text's tokens, whose is right or not, with a wrong branch before them."""
        for text in texts:
            if text[: len(tokens)] == tuple(tokens):
                right = text[len(tokens) : len(tokens) + 2]
                wrong = Draft((right[0] + 1) % 256, -1) if right else None
                drafts = (wrong, Draft(right[0], -1), *(Draft(each, 1) for each in right[1:])) if wrong else ()
                return drafts[:number]
        return ()

    engine = engine_of(buckets=(32,), drafts=3)
    engine.scheduler.propose = knowing
    guessed = run(engine)
    assert sum(request.accepted for request in guessed) > 15
    for one, other in zip(guessed, plain, strict=True):
        assert one.generated == other.generated
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_what_a_draft_is_penalised_for():
    request = Request(
        0, [1, 2, 3, 3], 2, Sampling(frequency_penalty=0.5, presence_penalty=1.0, logit_bias={9: 1.0}), computed=3
    )
    chunk = Chunk(request, 1, (Draft(3, -1), Draft(9, -1), Draft(9, 1)))
    assert penalties.of_chunk(chunk) == [
        {3: (1.0, -2.0), 9: (1.0, 1.0)},
        {3: (1.0, -2.5), 9: (1.0, 1.0)},
        {3: (1.0, -2.0), 9: (1.0, -0.5)},
        {3: (1.0, -2.0), 9: (1.0, -1.0)},
    ]


def test_penalties_survive_preemption(model: Model, engine_of: Engines):
    engine = engine_of(pages=20)
    sampling = dataclasses.replace(GREEDY, **CHANGES["all"])
    requests = [engine.submit(prompt, sampling) for prompt in prompts(8, seed=2)]
    engine.finish()
    assert sum(request.preemptions for request in requests) > 0
    for request in requests:
        check(model, request)


def test_min_p(model: Model, engine_of: Engines):
    engine, prompt = engine_of(), [256, *b"A"]
    likely = np.exp(logits(model, prompt)[:TOKENS].astype(np.float64))
    likely /= likely.max()
    least = float(np.sort(likely)[-4:-2].mean())  # between the third and the fourth
    for min_p, expected in ((1.0, 1), (least, 3)):
        requests = [engine.submit(prompt, Sampling(max_tokens=1, seed=seed, min_p=min_p)) for seed in range(64)]
        engine.submit(prompt, Sampling(max_tokens=1))
        engine.finish()
        drawn = {request.generated[0] for request in requests}
        assert drawn == {int(token) for token in np.flatnonzero(likely >= min_p)} and len(drawn) == expected


def test_the_likeliest_tokens(model: Model, engine_of: Engines):
    """Of requests that ask for different numbers, in one batch."""
    engine = engine_of()
    wanted = [Sampling(max_tokens=5, temperature=1.5, seed=number, top_logprobs=number) for number in (0, 1, 5, 20)]
    requests = [engine.submit(prompt, sampling) for prompt, sampling in zip(prompts(4), wanted, strict=True)]
    engine.finish()
    for request in requests:
        number = request.sampling.top_logprobs
        assert [len(top) for top in request.top_logprobs] == [number] * (len(request.generated) if number else 0)
        expected = logprobs(model, request.tokens)[request.prompt - 1 :, :TOKENS]
        for top, values in zip(request.top_logprobs, expected, strict=False):
            np.testing.assert_allclose([value for _, value in top], np.sort(values)[::-1][:number], atol=1e-4)
            np.testing.assert_allclose([values[token] for token, _ in top], [value for _, value in top], atol=1e-4)


def test_the_likeliest_tokens_with_drafts(engine_of: Engines):
    plain, guessed = (engine_of(buckets=(32,), drafts=drafts) for drafts in (0, 4))
    prompt = [256, *b"abcabdabcabdab"]
    requests = [engine.submit(prompt, Sampling(12, 0.0, top_logprobs=3)) for engine in (plain, guessed)]
    plain.finish()
    guessed.finish()
    assert requests[1].drafted > 0 and requests[0].generated == requests[1].generated
    for one, other in zip(*(request.top_logprobs for request in requests), strict=True):
        np.testing.assert_allclose([value for _, value in one], [value for _, value in other], atol=1e-4)


def test_ordinary_batches_have_nothing_of_this(engine_of: Engines):
    engine = engine_of()
    engine.submit(PROMPT, GREEDY)
    batch = engine.batch(engine.scheduler.plan())
    assert [batch.min_p, batch.adjusted, batch.factor, batch.bias, batch.targets] == [None] * 5
    engine.finish()
