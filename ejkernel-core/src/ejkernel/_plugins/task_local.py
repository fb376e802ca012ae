"""A setting that holds for a `with` block of one thread or one asyncio task, and that compiled programs depend on.

Two mechanisms are needed. Only a `jax.make_user_context` is part of the key under which `jax.jit` finds compiled programs, but it
belongs to the thread: a coroutine that awaits inside a `with` block would leave its setting to every other task of the event loop,
and two blocks that end in another order than they began would restore each other's. Only a `ContextVar` follows tasks, but
`jax.jit` knows nothing of it. So the variable is what holds, and the thread's context is made to follow it whenever a block
begins or ends and whenever the setting is read, which every public function does before it enters `jax.jit`.

One case cannot be repaired: a user's own `jax.jit` looks its key up before any code of ours runs. Where it then traces under a
setting that is not this task's, the program would be kept under a wrong key, and reading the setting raises.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.errors import TracingError

_all: list[TaskLocal] = []


class TaskLocal:
    """One such setting; None where no block is entered."""

    def __init__(self, name: str) -> None:
        self._variable: contextvars.ContextVar[Any] = contextvars.ContextVar(name, default=None)
        self._of_thread: Any = jax.make_user_context(default_value=None)
        _all.append(self)

    def get(self) -> Any:
        """The value of the innermost block of this task.

        Raises:
            TracingError: `jax.jit` is tracing under another task's value.
        """
        value = self._variable.get()
        if value is not self._of_thread.value:
            if isinstance(jnp.zeros(()), jax.core.Tracer):  # pyright: ignore[reportAttributeAccessIssue]
                self.follow()
                raise TracingError(
                    "use: jax.jit is tracing under the settings of another asyncio task or thread, which awaits inside of its "
                    "`with` block, or which handed this work to another thread; enter ejkernel.use(...), ejkernel.overlay(...) or "
                    "`with result:` right around the call of the compiled function, without awaiting inside; calling again works"
                )
            self.follow()
        return value

    @contextlib.contextmanager
    def holding(self, value: Any) -> Generator[None]:
        """Hold a value inside the `with` block."""
        token = self._variable.set(value)
        self.follow()
        try:
            yield
        finally:
            # An asynchronous generator may be closed by another task, in whose context nothing was set.
            with contextlib.suppress(ValueError):
                self._variable.reset(token)
            self.follow()

    def follow(self) -> None:
        """Bring the thread's context in line with this task's value."""
        value = self._variable.get()
        if value is not self._of_thread.value:
            self._of_thread(value).__enter__()  # never left: the next value takes its place


def follow_all() -> None:
    """Bring every setting of this thread in line with this task's values."""
    for setting in _all:
        setting.follow()


# Made while ejkernel is imported: JAX keys compiled programs by every context that exists, so one that was made while a first
# program is traced would have that program traced and compiled again.
policy_in_force = TaskLocal("ejkernel_policy")
"""The innermost policy of `ejkernel.use`."""

recording: Any = jax.make_user_context(default_value=None)
"""Set while `ejkernel.tuning.record_calls` traces a program."""
