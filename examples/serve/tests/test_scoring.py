"""Log-probabilities of prompts, against a full recomputation of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from recomputed import greedy, logprobs, prompts

from ejkernel_serve.config import Sampling
from ejkernel_serve.engine import Engine
from ejkernel_serve.scheduler import Request
from ejkernel_serve.speculative import Draft
from ejkernel_serve.vocabulary import TOKENS
from ejkernel_train.model import Model

Engines = Callable[..., Engine]
SCORE = Sampling(max_tokens=0, prompt_logprobs=True)


def check(model: Model, request: Request) -> None:
    """Every token after the first has its log-probability, once, and as many of the likeliest as were asked for."""
    expected, prompt = logprobs(model, request.tokens[: request.prompt])[:-1], request.tokens[1 : request.prompt]
    np.testing.assert_allclose(request.prompt_logprobs, expected[range(len(prompt)), prompt], atol=1e-4)
    number = request.sampling.top_logprobs
    assert len(request.prompt_top_logprobs) == (len(prompt) if number else 0)
    for top, values in zip(request.prompt_top_logprobs, expected[:, :TOKENS], strict=False):
        np.testing.assert_allclose([value for _, value in top], np.sort(values)[::-1][:number], atol=1e-4)


def test_prompts_alone(model: Model, engine_of: Engines):
    engine = engine_of()
    requests = [engine.submit(prompt, SCORE) for prompt in [[65], [256], *prompts(10)]]
    engine.finish()
    for request in requests:
        check(model, request)
        assert (request.generated, request.logprobs, request.reason) == ([], [], "length")


@pytest.mark.parametrize("buckets", [(4,), (8, 16), (64,)])
@pytest.mark.unsampled
def test_in_chunks_beside_requests_that_generate(model: Model, engine_of: Engines, buckets: tuple[int, ...]):
    engine, requests = engine_of(buckets=buckets, max_requests=4), list[Request]()
    settings = [Sampling(6, 0.0, prompt_logprobs=bool(number % 3), top_logprobs=number) for number in range(6)]
    for prompt, sampling in zip(prompts(6), settings, strict=True):
        requests.append(engine.submit(prompt, sampling))
        engine.step()
    engine.finish()
    for request in requests:
        if request.sampling.prompt_logprobs:
            check(model, request)
        assert request.generated == greedy(model, request.tokens[: request.prompt], 6)


def test_known_pages_are_not_reused_but_written_alike(model: Model, engine_of: Engines):
    engine, prompt = engine_of(), prompts(1, seed=1)[0][:24]
    plain = Sampling(4, 0.0)
    first = engine.submit(prompt, plain)
    engine.finish()
    scored = engine.submit(prompt, Sampling(4, 0.0, prompt_logprobs=True, top_logprobs=2))
    engine.finish()
    last = engine.submit(prompt, plain)
    engine.finish()
    assert (first.reused, scored.reused) == (0, 0) and last.reused > 8
    check(model, scored)
    assert first.generated == scored.generated == last.generated


def test_preemption_loses_no_value_and_doubles_none(model: Model, engine_of: Engines):
    """The first loses its pages while it is scored, as others grow; of many, some when they generate."""
    engine = engine_of(pages=16, max_requests=4, buckets=(4,), burst=1)
    sampling = Sampling(14, 0.0, prompt_logprobs=True, top_logprobs=1)
    engine.scheduler.ends = frozenset()
    for number in range(3):
        engine.submit([number, 1, 2], Sampling(max_tokens=20))
    for _ in range(4):
        engine.step()
    first = engine.submit([256, *range(31)], sampling)
    while engine.busy and not first.preemptions:
        engine.step()
    assert first.preemptions and 0 < len(first.prompt_logprobs) < 31
    engine.finish()
    engine = engine_of(pages=20, buckets=(8,))
    requests = [engine.submit(prompt, sampling) for prompt in prompts(10, seed=2)]
    engine.finish()
    assert sum(request.preemptions for request in requests) > 0
    check(model, first)
    for request in requests:
        check(model, request)
        assert request.generated == greedy(model, request.tokens[: request.prompt], 14)


def test_with_drafts(model: Model, engine_of: Engines):
    def propose(tokens: Sequence[int], number: int) -> tuple[Draft, ...]:
        return (Draft(1, -1), Draft(2, 0), Draft(3, -1))[:number]

    engine = engine_of(buckets=(32,), drafts=3)
    engine.scheduler.propose = propose
    generating = [engine.submit(prompt, Sampling(12, 0.0)) for prompt in prompts(3)]
    engine.step()
    scored = [engine.submit(prompt, SCORE) for prompt in prompts(6, seed=4)]
    engine.finish()
    for request in scored:
        check(model, request)
    for request in generating:
        assert request.drafted > 0 and request.generated == greedy(model, request.tokens[: request.prompt])


def test_the_longest_prompt(model: Model, engine_of: Engines):
    """It fills all pages there are."""
    engine = engine_of(pages=16)
    prompt = [*range(64)]
    request = engine.submit(prompt, SCORE)
    engine.finish()
    check(model, request)
    with pytest.raises(ValueError, match="65 tokens and max_tokens is 0; together at most 64"):
        engine.submit([*prompt, 1], SCORE)


def test_a_request_cancelled_while_its_step_runs(model: Model, engine_of: Engines):
    """What was computed for its neighbour reaches that one."""
    engine = engine_of()
    gone, stays = (engine.submit(prompt, SCORE) for prompt in ([256, *b"gone"], [256, *b"stays here"]))

    def cancelling(*arguments: Any, **options: Any) -> Any:
        engine.cancel(gone)
        return programs.step(*arguments, **options)

    programs = engine.programs
    engine.programs = programs._replace(step=cancelling)
    engine.finish()
    check(model, stays)
    assert gone.prompt_logprobs == [] and gone.reason == "cancelled"
