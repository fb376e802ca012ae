"""What the demo found, as plain data: the JSON output, the tables and the verdict are read from it."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import ejkernel
from ejkernel_demo import data
from ejkernel_demo.plot import save_plot
from ejkernel_demo.primitives import ejkernel_primitives, explanations, plain_primitives, serving_explanations
from ejkernel_demo.sample import sample
from ejkernel_demo.serve import Server, serve
from ejkernel_demo.train import Settings, Trainer, interleaved_seconds

FIRST_STEP_TOLERANCE = 1e-4
"""Nats per byte at the first step, where both runs have the same parameters and only one forward pass differs."""

EARLY_STEPS, EARLY_TOLERANCE = 20, 1e-3
"""Over the first steps a wrong gradient shows, and rounding does not yet."""

SMOOTHED_OVER, CURVE_TOLERANCE = 10, 0.05
"""Later, rounding has grown as training is chaotic; means over some steps still agree."""

Progress = Callable[[str, int, float], None]


def run_demo(settings: Settings, *, platforms: tuple[str, ...], out: Path, compare: bool, progress: Progress) -> dict[str, Any]:
    """Train, compare, sample, serve and write the files.

    Args:
        settings: the training run.
        platforms: the only platforms that ejkernel may use; empty = its own choice.
        out: directory for the plot and the sampled text; it exists.
        compare: whether to train the plain JAX model too.
        progress: called as `progress(run, step, loss)`.

    Returns:
        The report. `report["ok"]` says whether every check in `report["checks"]` passed.
    """
    windows = settings.windows()
    with only(platforms):
        ours = Trainer(settings, ejkernel_primitives())
        ours.run(windows, lambda step, value: progress("ejkernel", step, value))
        text = sample(ours.parameters, settings.shape, ours.primitives, seed=settings.seed)
        serving, server = serve(ours.parameters, settings.shape, ours.primitives, seed=settings.seed)
        served = [*_served(settings, ours), *_served_requests(settings, server)]
    trainers = {"ejkernel": ours}
    if compare:
        plain = Trainer(settings, plain_primitives())
        plain.run(windows, lambda step, value: progress("plain JAX", step, value))
        trainers["plain JAX"] = plain
    times = interleaved_seconds(list(trainers.values()), windows[-1])
    checks = [*_checks(trainers), _check(_serving_check(serving), float(serving["mismatches"]), 0.5)]
    report: dict[str, Any] = {
        "machine": {"device": str(jax.devices()[0].device_kind), "cpu": platform.machine(), "jax": jax.__version__},
        "text": data.TITLE,
        "settings": {"steps": settings.steps, "seed": settings.seed, "batch": settings.batch, **vars(settings.shape)},
        "platforms": list(platforms),
        "parameters": sum(value.size for value in ours.parameters.values()),
        "runs": {name: _summary(trainer, taken) for (name, trainer), taken in zip(trainers.items(), times, strict=True)},
        "served": served,
        "serving": serving,
        "max_abs_difference": _largest_difference(trainers),
        "checks": checks,
        "sample": text,
    }
    report["files"] = _write(out, trainers, dict(zip(trainers, times, strict=True)), text)
    report["ok"] = all(check["ok"] for check in checks)
    report["conclusion"] = conclusion(report)
    return report


def conclusion(report: dict[str, Any]) -> str:
    """What was gained and what was lost, in one sentence."""
    failed = [check["name"] for check in report["checks"] if not check["ok"]]
    if failed:
        return f"{len(failed)} of {len(report['checks'])} checks failed: {'; '.join(failed)}."
    ours, plain = (report["runs"].get(name) for name in ("ejkernel", "plain JAX"))
    served = f"served {report['serving']['generated']} bytes as a full recomputation would"
    if plain is None:
        return f"ejkernel brought the loss from {ours['first_loss']:.3f} to {ours['final_loss']:.3f}, and {served}."
    learned = f"a loss of {ours['final_loss']:.3f} where plain JAX has {plain['final_loss']:.3f}"
    return f"ejkernel ends with {learned}, {_speed(ours, plain)}, {_compilation(ours, plain)}, and {served}."


def _speed(ours: dict[str, Any], plain: dict[str, Any]) -> str:
    """Steps of ours beside those of plain JAX; no winner is named where their middle halves overlap."""
    (low, middle, high), (their_low, their_middle, their_high) = (run["step_seconds_quartiles"] for run in (ours, plain))
    took = f"{1e3 * middle:.1f} ms a step against {1e3 * their_middle:.1f}"
    if high < their_low:
        return f"runs {their_middle / middle:.2f} times as fast ({took})"
    if their_high < low:
        return f"loses speed, {their_middle / middle:.2f} of plain JAX's ({took})"
    return f"is neither faster nor slower ({took}, within their spread)"


def _compilation(ours: dict[str, Any], plain: dict[str, Any]) -> str:
    longer = ours["compile_seconds"] - plain["compile_seconds"]
    return f"takes {abs(longer):.1f} s {'longer' if longer > 0 else 'less'} to compile"


def unserved(settings: Settings, platforms: tuple[str, ...]) -> list[str]:
    """Operations of the model for which nothing that is installed and allowed can run.

    Raises:
        ValueError: unknown platform.
    """
    with only(platforms):
        decisions = [d for e in explanations(settings.shape, settings.batch) for d in (e.forward, e.backward)]
        decisions += [e.forward for e in serving_explanations(settings.shape)]
    return [f"{decision.operation} ({decision.phase})" for decision in decisions if decision.chosen is None]


@contextlib.contextmanager
def only(platforms: tuple[str, ...]) -> Generator[None]:
    """Hold ejkernel to these platforms; with none, leave it its own choice."""
    if not platforms:
        yield
        return
    with ejkernel.use(*platforms):
        yield


def _summary(trainer: Trainer, taken: list[float]) -> dict[str, Any]:
    quartiles = np.quantile(taken, (0.25, 0.5, 0.75))
    return {
        "first_loss": trainer.losses[0],
        "final_loss": float(np.mean(trainer.losses[-SMOOTHED_OVER:])),
        "losses": trainer.losses,
        "compile_seconds": trainer.compile_seconds,
        "train_seconds": sum(trainer.seconds),
        "step_seconds_quartiles": quartiles.tolist(),
        "steps_per_second": 1 / float(quartiles[1]),
    }


def _served(settings: Settings, trainer: Trainer) -> list[dict[str, Any]]:
    """One row per operation and phase: what dispatch chose, why, and whether the compiled program carries its stamp."""
    decisions = [d for e in explanations(settings.shape, settings.batch) for d in (e.forward, e.backward)]
    return [_row(decision, trainer.stamps) for decision in decisions]


def _served_requests(settings: Settings, server: Server) -> list[dict[str, Any]]:
    """The same for what only serving runs, which has no backward phase."""
    stamps = [(operation, "forward", name) for operation, name in server.stamps]
    return [_row(explanation.forward, stamps) for explanation in serving_explanations(settings.shape)]


def _row(decision: Any, stamps: list[tuple[str, str, str]]) -> dict[str, Any]:
    chosen = decision.chosen.id if decision.chosen else None
    return {
        "operation": decision.operation,
        "phase": decision.phase,
        "implementation": chosen,
        "setting": decision.setting,
        "others": _others(decision),
        "in_compiled_program": (decision.operation, decision.phase, chosen) in stamps,
    }


def _serving_check(serving: dict[str, Any]) -> str:
    return f"{serving['generated']} served bytes equal those of full recomputation (bytes that differ)"


def _others(decision: Any) -> list[str]:
    """Every candidate that was not chosen and every unusable plugin, each with its reasons."""
    rejected = [
        (v.candidate.id, v.verdict, "; ".join(v.reasons)) for v in decision.verdicts if v.candidate is not decision.chosen
    ]
    return [f"{name}: {state}" + (f" ({reason})" if reason else "") for name, state, reason in (*rejected, *decision.absent)]


def _checks(trainers: dict[str, Trainer]) -> list[dict[str, Any]]:
    ours = trainers["ejkernel"]
    latest = ours.losses[len(ours.losses) // 2 :][-SMOOTHED_OVER:]
    checks = [_check("the loss falls", float(np.mean(latest)) - ours.losses[0], 0.0)]
    if "plain JAX" in trainers:
        difference = np.abs(np.subtract(ours.losses, trainers["plain JAX"].losses))
        checks.append(_check("same loss at the first step", float(difference[0]), FIRST_STEP_TOLERANCE))
        early = difference[:EARLY_STEPS]
        checks.append(_check(f"loss curves agree over {len(early)} steps", float(early.max()), EARLY_TOLERANCE))
        smoothed = np.abs(_smoothed(ours.losses) - _smoothed(trainers["plain JAX"].losses))
        checks.append(_check(f"means of {SMOOTHED_OVER} steps agree everywhere", float(smoothed.max()), CURVE_TOLERANCE))
    return checks


def _largest_difference(trainers: dict[str, Trainer]) -> float | None:
    """Between the two loss curves at any single step; None without a comparison."""
    curves = [trainer.losses for trainer in trainers.values()]
    return float(np.ptp(curves, axis=0).max()) if len(curves) > 1 else None


def _smoothed(losses: list[float]) -> np.ndarray:
    width = min(SMOOTHED_OVER, len(losses))
    return np.convolve(losses, np.full(width, 1 / width), "valid")


def _check(name: str, value: float, limit: float) -> dict[str, Any]:
    """Passes when the value is below the limit; NaN does not pass."""
    return {"name": name, "value": value, "limit": limit, "ok": bool(value < limit)}


def _write(out: Path, trainers: dict[str, Trainer], times: dict[str, list[float]], text: str) -> dict[str, str]:
    plot, sampled = out / "loss.png", out / "sample.txt"
    curves = {name: trainer.losses for name, trainer in trainers.items()}
    save_plot(plot, curves, times, "byte-level language model")
    sampled.write_text(text + "\n", encoding="utf-8")
    return {"plot": str(plot), "sample": str(sampled)}
