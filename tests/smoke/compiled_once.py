"""Compile a small call of every public function, then call the same programs again, and print what was traced or compiled anew.

What is imported while a program is traced may change what JAX compares when it looks for one that it has: every program that was
compiled before would be compiled again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import monitoring

sys.path.insert(0, str(Path(__file__).parents[1] / "settings"))
jnp.ones(1).block_until_ready()  # JAX is ready; nothing of ours is imported

compiled: list[str] = []
monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **more: (
        compiled.append(name) if name.endswith(("jaxpr_trace_duration", "backend_compile_duration")) else None
    )
)


def attended(query):
    import ejkernel

    return ejkernel.flash_attention(query, query, query, causal=True)


def main() -> None:
    found: dict[str, list[str]] = {}
    import ejkernel  # noqa: F401 - discovers the plugins; all else is imported in the first trace

    query = jnp.ones((1, 8, 2, 16))
    first = jax.jit(attended)
    first(query)
    programs = {"flash_attention, first of all": (first, query)}

    from public_calls import CALLS

    for call in CALLS.values():
        arrays = call.in_dtype(jnp.float32)
        program = jax.jit(call.run)
        program(arrays)
        programs[call.name] = program, arrays
    for name, (program, arrays) in programs.items():
        compiled.clear()
        program(arrays)
        if compiled:
            found[name] = list(compiled)
    print(json.dumps({"programs": len(programs), "again": found}))


if __name__ == "__main__":
    main()
