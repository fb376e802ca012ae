"""The peers that there are adapters for, and those that are installed here."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from ejkernel.errors import invalid, suggestion
from ejkernel_bench.peers._peer import Peer

_MODULES = (
    "jax_attention",
    "jax_textbook",
    "jax_scan",
    "jax_linear_attention",
    "jax_ragged_dot",
    "jax_pallas",
    "jax_tokamax",
    "torch_attention",
    "torch_rows",
    "torch_liger",
    "torch_fla",
    "torch_mamba",
    "torch_flashinfer",
)


def known_peers() -> tuple[Peer, ...]:
    """Every peer that there is an adapter for. Only the adapters are imported."""
    return tuple(peer for name in _MODULES for peer in importlib.import_module(f"ejkernel_bench.peers.{name}").PEERS)


def wanted_peers(names: Sequence[str] | None) -> tuple[tuple[Peer, ...], dict[str, str]]:
    """The peers of these names (None: of all) that are there, and for each of the others why it is not.

    Raises:
        ValueError: a name is unknown, or of a peer that is not there.
    """
    peers = {peer.name: peer for peer in known_peers()}
    for name in names or ():
        if name not in peers:
            raise invalid("--peer", repr(name), f"one of {', '.join(peers)}" + suggestion(name, peers))
    chosen = [peer for peer in peers.values() if names is None or peer.name in names]
    missing = {peer.name: reason for peer in chosen if (reason := peer.missing())}
    if names and missing:
        name, reason = next(iter(missing.items()))
        raise invalid("--peer", repr(name), f"a peer that is there ({reason})")
    return tuple(peer for peer in chosen if peer.name not in missing), missing
