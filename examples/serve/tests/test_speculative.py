"""Drafts: what is guessed, what it sees, and that it changes no token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ejkernel_serve.config import Sampling
from ejkernel_serve.engine import Engine
from ejkernel_serve.scheduler import Request
from ejkernel_serve.speculative import Draft, depths, propose, tree_bias

Engines = Callable[..., Engine]


def test_a_text_goes_on_as_it_did_before():
    tokens = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert propose(tokens, 3) == (Draft(4, -1), Draft(5, 0), Draft(6, 1))
    assert propose(tokens[:-1], 3) == ()
    assert propose([1, 2, 3], 3) == ()
    assert propose([5, 5, 5, 5, 5], 2) == (Draft(5, -1),)  # what is not there yet is not guessed


def test_other_places_add_branches():
    tokens = [1, 2, 3, 4, 8, 9, 1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert propose(tokens, 6) == (Draft(4, -1), Draft(5, 0), Draft(6, 1), Draft(1, 2), Draft(2, 3), Draft(3, 4))
    tokens = [1, 2, 3, 4, 8, 9, 1, 2, 3, 4, 1, 2, 3]
    drafts = propose(tokens, 8)
    assert drafts[:4] == (Draft(4, -1), Draft(1, 0), Draft(2, 1), Draft(3, 2))
    assert drafts[4:] == (Draft(8, 0), Draft(9, 4), Draft(1, 5))
    assert depths(drafts) == [1, 2, 3, 4, 2, 3, 4]


def test_a_draft_sees_those_that_lead_to_it():
    drafts = (Draft(4, -1), Draft(5, 0), Draft(6, 0), Draft(7, 2), Draft(8, -1))
    seen = tree_bias(drafts, 7) == 0
    expected = np.array(
        [
            [1, 1, 1, 1, 1, 1, 1],  # what comes later is hidden by causality
            [1, 1, 1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1, 1, 1],
            [1, 1, 0, 1, 1, 1, 1],
            [1, 1, 0, 1, 1, 1, 1],
            [1, 0, 0, 0, 0, 1, 1],
            [1, 1, 1, 1, 1, 1, 1],
        ],
        bool,
    )
    np.testing.assert_array_equal(np.tril(seen), np.tril(expected))


SETTINGS = [Sampling(12, 0.0), Sampling(12, 0.0), Sampling(12, 0.4, top_k=2, seed=1), Sampling(12, 1.0, seed=2)]
PROMPTS = [[256, *b"one two three, one two four, one two "], [256, *b"abcabdabcabdab"], [256, *b"xyzxyzxyz"], [256, *b"??"]]


def run(engine: Engine) -> list[Request]:
    requests = [engine.submit(prompt, sampling) for prompt, sampling in zip(PROMPTS, SETTINGS, strict=True)]
    while engine.busy:
        engine.step()
        engine.check()
    return requests


def test_drafts_change_nothing_but_the_number_of_steps(engine_of: Engines):
    """Greedy and drawn, with guesses from the text, and with those of someone who knows it but first guesses wrongly."""
    plain = run(engine_of(buckets=(32,)))
    known = {tuple(request.tokens[:3]): request.tokens for request in plain}

    def knowing(tokens: Sequence[int], number: int) -> tuple[Draft, ...]:
        right = known[tuple(tokens[:3])][len(tokens) :]
        wrong = Draft((right[0] + 1) % 256, -1)
        tree = {
            0: (Draft(right[0], -1), Draft(right[1], 0), wrong, Draft(9, 2)),  # in place, with a branch after it
            1: (wrong, Draft(9, 0), Draft(right[0], -1), Draft(right[1], 2)),  # to be computed again
        }
        return tree[len(tokens) % 2][:number] if len(right) > 1 else ()

    text, oracle = engine_of(buckets=(32,), drafts=4), engine_of(buckets=(32,), drafts=4)
    oracle.scheduler.propose = knowing
    guessed, told = run(text), run(oracle)
    for found in (guessed, told):
        for one, other in zip(found, plain, strict=True):
            assert one.generated == other.generated
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert sum(request.drafted for request in guessed) > 5
    assert sum(request.accepted for request in told) > 12  # of 48 tokens
