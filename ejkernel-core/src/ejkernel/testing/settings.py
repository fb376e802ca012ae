"""JAX's settings under which tests run: several devices on a CPU, no implicit promotion.

A `conftest.py` calls both in `pytest_configure`, which is before JAX looks for devices:

    def pytest_configure(config):
        host_devices()
        config.add_cleanup(promote_nothing())

The conformance suite's plugin does so for runs with `--ejkernel-platform`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

__all__ = ["host_devices", "promote_nothing"]

_FLAG = "--xla_force_host_platform_device_count"
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds"


def host_devices(count: int = 8) -> None:
    """Have a CPU show so many devices, in this process and in those it starts, unless `XLA_FLAGS` says how many already.

    Does nothing once JAX has looked for devices. XLA then has as many threads too, of which the interpreter of Mosaic GPU kernels
    blocks one per warpgroup of a cluster. On a busy machine devices wait for each other: XLA would end the process after 40 s.
    """
    for flag, value in ((_FLAG, count), (_PATIENCE, 300)):
        flags = os.environ.get("XLA_FLAGS", "")
        if flag not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {flag}={value}".strip()


def promote_nothing() -> Callable[[], None]:
    """Make implicit promotion of ranks and dtypes an error from here on, as in programs of users who want it so.

    Returns:
        What restores the settings as they were, for tests that run pytest inside of their own.
    """
    import jax

    strict = {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"}
    before = {name: getattr(jax.config, name) for name in strict}

    def update(values: dict[str, Any]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)

    update(strict)
    return functools.partial(update, before)
