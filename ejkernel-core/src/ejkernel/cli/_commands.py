"""Commands that other distributions add through the entry-point group `ejkernel.commands`.

An entry point's name is the command, its value names a function or a typer application. Listing commands reads metadata alone;
a command's module is imported when the command is called, and by `ejkernel doctor`.

Help and completions need neither plugins nor JAX: plugins are discovered when a command runs.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import importlib_metadata
import typer
import typer.core
from packaging.utils import canonicalize_name

from ejkernel._plugins.claims import GROUP_OF_COMMANDS, claims_of
from ejkernel._plugins.records import PluginRecord
from ejkernel.cli.output import UserError

GROUP = GROUP_OF_COMMANDS

OWNERS = {"bench": "ejkernel-bench", "compile": "ejkernel-triton", "demo": "ejkernel-demo"}
"""Commands of this project's own distributions, and which distribution each comes with. Nobody else may claim them."""

_NAME = re.compile(r"[a-z][a-z0-9-]*")


@dataclasses.dataclass(frozen=True)
class Command:
    """One entry point of the group.

    Attributes:
        name: what the user types.
        distribution: the distribution that ships it.
        version: that distribution's version.
        value: `module:function` or `module:app`.
        state: what became of it; `"ok"` until it is loaded.
        reason: why it is not `ok`, in the user's words.
        traceback: of the exception that broke it, if any.
    """

    name: str
    distribution: str
    version: str
    value: str
    state: Literal["ok", "broken", "conflict"] = "ok"
    reason: str = ""
    traceback: str = ""

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}"

    @property
    def refusal(self) -> str:
        """Why it cannot be called, in one sentence."""
        return f"the command {self.name!r} of {self.origin} cannot be used, {self.state}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def ended(self, state: Literal["broken", "conflict"], reason: str, *, traceback: str = "") -> Command:
        return dataclasses.replace(self, state=state, reason=reason, traceback=traceback)


def found_commands(built_in: Collection[str]) -> tuple[Command, ...]:
    """Every entry point of the group by name, those that conflict marked so. Nothing is imported.

    Args:
        built_in: names of core's own commands, which nobody may claim.
    """
    claims = sorted((_command(claim) for claim in claims_of(GROUP)), key=lambda claim: (claim.name, claim.distribution))
    return tuple(_checked(claim, claims, built_in) for claim in claims)


def _command(claim: PluginRecord) -> Command:
    command = Command(claim.name, claim.distribution, claim.version, claim.value)
    return command if claim.ok else command.ended("broken", claim.reason, traceback=claim.traceback)


def _checked(command: Command, claims: Iterable[Command], built_in: Collection[str]) -> Command:
    """A name belongs to one distribution: a reserved one to its owner, any other to nobody if two claim it."""
    if command.state != "ok":
        return command
    name = command.name
    if not _NAME.fullmatch(name):
        return command.ended("broken", f"got the name {name!r}, expected lower-case letters, digits and hyphens")
    if name in built_in:
        return command.ended("conflict", f"{name!r} is a command of ejkernel-core")
    owner = OWNERS.get(name)
    owned = owner == canonicalize_name(command.distribution)
    if owner is not None and not owned:
        return command.ended("conflict", f"the name {name!r} belongs to {owner}")
    rivals = [other for other in claims if other.name == name and other is not command]
    if owned:
        rivals = [other for other in rivals if other.distribution == command.distribution]
    if not rivals:
        return command
    others = ", ".join(dict.fromkeys(other.origin for other in rivals))
    return command.ended("conflict", f"{others} claims {name!r} too; uninstall all but one")


def load(command: Command) -> tuple[Command, Any]:
    """Import a command. Returns it with its state, and what the command line runs, None where it is broken."""
    if command.state != "ok":
        return command, None
    try:
        return command, _built(command)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a module that calls sys.exit() must not end the user's command line
        reason = f"loading {command.value!r} raised {traceback.format_exception_only(error)[-1].strip()}"
        return command.ended("broken", reason, traceback="".join(traceback.format_exception(error))), None


def _built(command: Command) -> Any:
    loaded = importlib_metadata.EntryPoint(command.name, command.value, GROUP).load()
    if isinstance(loaded, typer.Typer):
        return typer.main.get_command(loaded)
    if not callable(loaded):
        raise TypeError(f"got {type(loaded).__name__}, expected a function or a typer.Typer")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    function: Callable[..., Any] = loaded
    app.command(command.name)(function)
    return typer.main.get_command(app)


class Preparation:
    """Whether plugins have been discovered in this process; the object that the command line's contexts carry."""

    def __init__(self, discovered: bool) -> None:
        self._discovered = discovered

    def discover(self, command: str) -> None:
        """Discover plugins, once, and say on stderr which cannot be used; `doctor` says so itself.

        Raises:
            UserError: under `EJKERNEL_STRICT=1`, if any plugin cannot be used and the command is not `doctor`.
        """
        from ejkernel._plugins import discovery
        from ejkernel._plugins.registry import kernel_registry

        first, self._discovered = not self._discovered, True
        if first:
            kernel_registry.load(discovery.examine_plugins())
        if command == "doctor":
            return
        found = discovery.complaints(kernel_registry.records)
        if found and discovery.is_strict():
            raise UserError(f"{found[0]} (EJKERNEL_STRICT is set)")
        for complaint in found if first else ():
            print(f"ejkernel: {complaint}", file=sys.stderr)


class Commands(typer.core.TyperGroup):
    """Core's commands, then those of other distributions, which are imported when they are called."""

    _found: tuple[Command, ...] | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help: core's own, then the others by name."""
        return [*self.commands, *sorted({command.name for command in self.others} - {*self.commands})]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Core's own command, or what stands for another's in the help."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        command = self._named(cmd_name)
        if command is None:
            return None
        state = "" if command.state == "ok" else f"{command.state}, see `ejkernel doctor`; "
        return typer.core.TyperCommand(cmd_name, short_help=f"({state}from {command.origin})")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, imported; plugins are discovered when it runs, and for a third party's before its import.

        Raises:
            UserError: it cannot be used, or its distribution is not installed.
        """
        name, prepare = args[0], lambda: ctx.obj.discover(args[0])
        command = None if name in self.commands else self._named(name)
        if command is None:
            if name in OWNERS:
                raise UserError(f"the command {name!r} comes with {OWNERS[name]}; install it with: pip install {OWNERS[name]}")
            name, found, rest = super().resolve_command(ctx, args)
            return name, found and _prepared(found, prepare), rest
        if name not in OWNERS:
            prepare()
        command, loaded = load(command)
        if loaded is None:
            raise UserError(command.refusal)
        return name, _prepared(loaded, prepare), args[1:]

    @property
    def others(self) -> tuple[Command, ...]:
        """Every entry point of the group; the metadata is read once."""
        if self._found is None:
            self._found = found_commands(self.commands)
        return self._found

    def _named(self, name: str) -> Command | None:
        """The command of that name; one that can be used before one that cannot."""
        named = [command for command in self.others if command.name == name]
        return min(named, key=lambda command: command.state != "ok", default=None)


def _prepared(command: Any, prepare: Callable[[], None]) -> Any:
    """A command that prepares before it runs; reading its arguments and showing its help does not run it."""
    found, run = copy.copy(command), command.invoke

    def invoke(ctx: Any) -> Any:
        prepare()
        return run(ctx)

    found.invoke = invoke
    return found
