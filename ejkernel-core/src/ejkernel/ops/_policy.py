"""What a selector may do when no stored config is found."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any, Literal, Protocol

from ejkernel.errors import invalid


@dataclasses.dataclass(frozen=True)
class AutotunePolicy:
    """What a selector may do when neither `cfg=` nor an overlay nor a stored entry has a config.

    Attributes:
        allow_autotune: whether it may tune at all.
        allow_heuristics: whether the implementation's rule of thumb may answer; if not, a call without a config is an error.
        cache_miss_fallback: "heuristics", or "autotune" to tune before the call runs. Nothing is tuned while JAX traces.
    """

    allow_autotune: bool = True
    allow_heuristics: bool = True
    cache_miss_fallback: Literal["heuristics", "autotune"] = "heuristics"

    def __post_init__(self) -> None:
        if self.cache_miss_fallback not in ("heuristics", "autotune"):
            raise invalid("cache_miss_fallback", repr(self.cache_miss_fallback), "'heuristics' or 'autotune'")

    @property
    def tunes(self) -> bool:
        """Whether a miss is tuned."""
        return self.allow_autotune and self.cache_miss_fallback == "autotune"


class HasPolicy(Protocol):
    """A `ConfigSelectorChain`, as far as its policy goes."""

    policy: AutotunePolicy


@contextlib.contextmanager
def policy_override(selector: HasPolicy, **updates: Any) -> Generator[AutotunePolicy]:
    """Change fields of a selector's policy inside the `with` block, for every thread that uses the selector.

    Raises:
        TypeError: a field that `AutotunePolicy` lacks.
    """
    before = selector.policy
    selector.policy = dataclasses.replace(before, **updates)
    try:
        yield selector.policy
    finally:
        selector.policy = before
