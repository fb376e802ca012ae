"""`with ejkernel.overlay({...})`: configs for every call inside the block."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Mapping
from typing import Any

from ejkernel._plugins.catalog import OPERATIONS
from ejkernel._plugins.registry import kernel_registry
from ejkernel.call.policy import use
from ejkernel.configs.portable import BaseOperationConfig
from ejkernel.configs.spaces import as_setting
from ejkernel.errors import invalid, suggestion, wrong_type
from ejkernel.plugin import Phase


@dataclasses.dataclass(frozen=True)
class Selector:
    """What one line of an overlay speaks of: `operation[/implementation][:phase]`."""

    operation: str
    implementation: str | None = None
    phase: str | None = None

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Selector:
        """Read it without asking whether such things exist."""
        rest, _, phase = text.partition(":")
        operation, _, implementation = rest.partition("/")
        return cls(operation, implementation or None, phase or None)

    def covers(self, implementation: str, operation: str, phase: Phase) -> bool:
        """Whether it speaks of this implementation of this phase."""
        return self.operation == operation and self.implementation in (None, implementation) and self.phase in (None, phase)

    def check(self) -> None:
        """Refuse an operation, implementation or phase that does not exist."""
        if self.operation not in OPERATIONS:
            raise invalid("overlay", repr(self.operation), "the name of an operation" + suggestion(self.operation, OPERATIONS))
        if self.phase not in (None, "forward", "backward"):
            raise invalid("overlay", f"phase {self.phase!r}", "'forward' or 'backward' after ':'")
        phases: tuple[Any, ...] = ("forward", "backward") if self.phase is None else (self.phase,)
        known = sorted({c.id for phase in phases for c in kernel_registry.candidates(self.operation, phase)})
        if self.implementation is not None and self.implementation not in known:
            expected = f"an implementation of {self.operation} ({', '.join(known) or 'none is installed'})"
            raise invalid("overlay", repr(self.implementation), expected + suggestion(self.implementation, known))

    def __str__(self) -> str:
        implementation = f"/{self.implementation}" if self.implementation else ""
        return self.operation + implementation + (f":{self.phase}" if self.phase else "")


@contextlib.contextmanager
def overlay(configs: Mapping[str, Any]) -> Generator[None]:
    """Run every call inside the `with` block with these configs, unless the call has a `cfg=` of its own.

    Blocks nest: the innermost that speaks of a call decides. Compiled programs are traced again under another overlay. Nothing
    is written anywhere.

    Args:
        configs: from `"operation"` or `"operation/implementation"`, with or without `":forward"` or `":backward"` behind it,
            to the config dataclass of the implementation or a mapping of some of its knobs (the others come from its
            heuristic). A line for an operation must fit the implementation that runs; one for an implementation waits until
            that is chosen.

    Raises:
        ValueError: unknown operation, implementation or phase; when a call is made, a config that does not fit.
        TypeError: a config is neither a dataclass nor a mapping.

    Example:
        >>> import ejkernel, jax
        >>> with ejkernel.overlay({}):
        ...     ejkernel.rms_norm(jax.numpy.ones((2, 4))).shape
        (2, 4)
    """
    if not isinstance(configs, Mapping):
        raise wrong_type("overlay", repr(configs), "a mapping from operations to configs")
    lines = []
    for name, config in configs.items():
        if not isinstance(name, str):
            raise wrong_type("overlay", repr(name), "names such as 'rms_norm' or 'rms_norm/triton:backward' as keys")
        Selector.parse(name).check()
        if isinstance(config, BaseOperationConfig) and str(config.platform).lower() != "auto":
            raise invalid(
                f"overlay[{name!r}]",
                f"platform={config.platform!r}",
                "'auto'",
                remedy="choose platforms with ejkernel.use(...)",
            )
        lines.append((name, as_setting(f"overlay[{name!r}]", config)))
    # More specific lines of one block come first, as the first that answers decides.
    lines.sort(key=lambda line: -(line[0].count("/") + line[0].count(":")))
    with use(overlay=lines):
        yield
