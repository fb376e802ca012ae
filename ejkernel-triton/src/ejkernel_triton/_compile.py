"""`ejkernel compile`: compiles kernels for a device that need not be here, into a bundle that other machines read.

Worker processes trace and lower the programs; all kernels that their plugins compile meanwhile are kept in the bundle.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ejkernel.cli.completion import complete_function, complete_platform
from ejkernel.cli.output import AsJson, UserError, console, emit, first_line, own_output, say, table, user_mistakes
from ejkernel.utils.kernel_store import MANIFEST, bundled_kernels, collect_in

if TYPE_CHECKING:
    from ejkernel_triton._bundles import Manifest

_IMPLEMENTATION = re.compile(r"ejkernel\.[\w.]+\[([\w.]+)\]")
"""An implementation in the name stack of an equation of its."""


def compile_kernels(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Operations, or programs as module:function or file.py:function.", autocompletion=complete_function
        ),
    ] = None,
    target: Annotated[list[str] | None, typer.Option(help='Devices: gpu:9.0, or with its name "gpu:9.0:NVIDIA H200".')] = None,
    out: Annotated[Path | None, typer.Option(help="The bundle: a folder, made or added to.")] = None,
    shapes: Annotated[
        Path | None,
        typer.Option(help='JSON, as of `tune`: {"softmax": [{"arrays": {"x": "float32[4,64]"}, "options": {}}]}.'),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Named cases that match this pattern; else the benchmarked one.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the named cases: one, or several with commas.")] = "bfloat16",
    platform: Annotated[
        str | None, typer.Option(help="Only these platforms: one, or several with commas.", autocompletion=complete_platform)
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes, of which each compiles one program at a time; one for each processor.")
    ] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Leave gradients of operations out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compile kernels ahead of time, without the device, for EJKERNEL_KERNELS.

    A function named as a program takes no arguments; it returns a function and a tuple of its arguments, arrays or shapes.
    """
    if not (what or shapes):
        raise UserError("compile: name operations or module:function, or give --shapes FILE")
    if not target or out is None:
        raise UserError("compile: say for which device and where to: --target gpu:9.0 --out FOLDER")
    with user_mistakes(), own_output():
        calls = [*_calls(what or [], shapes, case, dtype.split(","), forward_only)]
        wanted = [Program(*call, name, platform) for name in target for call in calls]
        _check(out, target)
        done = _run(wanted, out, jobs or os.cpu_count() or 1)
        manifest = _written(out, target, [one for one in done if not one.error])
    if as_json:
        emit({"kernels": len(manifest.kernels), "targets": manifest.targets, "programs": [one.to_dict() for one in done]})
    else:
        _show(done, out)
    raise typer.Exit(1 if any(one.error for one in done) else 0)


@dataclasses.dataclass(frozen=True)
class Program:
    """What a process lowers: a function by reference, or one call of an operation."""

    name: str
    arrays: Mapping[str, Any] | None
    options: Mapping[str, Any]
    gradient: bool
    target: str
    platform: str | None

    def __str__(self) -> str:
        return self.name + (" (gradient)" if self.gradient else "")

    def trace(self) -> Any:
        """Trace it for the target."""
        import jax

        from ejkernel.cli.tune import program_of

        if self.arrays is None:
            function, arguments = _referenced(self.name)()
        else:
            function, arguments = program_of(self.name, self.arrays, self.options, gradient=self.gradient)
        jitted = function if hasattr(function, "trace") else jax.jit(function)
        return jitted.trace(*(arguments if isinstance(arguments, (tuple, list)) else (arguments,)))


@dataclasses.dataclass(frozen=True)
class Done:
    """What became of a program: the implementations that it calls, those of them that kernels are kept of, or what went wrong."""

    program: str
    target: str
    implementations: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _calls(
    what: Sequence[str], shapes: Path | None, patterns: Sequence[str] | None, dtypes: Sequence[str], forward_only: bool
) -> Iterator[tuple[str, Mapping[str, Any] | None, Mapping[str, Any], bool]]:
    """Name, arrays, options, and whether the gradient is meant."""
    from ejkernel.cli.cases import usual_case
    from ejkernel.cli.tune import calls_in_file, calls_of_cases
    from ejkernel.operations import get_operation

    def differentiable(name: str) -> bool:
        try:
            return bool(get_operation(name).differentiable)
        except ValueError:  # a public function
            return True

    operations = [name for name in what if ":" not in name]
    yield from ((name, None, {}, False) for name in what if ":" in name)
    for name in operations if shapes is None else operations or _named_in(shapes):
        if shapes is not None:
            calls = calls_in_file(shapes, name)
        else:
            calls = calls_of_cases(name, patterns or [usual_case(name, "gpu").name], dtypes)
        for arrays, options in calls:
            yield name, arrays, options, False
            if not forward_only and differentiable(name):
                yield name, arrays, options, True


def _named_in(shapes: Path) -> list[str]:
    """The functions of a file of shapes."""
    try:
        document = json.loads(shapes.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--shapes: {shapes}: {error}") from error
    if not isinstance(document, dict):
        raise UserError(f"--shapes: {shapes}: got a list, expected an object with a list for each operation, or an operation")
    return [*document]


def _referenced(name: str) -> Any:
    """What `module:function` or `file.py:function` names, with the working directory on the path."""
    module, _, attribute = name.rpartition(":")
    sys.path.insert(0, os.getcwd())
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), attribute)
    spec = importlib.util.spec_from_file_location(Path(module).stem, module)
    if spec is None or spec.loader is None:
        raise UserError(f"{module} cannot be loaded")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return getattr(loaded, attribute)


def _check(out: Path, targets: Sequence[str]) -> None:
    """Refuse what would only fail later: unknown targets, and folders of something else."""
    from ejkernel.targets import as_target
    from ejkernel_triton._bundles import LOWERED, Manifest, differences, made_with

    for name in targets:
        as_target(name)
    if not out.exists() or (out.is_dir() and all(place.name.startswith("kernels-") for place in out.iterdir())):
        return  # new, or interrupted: what is there is whole
    try:
        made = Manifest.read(out).made_with
    except ValueError as error:
        raise UserError(f"--out: {out} holds something else: {error}; name another folder") from error
    now = made_with(made.keys() - {LOWERED})
    if found := [text for store in made for text in differences(made[store], now[store])]:
        raise UserError(f"--out: {out} was made for {found[0]}; name another folder")


def _run(programs: Sequence[Program], out: Path, jobs: int) -> list[Done]:
    """Lower every program, in processes that keep what they compile in the bundle.

    The kernels of one program are not shared out: to start another process, and to trace the program there, takes longer than to
    compile most of them.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # of these processes, which need no device
    out.mkdir(parents=True, exist_ok=True)
    context, jobs = multiprocessing.get_context("spawn"), min(jobs, len(programs))
    try:
        with concurrent.futures.ProcessPoolExecutor(jobs, context, collect_in, (out.absolute(),)) as pool:
            return list(pool.map(_lower, programs))
    except BrokenProcessPool as error:
        raise UserError("a process that compiled was killed, perhaps for its memory; try fewer --jobs") from error


def _lower(program: Program) -> Done:
    from ejkernel import kernel_registry
    from ejkernel.call.policy import use
    from ejkernel.targets import as_target

    target = as_target(program.target)
    try:
        with own_output(), use(*(program.platform.split(",") if program.platform else ()), target=target):
            traced = program.trace()
            traced.lower(lowering_platforms=(target.lowering_platform,))
    except Exception as error:  # noqa: BLE001 - of the user's program or of a compiler; the others are compiled all the same
        return Done(str(program), str(target), error=f"{type(error).__name__}: {first_line(error)}")
    stacks = {str(equation.source_info.name_stack) for equation in _equations(traced.jaxpr)}
    used = {found for stack in stacks for found in _IMPLEMENTATION.findall(stack)}
    kept = {one.id for one in kernel_registry.list_implementations() if one.implementation.lowered_from is not None}
    return Done(str(program), str(target), tuple(sorted(used)), tuple(sorted(used & kept)))


def _equations(program: Any) -> Iterator[Any]:
    """The equations of a traced program, and of those inside of it."""
    for equation in program.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def _written(out: Path, targets: Sequence[str], done: Sequence[Done]) -> Manifest:
    """The bundle, with what was in it before."""
    from ejkernel.targets import as_target
    from ejkernel_triton._bundles import LOWERED, Manifest, made_with, write_bundle

    platforms = {name.partition(".")[0] for one in done for name in one.ahead}
    known = {str(as_target(name)) for name in targets}
    if (out / MANIFEST).exists():
        before = Manifest.read(out)
        platforms, known = platforms | before.made_with.keys() - {LOWERED}, known | {*before.targets}
    return write_bundle(out, known, made_with(platforms))


def _show(done: Sequence[Done], out: Path) -> None:
    screen = console()
    rows = [(one.program, one.target, one.error or ", ".join(one.implementations) or "no kernel of ours") for one in done]
    screen.print(table(("program", "target", "runs on"), rows, wrap=("target", "runs on")))
    idle = {name for one in done for name in one.implementations} - {name for one in done for name in one.ahead}
    if idle:
        say(screen, f"nothing to compile ahead of time: {', '.join(sorted(idle))}")
    kernels = bundled_kernels(out)
    say(screen, f"{out}: {len(kernels)} kernels, {sum(path.stat().st_size for path in kernels)} bytes")
    say(screen, f"to use them: EJKERNEL_KERNELS={out.absolute()}")
