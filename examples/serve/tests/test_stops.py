"""Stop sequences against the definition, and their cost."""

from __future__ import annotations

import random
import time

from ejkernel_serve.stops import StopMatcher
from ejkernel_serve.text import TextStream


def test_as_defined():
    """With two letters, so that sequences overlap with themselves and with each other."""
    rng = random.Random(0)
    for _ in range(200):
        stops = [tuple(rng.choices((0, 1), k=rng.randint(1, 7))) for _ in range(rng.randint(0, 4))]
        matcher, read = StopMatcher(stops), ()
        for token in rng.choices((0, 1, 2), (5, 5, 1), k=60):
            matcher.feed(token)
            read = (*read, token)
            assert matcher.matched == max((len(stop) for stop in stops if read[-len(stop) :] == stop), default=0)
            begun = (size for stop in stops for size in range(1, len(stop)) if read[-size:] == stop[:size])
            assert matcher.begun == max(begun, default=0)


def test_the_cost_is_linear():
    """Each of these takes minutes if a token costs as much as a sequence is long."""
    size = 100_000
    alike, last = (97,) * size, (*(97,) * (size - 1), 98)
    start = time.perf_counter()
    stream = TextStream((alike, last))
    for _ in range(size - 1):
        assert stream.feed(97, None).text == ""
    assert stream.feed(99, None).text == "a" * (size - 1) + "c"
    assert time.perf_counter() - start < 10
