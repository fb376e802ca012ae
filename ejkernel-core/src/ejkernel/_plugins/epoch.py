"""The age of the registry as part of JAX's trace context, so that what was compiled under an older one is traced again."""

from __future__ import annotations

import jax

_epoch = jax.make_user_context(default_value=0)


def bump_epoch(epoch: int) -> None:
    """Make every compiled program that dispatched under an older registry be traced again."""
    _epoch.set_global(epoch)  # pyright: ignore[reportAttributeAccessIssue]
