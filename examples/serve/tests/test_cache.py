"""Pages and their counts, without a model."""

from __future__ import annotations

import pytest

from ejkernel_serve.cache import PageCache


def publish(cache: PageCache, tokens: list[int]) -> list[int]:
    """Pages of a request that computed all its tokens and still holds them."""
    pages = cache.take(cache.pages_of(len(tokens)))
    for page, value in zip(pages, cache.hashes(tokens), strict=False):
        cache.publish(page, value)
    return pages


def test_a_prefix_is_known_up_to_its_last_full_page():
    cache = PageCache(8, 4)
    pages = publish(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.known(cache.hashes([1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13])) == pages[:2]
    assert cache.known(cache.hashes([1, 2, 3, 4, 5, 6, 0, 8])) == pages[:1]
    assert cache.known(cache.hashes([5, 6, 7, 8])) == []  # the same page after something else
    assert cache.known(cache.hashes([1, 2, 3])) == []
    cache.check([pages])


def test_pages_outlive_their_request_until_they_are_needed():
    cache = PageCache(4, 2)
    first, second = publish(cache, [1, 2, 3, 4]), publish(cache, [5, 6])
    cache.release(first)
    cache.release(second)
    assert cache.available == 4 and cache.held == 0
    cache.share(cache.known(cache.hashes([1, 2])))  # used again, so the youngest now
    cache.release(first[:1])
    taken = cache.take(3)  # the free one, then those that nobody used for longest: the end of the first, the second
    assert cache.known(cache.hashes([1, 2, 3, 4])) == first[:1]
    assert cache.known(cache.hashes([5, 6])) == []
    cache.check([taken])


def test_a_page_that_two_requests_share_is_free_after_both():
    cache = PageCache(2, 2)
    pages = publish(cache, [1, 2])
    cache.share(pages)
    cache.release(pages)
    assert cache.available == 1
    cache.check([pages])
    cache.release(pages)
    assert cache.available == 2


def test_two_pages_with_the_same_tokens():
    """Computed in the same step. The first is the known one; the other is free when its request ends."""
    cache = PageCache(2, 2)
    first, second = publish(cache, [1, 2]), publish(cache, [1, 2])
    cache.release(second)
    assert cache.known(cache.hashes([1, 2])) == first
    assert cache.take(1) == second
    cache.check([first, second])


def test_without_reuse_nothing_is_known():
    cache = PageCache(2, 2, reuse=False)
    pages = publish(cache, [1, 2])
    assert cache.known(cache.hashes([1, 2])) == []
    cache.release(pages)
    cache.check()


def test_a_lost_page_is_found():
    cache = PageCache(2, 2)
    cache.take(1)
    with pytest.raises(RuntimeError, match=r"requests hold \{\}, and the counts say \{0: 1\}"):
        cache.check()
