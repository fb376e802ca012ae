"""`ejkernel tune`: finds the fastest configs on this machine, and writes them as a table that a plugin can ship."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ejkernel.cli.completion import complete_function, complete_platform
from ejkernel.cli.output import AsJson, UserError, console, emit, own_output, say, table, user_mistakes, verdict

_SPEC = re.compile(r"(\w+)\[([\d,\s]*)\]")


def tune(
    operation: Annotated[
        str, typer.Argument(help="A public function, e.g. flash_attention.", autocompletion=complete_function)
    ],
    shapes: Annotated[
        Path | None,
        typer.Option(help='JSON: a list of {"arrays": {"x": "float32[4,64]"}, "options": {}}, one for each call.'),
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help="Named cases that match this pattern, in place of --shapes.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the named cases: one, or several with commas.")] = "float32",
    out: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
    store: Annotated[bool, typer.Option("--store", help="Keep what is found in the user's cache.")] = False,
    platform: Annotated[
        str | None, typer.Option(help="Only these platforms: one, or several with commas.", autocompletion=complete_platform)
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each config.")] = 10,
    retry: Annotated[bool, typer.Option("--retry", help="Also try configs that are quarantined on this machine.")] = False,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Leave the backward phase out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check and time every config that may run these calls."""
    if (shapes is None) == (not case):
        raise UserError("tune: give either --shapes FILE or --case NAME")
    if out is None and not store and not as_json:
        raise UserError("tune: say what to do with the result: --out FILE, --store or --json")
    from ejkernel.tuning import AutotuningResult, Search

    chosen = tuple(platform.split(",")) if platform else None
    search = Search(rounds=rounds, progress=False if as_json else None, store=store, retry=retry)
    result = AutotuningResult()
    with user_mistakes(), own_output():
        calls = (
            calls_in_file(shapes, operation) if shapes is not None else calls_of_cases(operation, case or [], dtype.split(","))
        )
        for arrays, options in calls:
            result = result | search.tune(_calls_of(operation, arrays, options, chosen, forward_only))
            if out is not None:  # after every call, so that what was found survives an interruption
                _write(result, out)
    if as_json:
        emit(json.loads(result.dumps()))
        return
    _show(result)
    _say_where(result, store, out)


def _say_where(result: Any, store: bool, out: Path | None) -> None:
    """What was gained, and where it is now."""
    from ejkernel.configs.store import USER_CACHE, directory

    gains = [f"{entry.gain:.2f}" for entry in sorted(result.entries, key=lambda entry: entry.gain) if entry.gain > 1]
    gained = f"{len(gains)} of {len(result.entries)} configs are faster than the default"
    say(console(), gained + (f", by a factor of {' to '.join(dict.fromkeys((gains[0], gains[-1])))}" if gains else ""))
    if store:
        kept = sum(USER_CACHE.lookup(entry.key) is not None for entry in result.entries)
        say(console(), f"stored: {kept} of {len(result.entries)}, in {directory()}, from where every process takes them")
    if out is not None:
        say(console(), f"written: {out}")


def _calls_of(
    operation: str, arrays: Mapping[str, Any], options: Mapping[str, Any], platform: tuple[str, ...] | None, forward_only: bool
) -> Any:
    from ejkernel.tuning import record_calls

    function, arguments = program_of(operation, arrays, options, platform, gradient=not forward_only)
    return record_calls(function, *arguments)


def program_of(
    operation: str,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    platform: tuple[str, ...] | None = None,
    *,
    gradient: bool,
) -> tuple[Any, tuple[Any, ...]]:
    """A function that makes a call, or takes its gradient, and its arguments."""
    import jax
    import jax.numpy as jnp

    from ejkernel._pipeline.operation import get_operation
    from ejkernel._plugins.catalog import OPERATIONS, public_function
    from ejkernel.call.arrays import has_gradient

    def call(arrays: Any) -> Any:
        if operation in OPERATIONS:
            return get_operation(operation).invoke(arrays, options, platform=platform)
        return public_function(operation)(**arrays, **options, platform=platform)

    def loss(moving: Any, arrays: Any) -> Any:
        leaves = jax.tree.leaves(call({**arrays, **moving}))
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves if has_gradient(leaf))

    if not gradient:
        return call, (arrays,)
    moving = {name: value for name, value in arrays.items() if hasattr(value, "dtype") and has_gradient(value)}
    return jax.grad(loss), (moving, arrays)


def calls_of_cases(
    operation: str, patterns: Sequence[str], dtypes: Sequence[str]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Arrays and options of the cases whose names match, in each dtype."""
    from ejkernel.cli import cases

    chosen = cases.matching_cases(operation, patterns)
    return [(cases.shapes(case, dtype), case.options) for case in chosen for dtype in dtypes]


def calls_in_file(path: Path, operation: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Arrays and options of each call of a function."""
    from ejkernel._plugins.catalog import OPERATIONS, public_function

    if operation not in OPERATIONS:
        public_function(operation)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--shapes: {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"--shapes: {path}: not JSON: {error}") from error
    if isinstance(document, dict):  # of several functions
        document = document.get(operation, document)
    if not isinstance(document, list) or not document:
        raise UserError(f"--shapes: {path}: got {type(document).__name__}, expected a list of calls")
    return [_call_in_file(item, f"--shapes: {path}, call {index}") for index, item in enumerate(document)]


def _call_in_file(item: Any, where: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    import jax
    import jax.numpy as jnp

    if not isinstance(item, dict) or not isinstance(item.get("arrays"), dict) or item.keys() - {"arrays", "options"}:
        raise UserError(f'{where}: expected {{"arrays": {{"name": "float32[4,64]"}}, "options": {{}}}}')
    arrays: dict[str, Any] = {}
    for name, text in item["arrays"].items():
        match = _SPEC.fullmatch(text) if isinstance(text, str) else None
        try:
            if match is None:
                raise TypeError
            sizes = tuple(int(size) for size in match[2].split(",") if size.strip())
            arrays[name] = jax.ShapeDtypeStruct(sizes, jnp.dtype(match[1]))
        except TypeError:
            raise UserError(f"{where}: {name}: got {text!r}, expected a dtype and sizes, e.g. float32[4,64]") from None
    options = item.get("options", {})
    return arrays, {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _write(result: Any, out: Path) -> None:
    try:
        result.save(out)
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror or error}") from error


def _show(result: Any) -> None:
    """A table for each phase of a call, one line for each implementation."""
    screen = console()
    calls: dict[str, list[tuple[Any, ...]]] = {}
    for entry in result.entries:
        fastest = entry.best == entry.key.implementation
        row = (
            entry.key.implementation,
            verdict("fastest" if fastest else ""),
            f"{1e3 * entry.seconds:.4g} ms",
            f"{entry.gain:.2f}",
            f"{sum(not timing.failure for timing in entry.timings)} of {len(entry.timings)}",
            ", ".join(f"{name}={value}" for name, value in (entry.config or {}).items()),
        )
        calls.setdefault(f"{entry.key.operation} {entry.key.phase}: {entry.key.arrays()}", []).append(row)
    for call, rows in calls.items():
        say(screen, call, style="bold")
        screen.print(table(("implementation", "", "median", "gain", "right", "config"), rows))
        screen.print()
