"""Every environment variable that ejkernel reads: the one place where they are listed and described."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from ejkernel.errors import suggestion

PREFIX = "EJKERNEL_"
_OFF = ("", "0", "false", "no", "off")


@dataclasses.dataclass(frozen=True)
class Variable:
    """An environment variable.

    Attributes:
        name: as it is written in the environment.
        meaning: what it does, with the form of its value.
        default: what holds where it is not set, in words.
    """

    name: str
    meaning: str
    default: str


@dataclasses.dataclass(frozen=True)
class Setting:
    """A variable and what it is set to in this process. `source` is "environment" or "default"."""

    variable: Variable
    value: str | None
    source: str

    def to_dict(self) -> dict[str, str | None]:
        return {**dataclasses.asdict(self.variable), "value": self.value, "source": self.source}


VARIABLES = (
    Variable("EJKERNEL_PLATFORM", "the only platforms to try, per operation: `flash_attention=triton,xla;*=xla`", "automatic"),
    Variable("EJKERNEL_FORBID", "platforms that must not run: `cuda,triton`", "none"),
    Variable("EJKERNEL_PLUGINS", "the only plugins to load: `xla,triton`; empty loads none", "all installed"),
    Variable("EJKERNEL_STRICT", "`1` raises where a plugin cannot be used, instead of warning", "0"),
    Variable(
        "EJKERNEL_NONDETERMINISTIC",
        "`1` admits kernels that were asked for by name and add up in any order, so that repeats may differ in their last bits",
        "0",
    ),
    Variable("EJKERNEL_TYPECHECK", "`1` checks arguments and results of every call against their annotations; slow", "0"),
    Variable(
        "EJKERNEL_CACHE_DIR", "directory of tuned configs, and of kernels compiled and lowered", "the user's cache directory"
    ),
    Variable("EJKERNEL_KERNELS", "folders that `ejkernel compile` made, read where the cache has no kernel: `/a:/b`", "none"),
    Variable("EJKERNEL_LOG", "`dispatch` writes a line to stderr for each new decision of what runs a call", "nothing"),
    Variable("EJKERNEL_TRITON_INTERPRET", "`1` runs Triton kernels in Triton's interpreter on the host; very slow", "0"),
)


def is_on(name: str) -> bool:
    """Whether a variable that switches something on does so in this process."""
    return os.environ.get(name, "").strip().lower() not in _OFF


def read_settings(environment: Mapping[str, str] | None = None) -> tuple[Setting, ...]:
    """Every variable with its value and where that comes from."""
    known = os.environ if environment is None else environment
    return tuple(
        Setting(variable, known.get(variable.name), "environment" if variable.name in known else "default")
        for variable in VARIABLES
    )


def unknown_settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables with our prefix that nothing reads, each with a hint at what may have been meant."""
    known = {variable.name for variable in VARIABLES}
    found = sorted(name for name in (os.environ if environment is None else environment) if name.startswith(PREFIX))
    return {name: suggestion(name, known).removeprefix("; ") for name in found if name not in known}
