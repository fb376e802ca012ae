"""Adapters of other people's kernels. None of them is a dependency; each serves where its packages are installed."""

from __future__ import annotations

from ejkernel_bench.peers._find import known_peers, wanted_peers
from ejkernel_bench.peers._peer import Built, Peer, beyond

__all__ = ["Built", "Peer", "beyond", "known_peers", "wanted_peers"]
