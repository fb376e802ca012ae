"""Ring attention as something that is invoked as an `Operation` is, over the mesh axes of a surrounding `shard_map`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from ejkernel._dispatch.explanation import capturing
from ejkernel._pipeline.operation import static_options
from ejkernel.call.policy import Policy, policy_for_call
from ejkernel.call.request import Request
from ejkernel.call.traced import split_traced, with_traced
from ejkernel.compositions.axes import Axes, axis_size
from ejkernel.compositions.ring.all_to_all import attend_by_heads
from ejkernel.compositions.ring.bind import bound_shard
from ejkernel.compositions.ring.plan import ALL_TO_ALL, plan
from ejkernel.compositions.ring.run import Ring, run
from ejkernel.configs.spaces import as_setting
from ejkernel.operations.flash_attention.interface import OPERATION
from ejkernel.targets.target import resolve_target


@dataclasses.dataclass(frozen=True)
class RingAttentionOver:
    """Attention whose sequence is split over mesh axes; dispatched and explained as its inner step, `flash_attention`."""

    axes: Axes
    layout: str
    strategy: str

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        OPERATION.check_values(arrays)

    def invoke(
        self, arrays: Mapping[str, Any], options: Mapping[str, Any], *, platform: Any = None, cfg: Any = None, form: Any = None
    ) -> Any:
        """Run on the shards of this device. On an axis of one device this is local attention."""
        if capturing():
            return OPERATION.invoke(arrays, options, platform=platform, cfg=cfg, form=form)
        size = axis_size(self.axes)
        if size == 1:
            return OPERATION.invoke(arrays, options, platform=platform, cfg=cfg, form=form)
        if self.strategy == ALL_TO_ALL:
            return attend_by_heads(self.axes, size, arrays, options, platform=platform, cfg=cfg)
        policy = policy_for_call(OPERATION.name, platform)
        target = resolve_target(jax.tree.leaves(arrays), policy.target)
        config = None if cfg is None else as_setting("cfg", cfg)
        traced, options = split_traced(options, OPERATION.traceable)
        return _invoke(_Invocation(self, size, static_options(options), policy, target, config), {**arrays, **traced})


@dataclasses.dataclass(frozen=True)
class _Invocation:
    """Everything static about one call; the key under which its program is cached."""

    ring: RingAttentionOver
    size: int
    options: tuple[tuple[str, Any], ...]
    policy: Policy
    target: Any
    config: Any


@functools.partial(jax.jit, static_argnums=0)
def _invoke(invocation: _Invocation, arrays: dict[str, Any]) -> Any:
    axes, layout, size = invocation.ring.axes, invocation.ring.layout, invocation.size
    bound = bound_shard(axes, size, layout, **with_traced(arrays, dict(invocation.options)))
    request = Request(OPERATION, bound.call, invocation.target, invocation.policy, invocation.config)
    return bound.finish(run(Ring(request, axes, size, layout, plan(bound.call, size, layout)), bound.inputs))
