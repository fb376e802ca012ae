"""`ejkernel demo`: trains a small language model on real text, checks it against plain JAX, and serves it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Any

import typer

from ejkernel.cli.output import AsJson, UserError, console, emit, say, table, user_mistakes, verdict


def demo(
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 320,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same run.")] = 0,
    platform: Annotated[str | None, typer.Option(help="The only platforms to use: one, or several with commas.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the plot and the sampled text.")] = Path("ejkernel-demo"),
    no_compare: Annotated[bool, typer.Option("--no-compare", help="Leave out the comparison with plain JAX.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a language model on a shipped book, compare it with plain JAX, and serve it; exit status 1 if anything disagrees."""
    from ejkernel_demo.report import run_demo, unserved
    from ejkernel_demo.train import Settings

    settings = Settings(steps=steps, seed=seed)
    platforms = tuple(name.strip() for name in platform.split(",") if name.strip()) if platform else ()
    with user_mistakes():
        missing = unserved(settings, platforms)
    if missing:
        where = f"platform {platform}" if platform else "what is installed"
        raise UserError(f"{where} cannot run {', '.join(missing)} here; see `ejkernel list`")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror or error}") from error
    if not as_json:
        _introduce(settings)
    with _progress(steps, hidden=as_json) as on_step:
        report = run_demo(settings, platforms=platforms, out=out, compare=not no_compare, progress=on_step)
    if as_json:
        emit(report)
    else:
        _render(report)
    raise typer.Exit(0 if report["ok"] else 1)


def _introduce(settings: Any) -> None:
    from ejkernel_demo.data import TITLE

    shape = settings.shape
    screen = console()
    screen.print(f"Text:  {TITLE}", markup=False)
    screen.print(
        f"Model: bytes, {shape.layers} layers, width {shape.width}, {shape.heads} query and {shape.key_heads} key heads; "
        f"{settings.batch} x {shape.length} bytes a step; seed {settings.seed}",
        markup=False,
    )


@contextlib.contextmanager
def _progress(steps: int, *, hidden: bool) -> Generator[Callable[[str, int, float], None]]:
    """Yields `on_step(run, step, loss)`, which draws one bar per run on a terminal and nothing elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    bars: dict[str, Any] = {}
    with Progress(*columns, console=console(), disable=hidden, expand=True) as progress:

        def on_step(run: str, step: int, loss: float) -> None:
            if run not in bars:
                bars[run] = progress.add_task(run, total=steps, loss=loss)
            progress.update(bars[run], completed=step, loss=loss)

        yield on_step


def _render(report: dict[str, Any]) -> None:
    screen = console()
    _draw(screen, {name: run["losses"] for name, run in report["runs"].items()})
    rows = []
    for name, run in report["runs"].items():
        low, middle, high = (f"{1e3 * value:.1f}" for value in run["step_seconds_quartiles"])
        speed = f"{run['steps_per_second']:.1f}"
        rows.append(
            (
                name,
                f"{run['first_loss']:.3f}",
                f"{run['final_loss']:.3f}",
                f"{run['compile_seconds']:.1f} s",
                speed,
                f"{middle} ({low}-{high})",
            )
        )
    columns = ("run", "first loss", "last 10 steps", "compile", "steps/s", "ms per step (quartiles)")
    screen.print()
    screen.print(table(columns, rows, title=f"Loss in nats per byte; speed on {report['machine']['device']}, taken in turns"))
    served = [
        (
            row["operation"] if row["phase"] == "forward" else "",
            row["phase"],
            row["implementation"] or "-",
            row["setting"],
            verdict("yes" if row["in_compiled_program"] else "no"),
            "; ".join(row["others"]) or "none installed",
        )
        for row in report["served"]
    ]
    screen.print()
    screen.print(table(("operation", "phase", "served by", "because", "seen running", "others"), served, title="Who ran"))
    screen.print()
    for check in report["checks"]:
        word = verdict("ok" if check["ok"] else "broken")
        screen.print(word, f"{check['name']}: {check['value']:.2e}, limit {check['limit']:g}", markup=False)
    if report["max_abs_difference"] is not None:
        screen.print(f"largest difference of the loss curves at any one step: {report['max_abs_difference']:.2e}", markup=False)
    _render_serving(report["serving"])
    screen.print()
    screen.print("Sampled from the trained model:", style="bold")
    screen.print(report["sample"], markup=False, soft_wrap=True)
    screen.print()
    for name, path in report["files"].items():
        screen.print(f"{name}: {path}", markup=False, soft_wrap=True)
    screen.print()
    say(screen, report["conclusion"], style="bold green" if report["ok"] else "bold red")


def _draw(screen: Any, losses: dict[str, list[float]]) -> None:
    """The curves, where the console has the characters for them."""
    if not screen.encoding.startswith("utf"):
        return
    from ejkernel_demo.plot import drawn_curves

    screen.print()
    screen.print("Loss in nats per byte over steps", style="bold")
    screen.print(drawn_curves(losses, min(screen.width, 100)), markup=False)


def _render_serving(found: dict[str, Any]) -> None:
    screen = console()
    screen.print()
    screen.print("Served through the paged cache, the likeliest byte each time:", style="bold")
    screen.print(
        f"{found['requests']} requests in {found['slots']} slots: {found['generated']} bytes in {found['steps']} steps of "
        f"{found['mixes']} different mixes, one compiled program ({found['compile_seconds']:.1f} s to build), "
        f"{found['tokens_per_second']:.0f} bytes/s",
        markup=False,
    )
    for text in found["texts"][:2]:
        screen.print(f"{text['prompt']!r} -> {text['answer']!r}", markup=False, soft_wrap=True)
