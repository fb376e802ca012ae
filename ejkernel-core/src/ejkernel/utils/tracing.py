"""Is a program being traced?"""

from __future__ import annotations

from jax.extend.core import find_top_trace


def is_tracing() -> bool:
    """Whether JAX traces in this thread, be it eagerly: under `grad`, `jvp` or `vmap` alone new arrays are no tracers."""
    return type(find_top_trace(())).__name__ != "EvalTrace"
