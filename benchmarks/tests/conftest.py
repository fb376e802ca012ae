"""The fixtures of `made_up_peers`. Without `ejkernel-bench` the root's conftest passes these tests over."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("ejkernel_bench") is not None:
    from made_up_peers import benchmark as benchmark, world as world
