"""What is dispatched: a call of an operation with its target and the settings in force."""

from __future__ import annotations

import dataclasses
from typing import Any

from ejkernel.call.arrays import ArraySpec, named
from ejkernel.call.contract import Contract
from ejkernel.call.policy import Policy
from ejkernel.targets import Target


@dataclasses.dataclass(frozen=True)
class Request:
    """The static part of one invocation: what, where, and under which settings.

    Attributes:
        operation: the operation.
        call: its canonical call.
        target: where it will run.
        policy: who may run it.
        config: override for the chosen implementation's config.
        native_only: why only implementations that XLA itself partitions will do here; empty if any will.
    """

    operation: Contract
    call: Any
    target: Target
    policy: Policy
    config: Any = None
    native_only: str = ""

    def reshaped(self, inputs: Any) -> Request:
        """The same request for arrays of other shapes (a folded batch, one shard)."""
        specs = {name: ArraySpec.of(value) for name, value in named(inputs)}
        return dataclasses.replace(self, call=dataclasses.replace(self.call, **specs))

    def saving_residuals(self) -> Request:
        return dataclasses.replace(self, call=dataclasses.replace(self.call, save_residuals=True))
