"""Calls whose states are `[b, n, H, v, d]`, run as those whose states are `[b, n, H, d, v]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ejkernel.operations.linear_recurrence.interface import (
    LinearRecurrenceCall,
    LinearRecurrenceInputs,
    LinearRecurrenceOutputs,
)


def swapped(state: Any) -> Any:
    """A state with its last two axes exchanged, where there is one."""
    return None if state is None else state.swapaxes(-1, -2)


def key_first(call: LinearRecurrenceCall) -> LinearRecurrenceCall:
    """The call whose states begin with the channels of key."""
    spec = call.initial_state
    if spec is not None:
        *leading, channels, width = spec.shape
        spec = dataclasses.replace(spec, shape=(*leading, width, channels))
    return dataclasses.replace(call, transposed_state=False, initial_state=spec)


def with_key_first(
    call: LinearRecurrenceCall,
    inputs: LinearRecurrenceInputs,
    run: Callable[[LinearRecurrenceCall, LinearRecurrenceInputs], LinearRecurrenceOutputs],
) -> LinearRecurrenceOutputs:
    """The outputs of a call with transposed states."""
    outputs = run(key_first(call), inputs._replace(initial_state=swapped(inputs.initial_state)))
    return outputs._replace(final_state=swapped(outputs.final_state))


def pulled_with_key_first(
    call: LinearRecurrenceCall,
    inputs: LinearRecurrenceInputs,
    cotangents: LinearRecurrenceOutputs,
    run: Callable[[LinearRecurrenceCall, LinearRecurrenceInputs, LinearRecurrenceOutputs], LinearRecurrenceInputs],
) -> LinearRecurrenceInputs:
    """The gradients of a call with transposed states."""
    found = run(
        key_first(call),
        inputs._replace(initial_state=swapped(inputs.initial_state)),
        cotangents._replace(final_state=swapped(cotangents.final_state)),
    )
    return found._replace(initial_state=swapped(found.initial_state))
