"""What runs when, without a model: the place of each token in the pages is kept instead of its key and value."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import pytest

from ejkernel_serve.config import EngineConfig, Sampling
from ejkernel_serve.scheduler import Chunk, Drawn, QueueFullError, Request, Scheduler
from ejkernel_serve.speculative import Draft

SMALL = EngineConfig(pages=12, page_size=2, max_length=20, max_requests=4, max_waiting=50, buckets=(1, 6), burst=1)


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(bytes(tokens)) % 250


def generated_alone(prompt: list[int], number: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(number):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Memory:
    """Stands for the device. What a request reads through its pages must be its own tokens."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.stored = scheduler, dict[tuple[int, int], int]()
        self.drawn = dict[Request, Sequence[int]]()  # in the last burst
        self.ahead = list[Chunk](), list[Drawn]()

    def step(self) -> list[Chunk]:
        """As the engine does: what follows is planned and computed before the step is committed. Returns what was computed."""
        chunks, drawn = self.ahead
        if not chunks:
            chunks = self.scheduler.plan()
            drawn = [self.compute(chunk) for chunk in chunks]
        following = self.scheduler.plan_ahead(chunks) if chunks else []
        self.ahead = following, [self.compute(chunk) for chunk in following]
        self.scheduler.commit(chunks, drawn)
        return chunks

    def compute(self, chunk: Chunk) -> Drawn:
        """What is drawn after the chunk and after each draft, which sees the request's tokens and the drafts that lead to it, or
        in a burst, each after those before."""
        request, size, drafts, _, burst, ahead = chunk
        assert size == 1 or (not drafts and burst == 1)
        assert ahead in (0, burst if burst > 1 else 0)
        tokens = [*request.tokens, *(self.drawn[request] if ahead else ())]
        computed = request.computed + ahead
        done = computed + size
        places = [(request.pages[at // 2], at % 2) for at in range(done + max(len(drafts), burst - 1))]
        for at in range(computed, done):
            self.stored[places[at]] = tokens[at]
        read = [self.stored[place] for place in places[:done]]
        assert read == tokens[:done]
        if burst > 1:
            drawn = self.drawn[request] = generated_alone(read, burst)
            self.stored.update(zip(places[done:], drawn, strict=False))
            return Drawn(drawn, [0.0] * burst)
        texts = [read]
        for at, draft in enumerate(drafts):
            self.stored[places[done + at]] = draft.token
            texts.append([*texts[draft.parent + 1], draft.token])
        tokens = [next_token(text) for text in texts]
        return Drawn(tokens, [0.0] * len(tokens))


def test_decoding_comes_first_and_prompts_have_the_rest():
    scheduler = Scheduler(SMALL)
    memory = Memory(scheduler)
    first = scheduler.submit([1, 2], Sampling(max_tokens=5))
    memory.step()
    second = scheduler.submit(list(range(8)), Sampling(max_tokens=2))
    third = scheduler.submit([7], Sampling(max_tokens=2))
    assert scheduler.plan() == [Chunk(first, 1), Chunk(second, 5)]
    memory.step()
    assert scheduler.plan() == [Chunk(first, 1), Chunk(second, 3), Chunk(third, 1)]


def test_the_youngest_is_preempted_and_generates_the_same():
    scheduler = Scheduler(SMALL)
    memory = Memory(scheduler)
    prompts = [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16], [21, 22, 23, 24]]
    requests = [scheduler.submit(prompt, Sampling(max_tokens=10)) for prompt in prompts]
    while scheduler.busy:
        memory.step()
        scheduler.check()
    assert requests[0].preemptions == 0
    assert requests[2].preemptions > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.generated == generated_alone(prompt, 10)
        assert request.reason == "length"


def test_prompts_that_block_each_other():
    """Two long prompts hold all pages before either is done: the younger starts over."""
    config = EngineConfig(pages=10, page_size=2, max_length=20, max_requests=4, buckets=(4,), burst=1)
    scheduler = Scheduler(config)
    memory = Memory(scheduler)
    requests = [scheduler.submit([start] * 18, Sampling(max_tokens=2)) for start in (1, 2)]
    while scheduler.busy:
        memory.step()
        scheduler.check()
    assert [request.reason for request in requests] == ["length", "length"]
    assert [len(request.generated) for request in requests] == [2, 2]


def test_a_known_prefix_is_not_computed_again():
    scheduler = Scheduler(SMALL)
    memory = Memory(scheduler)
    first = scheduler.submit([1, 2, 3, 4, 5], Sampling(max_tokens=3))
    while scheduler.busy:
        memory.step()
    again = scheduler.submit([1, 2, 3, 4, 5], Sampling(max_tokens=3))
    longer = scheduler.submit([1, 2, 3, 4, *first.generated, 9], Sampling(max_tokens=1))
    assert scheduler.plan() == [Chunk(again, 1), Chunk(longer, 4)]
    assert (again.reused, longer.reused) == (4, 4)
    while scheduler.busy:
        memory.step()
    assert again.generated == first.generated


def test_the_last_token_is_always_computed():
    scheduler = Scheduler(SMALL)
    memory = Memory(scheduler)
    for _ in range(2):
        request = scheduler.submit([1, 2, 3, 4], Sampling(max_tokens=1))
        while scheduler.busy:
            memory.step()
    assert request.reused == 2  # not 4


def test_stop_sequences_and_the_end_of_a_text():
    expected = generated_alone([5], 6)
    scheduler = Scheduler(SMALL, ends={expected[4]})
    memory = Memory(scheduler)
    stopped = scheduler.submit([5], Sampling(max_tokens=6, stop=((249, 249), tuple(expected[1:3]))))
    ended = scheduler.submit([5], Sampling(max_tokens=6))
    while scheduler.busy:
        memory.step()
    assert (stopped.generated, stopped.reason) == (expected[:3], "stop")
    assert (ended.generated, ended.reason) == (expected[:5], "stop")


def test_a_request_cancelled_while_its_step_runs():
    scheduler = Scheduler(SMALL)
    request = scheduler.submit([1, 2, 3, 4], Sampling())
    chunks = scheduler.plan()
    scheduler.cancel(request)
    scheduler.cancel(request)  # has ended already
    assert scheduler.cache.held == 0
    assert scheduler.commit(chunks, [Drawn([7], [0.0])]) == []
    assert request.generated == [] and request.reason == "cancelled" and not scheduler.busy
    scheduler.check()


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], Sampling(), "the prompt is empty"),
        ([1], Sampling(max_tokens=0), "max_tokens is 0"),
        ([1] * 15, Sampling(max_tokens=6), "15 tokens and max_tokens is 6; together at most 20"),
    ],
)
@pytest.mark.unsampled
def test_what_is_refused(prompt: list[int], sampling: Sampling, message: str):
    with pytest.raises(ValueError, match=message):
        Scheduler(SMALL).submit(prompt, sampling)


def test_a_full_queue():
    """One runs and two wait, whether or not the one has begun."""
    scheduler = Scheduler(EngineConfig(max_waiting=2, max_requests=1))
    first, *_ = (scheduler.submit([1], Sampling()) for _ in range(3))
    for _ in range(2):
        with pytest.raises(QueueFullError, match="3 requests run or wait already"):
            scheduler.submit([1], Sampling())
        scheduler.plan()
    scheduler.cancel(first)
    scheduler.submit([1], Sampling())


def guesses(tokens: Sequence[int], number: int) -> tuple[Draft, ...]:
    """Trees of every kind, some of them right: branches of the right tokens and of one that is not."""
    first = next_token([*tokens])
    second = next_token([*tokens, first])
    wrong = (first + 1) % 250
    trees = [
        (),
        (Draft(first, -1), Draft(second, 0)),
        (Draft(wrong, -1), Draft(first, -1), Draft(second, 1)),
        (Draft(first, -1), Draft(wrong, 0), Draft(second, 0)),
        (Draft(wrong, -1), Draft(7, 0)),
    ]
    return trees[len(tokens) % len(trees)][:number]


@pytest.mark.parametrize(("reuse", "drafts", "burst"), [(True, 0, 1), (False, 0, 1), (True, 3, 1), (True, 0, 3), (False, 0, 2)])
@pytest.mark.unsampled
def test_whatever_happens_no_page_is_lost_and_no_request_mixed(reuse: bool, drafts: int, burst: int):
    """500 requests, a fifth of them cancelled at random times, over pages for two or three at once."""
    chance = random.Random(0)
    config = EngineConfig(**{**vars(SMALL), "prefix_reuse": reuse, "drafts": drafts, "burst": burst})
    scheduler = Scheduler(config, propose=guesses)
    memory = Memory(scheduler)
    requests: list[Request] = []
    preempted = reused = bursts = ahead = 0
    while len(requests) < 500 or scheduler.busy:
        quiet = len(requests) % 50 > 35  # then no request comes while another runs
        if len(requests) < 500 and chance.random() < 0.5 and len(scheduler.waiting) < 50 and not (quiet and scheduler.busy):
            start = chance.choice([[1, 2, 3, 4, 5], [1, 2, 3, 9], []])
            prompt = [*start, *(chance.randrange(250) for _ in range(chance.randint(1, 5)))]
            requests.append(scheduler.submit(prompt, Sampling(max_tokens=chance.randint(1, 10))))
        if chance.random() < 0.1 and scheduler.busy:
            scheduler.cancel(chance.choice([*scheduler.waiting, *scheduler.running]))
        busy = scheduler.busy
        chunks = memory.step()
        assert sum(chunk.tokens for chunk in chunks) <= 6 and len(chunks) <= 4
        assert chunks or not busy
        assert len({chunk.burst for chunk in chunks}) <= 1
        bursts += any(chunk.burst > 1 for chunk in chunks)
        ahead += any(chunk.ahead for chunk in chunks)
        scheduler.check()
    assert scheduler.cache.held == 0 and scheduler.cache.available == config.pages
    for request in requests:
        alone = generated_alone(request.tokens[: request.prompt], request.sampling.max_tokens)
        assert request.generated == alone[: len(request.generated)]
        assert request.reason in ("length", "cancelled") and (request.generated == alone) == (request.reason == "length")
        preempted, reused = preempted + request.preemptions, reused + request.reused
    cancelled = sum(request.reason == "cancelled" for request in requests)
    assert 50 < cancelled < 250 and preempted > 50
    assert (reused > 100) == reuse and (bursts > 100) == (ahead > 10) == (burst > 1)
    assert (sum(request.accepted for request in requests) > 100) == bool(drafts)
