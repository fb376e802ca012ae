"""Running code of plugins so that it answers what it is asked and changes nothing else.

A plugin describes its implementations; which of them runs is for the user to say. So while a plugin is imported, answers a hook
or `supports`, or has its code traced, the public ways to change what others dispatch to are closed to it: registering, taking
over what discovery found, storing configs. A `use(...)` that it enters and does not leave, or a setting that it writes (see
`surroundings`), does not outlive its answer. What would end the program, such as `sys.exit()`, becomes an error that says whose it
is.

This keeps a plugin from changing decisions unnoticed through what ejkernel offers. It is no sandbox: code that replaces functions
in other modules can do anything.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ejkernel._plugins.surroundings import Surroundings, Watch
from ejkernel._plugins.task_local import follow_all
from ejkernel.errors import PluginError, in_one_line
from ejkernel.plugin import resolve


class _Answer:
    """A plugin's code at work, and what it was refused meanwhile."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.refused: list[PluginError] = []


_answer: contextvars.ContextVar[_Answer | None] = contextvars.ContextVar("ejkernel_plugin_answer", default=None)
_packages: dict[str, tuple[str, bool]] = {}
"""Top-level package of a plugin module -> its distribution, and whether that is a third party's."""


def know_packages(packages: Mapping[str, tuple[str, bool]]) -> None:
    """Say which packages belong to plugins, before any of them is imported."""
    _packages.clear()
    _packages.update(packages)


class EndedError(PluginError):
    """A plugin's code raised what no handler of errors catches, such as SystemExit; its cause is that."""


def contained(who: str, function: Callable[..., Any], *arguments: Any, watch: Watch = "what programs depend on") -> Any:
    """Call a plugin's function.

    Args:
        who: the plugin, in the user's words.
        function: its code.
        *arguments: what it is called with.
        watch: which settings are put back behind it.

    Raises:
        PluginError: it tried to change what others dispatch to, whatever it made of the refusal, or changed a setting.
        EndedError: it raised SystemExit or another exception that is no Exception.
        KeyboardInterrupt: the user's.
        Exception: whatever the function raises.
    """
    answer = _Answer(who)
    before = Surroundings(watch)
    try:
        # Context variables that it sets, such as a `use(...)` that it never leaves, are those of the copy.
        result = contextvars.copy_context().run(_answering, answer, function, arguments)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise EndedError(f"{who} raised {in_one_line(error)}, which would end the program") from error
    finally:
        follow_all()
        changed = before.restore()
    if answer.refused:
        raise answer.refused[0]
    if changed:
        raise PluginError(f"{who} changed {', '.join(changed)}, which is the user's; it was restored")
    return result


def imported(who: str, reference: Any) -> Any:
    """Import what a plugin's reference names; raises as `contained` does."""
    new = isinstance(reference, str) and reference.partition(":")[0] not in sys.modules
    return contained(who, resolve, reference, watch="everything" if new else "settings of ejkernel")


def raised(error: Exception) -> str:
    """What a plugin's code raised, in one line."""
    return in_one_line(error.__cause__ if isinstance(error, EndedError) and error.__cause__ else error)


def _answering(answer: _Answer, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    _answer.set(answer)
    return function(*arguments)


def refuse_answers(what: str) -> None:
    """Refuse something that is the user's to do while a plugin's code is at work.

    Args:
        what: the public name of what is refused.

    Raises:
        PluginError: likewise.
    """
    answer = _answer.get()
    if answer is not None:
        error = PluginError(f"{what}: refused, as {answer.who} called it while it was loaded or answered; {_REMEDY}")
        answer.refused.append(error)
        raise error


def refuse_plugins(what: str, function: Any = None) -> None:
    """As `refuse_answers`, and refuse plugins at any other time as well: in threads, callbacks and calls into their packages.

    Args:
        what: the public name of what is refused.
        function: what would be registered.

    Raises:
        PluginError: likewise.
    """
    refuse_answers(what)
    owner = next((_packages[name][0] for name in _callers() if name in _packages), None)
    distribution, third_party = _packages.get(_package_of(function), ("", False))
    if owner is None and third_party:
        owner = distribution
    if owner is not None:
        raise PluginError(f"{what}: refused, as it is for the user's program and {owner} brings a plugin; {_REMEDY}")


_REMEDY = "a plugin describes its implementations in ejkernel_plugin(), and users ask for them by platform="


def _callers() -> Iterator[str]:
    """The top-level package of every frame of this thread."""
    frame = inspect.currentframe()
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")).partition(".")[0]
        frame = frame.f_back


def _package_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", "")).partition(".")[0]
