"""`ejkernel bench`: our kernels and those of others on named cases, checked first, then timed in turns."""

from __future__ import annotations

import functools
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ejkernel.cli.completion import complete_operation, complete_platform
from ejkernel.cli.output import AsJson, UserError, console, emit, say, table, user_mistakes
from ejkernel_bench.cli._files import draw, draw_file, show_comparison, what_plots_need


def bench(
    operations: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPERATION]...", help="Operations; none means all.", autocompletion=complete_operation),
    ] = None,
    size: Annotated[str, typer.Option(help="Of the cases: cpu, gpu, gpu-float8, test, or auto: what this device is.")] = "auto",
    case: Annotated[str, typer.Option(help="Only cases whose names match this pattern.")] = "*",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16: one, or several with commas.")] = None,
    phase: Annotated[str, typer.Option(help="forward, backward, forward+backward: with commas.")] = "forward,backward",
    platform: Annotated[
        str | None,
        typer.Option(help="Only these of our platforms: one, or several with commas.", autocompletion=complete_platform),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Only this peer; may be repeated. Default: all that are there.")
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Only ours.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 9,
    input_sets: Annotated[int, typer.Option(min=1, help="Sets of inputs that timed runs rotate over.")] = 3,
    compile_rounds: Annotated[int, typer.Option(min=1, help="Timed compilations of each.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the result here, as JSON.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write plots and a page with tables into this folder.")] = None,
    recorded: Annotated[Path | None, typer.Option("--from", help="Draw this result into --plots; nothing is timed.")] = None,
    compared: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="OLD NEW", help="Compare two results; status 1 if one of ours is worse."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="With --compare, show also what stayed the same.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Say what would run, and against whom.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time our kernels beside those of others, after checking both."""
    if compared is not None:
        show_comparison(*compared, everything=everything, as_json=as_json)
        return
    if recorded is not None and plots is None:
        raise UserError("--from: needs --plots, the folder to draw into")
    if no_peers and peer:
        raise UserError("--no-peers: leave it out beside --peer")
    _check_targets(out, plots)
    if recorded is not None and plots is not None:
        draw_file(recorded, plots)
        return
    with user_mistakes():
        from ejkernel_bench import Settings
        from ejkernel_bench.peers import wanted_peers

        settings = Settings(
            operations=tuple(operations or ()),
            size=size,
            case=case,
            dtypes=_words(dtype),
            phases=_words(phase),
            platforms=_words(platform),
            peers=() if no_peers else tuple(peer) if peer else None,
            rounds=rounds,
            input_sets=input_sets,
            compile_rounds=compile_rounds,
        )
        wanted_peers(settings.peers)
        if list_only:
            _list(settings, as_json)
            return
        result = _run(settings, as_json, out)
    if out is not None:
        _write(result, out)
    if plots is not None:
        draw(result, plots)
    if as_json:
        emit(result)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()


def _check_targets(out: Path | None, plots: Path | None) -> None:
    """What can be known to fail, before minutes of work: no folder for the result, nothing to draw plots with."""
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"--out: {out}: there is no folder {out.absolute().parent}")
    if plots is not None and (reason := what_plots_need()):
        raise UserError(f"--plots: {reason}")


def _run(settings: Any, as_json: bool, out: Path | None) -> dict[str, Any]:
    import ejkernel_bench
    from ejkernel_bench.cli._table import show_case, show_end

    screen = None if as_json else console()

    def show(case: dict[str, Any]) -> None:
        if screen is not None:
            show_case(screen, case)

    command = shlex.join(["ejkernel", *sys.argv[1:]])
    save = None if out is None else functools.partial(_write, out=out)
    result = ejkernel_bench.run(settings, command=command, progress=False if as_json else None, each=show, save=save)
    if screen is not None:
        show_end(screen, result)
    return result


def _list(settings: Any, as_json: bool) -> None:
    from ejkernel_bench import select
    from ejkernel_bench.peers import known_peers

    backend = _backend()
    selected = select(settings.on(backend))
    peers = [peer for peer in known_peers() if settings.peers is None or peer.name in settings.peers]
    states = {peer.name: peer.unable(backend) for peer in peers}
    rows = [
        {
            "operation": one.operation,
            "case": one.case.name,
            "dtype": one.dtype,
            "peers": [peer.name for peer in peers if one.operation in peer.operations and not states[peer.name]],
        }
        for one in selected
    ]
    if as_json:
        emit({"cases": rows, "phases": list(settings.phases), "peers": states})
        return
    screen = console()
    columns = ("operation", "case", "dtype", "peers")
    screen.print(table(columns, [(r["operation"], r["case"], r["dtype"], ", ".join(r["peers"])) for r in rows]))
    screen.print()
    screen.print(table(("peer", "here"), [(name, reason or "can run") for name, reason in states.items()]))
    say(screen, "A peer may still refuse a case, with the reason, when it is run.")


def _backend() -> str:
    import jax

    from ejkernel.targets import target_of_device

    return target_of_device(jax.local_devices()[0]).backend


def _write(result: dict[str, Any], out: Path) -> None:
    try:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror or error}") from error
