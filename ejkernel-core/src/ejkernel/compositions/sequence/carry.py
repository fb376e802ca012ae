"""Which sequences go on from one device to the next, and in which order the devices hold the tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from ejkernel.call.partition import vary_like
from ejkernel.compositions.axes import Axes


@dataclasses.dataclass(frozen=True)
class Devices:
    """Those along `axes`, `size` of them."""

    axes: Axes
    size: int

    def rank(self, reverse: bool) -> Any:
        """How many devices come before this one."""
        index = jax.lax.axis_index(self.axes)
        return self.size - 1 - index if reverse else index

    def gathered(self, arrays: Any, reverse: bool) -> Any:
        """Every device's arrays `[devices, ...]`, of one dtype, the first one's first; exchanged once, as one array."""
        flat, unravel = ravel_pytree(arrays)
        found = jax.lax.all_gather(flat, self.axes)
        return jax.vmap(unravel)(jnp.flip(found, 0) if reverse else found)

    def of_last(self, states: Any, ends: Any) -> Any:
        """States `[b, n, ...]` of the devices where their sequences end, bool `[n]` or `[b, n]`; alike on all devices."""
        return jax.lax.psum(jnp.where(_beside(ends, states), states, jnp.zeros_like(states)), self.axes)


@dataclasses.dataclass(frozen=True)
class Shards(Devices):
    """A sequence split evenly over the devices; `length` tokens on each.

    Attributes:
        seg_ids: ids of this device's tokens `[1 or B, T]`, or None.
        bounds: cumulative lengths of the whole sequence's packed ones, int32 `[n + 1]`, or None.
    """

    length: int
    seg_ids: Any = None
    bounds: Any = None

    @property
    def start(self) -> Any:
        """Where this device's tokens begin in the whole sequence."""
        return jax.lax.axis_index(self.axes) * self.length

    @property
    def local_bounds(self) -> Any:
        """The bounds as this device sees them: sequences without tokens here are empty."""
        return None if self.bounds is None else jnp.clip(self.bounds - self.start, 0, self.length)


class Carry(NamedTuple):
    """Of this device's n states `[b, n, ...]`, bool `[1 or b, n]`:

    Attributes:
        fresh: those that start from the initial state here.
        entering: those that go on here from the device before.
        leaving: those that the device after goes on with, if it has tokens of them.
        ends: those that are final here.
    """

    fresh: Any
    entering: Any
    leaving: Any
    ends: Any

    @property
    def passes(self) -> Any:
        """Whether the state that enters is the one that leaves, `[1 or b]`."""
        return jnp.any(self.entering & self.leaving, axis=1)

    @property
    def back(self) -> Carry:
        """Of the gradients of states, which pass the other way."""
        return self._replace(entering=self.leaving, leaving=self.entering)

    def initial(self, states: Any) -> Any:
        """The given states `[b, n, ...]` where they start here, else zeros."""
        return jnp.where(_beside(self.fresh, states), states, jnp.zeros_like(states))

    def left(self, states: Any) -> Any:
        """The one of `[b, n, ...]` that leaves, `[b, ...]`; zeros where none does."""
        return jnp.where(_beside(self.leaving, states), states, jnp.zeros_like(states)).sum(axis=1)

    def placed(self, state: Any) -> Any:
        """A state `[b, ...]` as the one of `[b, n, ...]` that enters, zeros as the others."""
        state = state[:, None]
        return jnp.where(_beside(self.entering, state), state, jnp.zeros_like(state))


def carry_of(shards: Shards, reverse: bool) -> Carry:
    """What passes between devices of a recurrence."""
    rank = shards.rank(reverse)
    if shards.bounds is not None:
        return _of_bounds(shards, reverse)
    first, last = jnp.reshape(rank == 0, (1, 1)), jnp.reshape(rank == shards.size - 1, (1, 1))
    joined = ~first
    if shards.seg_ids is not None:
        joined = joined & _joined(shards, reverse)[:, None]
    return Carry(first, joined, ~last, last)


def _of_bounds(shards: Shards, reverse: bool) -> Carry:
    begins, ends = shards.bounds[None, :-1], shards.bounds[None, 1:]
    start, stop = shards.start, shards.start + shards.length
    over_start, over_stop = (begins < start) & (start < ends), (begins < stop) & (stop < ends)
    entering, leaving = (over_stop, over_start) if reverse else (over_start, over_stop)
    last_token = begins if reverse else ends - 1
    holder = jnp.clip(last_token // max(shards.length, 1), 0, shards.size - 1)
    return Carry(~entering, entering, leaving, holder == jax.lax.axis_index(shards.axes))


def _joined(shards: Shards, reverse: bool) -> Any:
    """Whether the state before this device's tokens is theirs, `[1 or B]`: the last token that takes part before has their id."""
    ids = vary_like(shards.seg_ids, jax.lax.axis_index(shards.axes))
    part = ids >= 0
    own = jnp.any(part, axis=1)
    lowest, highest = jnp.argmax(part, axis=1), ids.shape[1] - 1 - jnp.argmax(part[:, ::-1], axis=1)
    at_lowest, at_highest = (jnp.take_along_axis(ids, place[:, None], axis=1)[:, 0] for place in (lowest, highest))
    first, last = (at_highest, at_lowest) if reverse else (at_lowest, at_highest)
    lasts = shards.gathered(jnp.where(own, last, -1), reverse)
    rank, before = shards.rank(reverse), jnp.zeros_like(own)
    previous = jnp.zeros_like(last)
    for device in range(shards.size):
        used = (lasts[device] >= 0) & (device < rank)
        previous, before = jnp.where(used, lasts[device], previous), before | used
    return ~own | ~before | (first == previous)


def _beside(flags: Any, array: Any) -> Any:
    """Flags of leading axes, with the rank of the array."""
    return flags.reshape(*flags.shape, *[1] * (array.ndim - flags.ndim))
