"""Which request holds which page. Pages are counted here, on the host; what they hold is on the device.

A full page is known by the hash of all tokens up to its end, so a request whose prompt begins as an earlier one did takes that
one's pages. Pages that no request holds stay known until they are needed for something else, the least recently used first.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np


class PageCache:
    """Reference counts of pages, the pages by what they hold, and those that are free.

    A page is free, or idle (known, and held by no request), or held by as many requests as its count says.
    """

    def __init__(self, pages: int, page_size: int, *, reuse: bool = True) -> None:
        self.pages, self.page_size, self.reuse = pages, page_size, reuse
        self._free = list(reversed(range(pages)))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._counts: dict[int, int] = {}
        self._by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that no request holds."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return len(self._counts)

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens need."""
        return -(-tokens // self.page_size)

    def hashes(self, tokens: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
        """One for each full page of the tokens, each of everything before it too; `known` are the first of them."""
        chain = list(known)
        for start in range(len(chain) * self.page_size, len(tokens) - self.page_size + 1, self.page_size):
            page = np.asarray(tokens[start : start + self.page_size], np.int32).tobytes()
            chain.append(hashlib.blake2b((chain[-1] if chain else b"") + page, digest_size=16).digest())
        return chain

    def known(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the longest prefix that is known; takes none."""
        found: list[int] = []
        for page in (self._by_hash.get(value) for value in hashes if self.reuse):
            if page is None:
                break
            found.append(page)
        return found

    def share(self, pages: Sequence[int]) -> None:
        """Hold known pages once more."""
        for page in pages:
            self._idle.pop(page, None)
            self._counts[page] = self._counts.get(page, 0) + 1

    def take(self, number: int) -> list[int]:
        """Hold so many pages whose content does not matter; `number` is at most `available`."""
        return [self._take_one() for _ in range(number)]

    def _take_one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._by_hash[self._hashes.pop(page)]
        self._counts[page] = 1
        return page

    def publish(self, page: int, value: bytes) -> None:
        """Make a full page known. Where another page holds the same, that one stays the known one."""
        if self.reuse and page not in self._hashes and value not in self._by_hash:
            self._by_hash[value], self._hashes[page] = page, value

    def forget(self, pages: Sequence[int]) -> None:
        """No longer know these pages, so that nobody shares them any more; who holds them keeps them."""
        for page in pages:
            if page in self._hashes:
                del self._by_hash[self._hashes.pop(page)]

    def release(self, pages: Sequence[int]) -> None:
        """Hold pages of one request, in order, once less. Its last pages are forgotten first: others need those before them."""
        for page in reversed(pages):
            self._counts[page] -= 1
            if not self._counts[page]:
                del self._counts[page]
                if page in self._hashes:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def check(self, holders: Sequence[Sequence[int]] = ()) -> None:
        """That every page is accounted for once, and that `holders`, the pages of each request, are all that hold any.

        Raises:
            RuntimeError: a page is lost, or counted wrongly.
        """
        counts = Counter(page for pages in holders for page in pages)
        if dict(counts) != self._counts:
            raise RuntimeError(f"requests hold {dict(counts)}, and the counts say {self._counts}")
        if sorted([*self._free, *self._idle, *self._counts]) != list(range(self.pages)):
            raise RuntimeError(f"free {self._free}, idle {[*self._idle]} and held {[*self._counts]} are not {self.pages} pages")
        if {
            page: value for value, page in self._by_hash.items()
        } != self._hashes or not self._hashes.keys() >= self._idle.keys():
            raise RuntimeError("what is known by hash and by page differs")
