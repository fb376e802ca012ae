"""What a benchmark is asked to do."""

from __future__ import annotations

import dataclasses

from ejkernel.errors import invalid, suggestion
from ejkernel.testing.problem import DTYPES

SIZES = {"cpu": "bench-cpu", "gpu": "bench", "test": "", "gpu-float8": "bench-float8"}
"""The sizes of cases, and how those of each are tagged. Limits are those of the dtypes that are asked for, not of float8."""

PHASES = ("forward", "backward", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run, against whom, and how often.

    Attributes:
        operations: their names; none means all.
        size: `"cpu"`, `"gpu"`, `"gpu-float8"` (operands in float8), `"test"` (the small cases of the conformance suite), or
            `"auto"`: what the default device is.
        case: a pattern, as of a shell, that names of cases match.
        dtypes: of the floating arrays; none means float32 on a CPU and bfloat16 elsewhere.
        phases: of `"forward"`, `"backward"` and `"forward+backward"`.
        platforms: ours, by name or by implementation; none means all.
        peers: names of peers; none are found with an empty tuple, None means every one that is installed.
        rounds: timed runs of each.
        input_sets: sets of inputs that timed runs rotate over.
        compile_rounds: timed compilations of each; the median counts.
    """

    operations: tuple[str, ...] = ()
    size: str = "auto"
    case: str = "*"
    dtypes: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("forward", "backward")
    platforms: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None
    rounds: int = 9
    input_sets: int = 3
    compile_rounds: int = 1

    def __post_init__(self) -> None:
        known = {"--size": ((self.size,), ("auto", *SIZES)), "--dtype": (self.dtypes, DTYPES), "--phase": (self.phases, PHASES)}
        for name, (values, allowed) in known.items():
            for value in values:
                if value not in allowed:
                    raise invalid(name, repr(value), f"one of {', '.join(allowed)}" + suggestion(value, allowed))
        for name in ("rounds", "input_sets", "compile_rounds"):
            if getattr(self, name) < 1:
                raise invalid(name, getattr(self, name), "a value >= 1")
        if not self.phases:
            raise invalid("--phase", "none", "at least one phase")

    def on(self, backend: str) -> Settings:
        """The same with everything that depends on the device said."""
        size = ("cpu" if backend == "cpu" else "gpu") if self.size == "auto" else self.size
        dtypes = self.dtypes or (("float32",) if backend == "cpu" else ("bfloat16",))
        return dataclasses.replace(self, size=size, dtypes=dtypes)
