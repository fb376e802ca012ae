"""Tuned attention on CPU beside the heuristic: the tuner runs on every named case, then its config and the heuristic's take turns.

Forward, and forward with backward, in fresh rounds that the tuner has not seen. A tuned case must not be slower than the heuristic
beyond the spread of the rounds; the exit status says whether one is. Run on a quiet machine:

    python benchmarks/tuning_cpu.py --out benchmarks/results/tuning_cpu.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel import tuning
from ejkernel_bench import Selected, Settings, provenance, select

PROGRAMS = ("forward", "forward_backward")
ALLOWED = 1.03
"""The median of tuned over heuristic, round by round, above which a case may count as slower."""

Programs = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
"""By name, a function and its arguments."""


def programs_of(selected: Selected) -> Programs:
    """A case as what a user would write, with the gradients of every array."""
    case = selected.case
    arrays = {name: jnp.asarray(value) for name, value in case.arrays(np.random.default_rng(0)).items()}

    def attention(arrays: dict[str, Any]) -> Any:
        return ejkernel.flash_attention(**arrays, **case.options)

    def with_gradients(arrays: dict[str, Any], cotangent: Any) -> Any:
        out, pull = jax.vjp(attention, arrays)
        return out, pull(cotangent)

    cotangent = jax.random.normal(jax.random.key(0), jax.eval_shape(attention, arrays).shape)
    return {"forward": (attention, (arrays,)), "forward_backward": (with_gradients, (arrays, cotangent))}


def measure(selected: Selected, rounds: int, tuning_rounds: int) -> dict[str, Any]:
    programs = programs_of(selected)
    start = time.perf_counter()
    function, arguments = programs["forward_backward"]
    result = tuning.Search(rounds=tuning_rounds, progress=False).tune(tuning.record_calls(function, *arguments))
    found: dict[str, Any] = {
        "name": selected.case.name,
        "tuning_s": round(time.perf_counter() - start, 2),
        "configs": {entry.key.phase: described(entry) for entry in result.entries},
    }
    changed = {phase for phase, known in found["configs"].items() if known["tuned"] != known["heuristic"]}
    for name, (function, arguments) in programs.items():
        if not changed & ({"forward"} if name == "forward" else {"forward", "backward"}):
            found[name] = {"verdict": "the heuristic's own config"}
            continue
        heuristic = jax.jit(function).lower(*arguments).compile()
        with result:
            tuned = jax.jit(function).lower(*arguments).compile()
        times = in_turn({"heuristic": heuristic, "tuned": tuned}, arguments, rounds)
        found[name] = {**times, "verdict": verdict(times["ratio"])}
    return found


def described(entry: tuning.Entry) -> dict[str, Any]:
    """The heuristic's config comes first among those that are tried."""
    right = [timing for timing in entry.timings if not timing.failure]
    return {
        "heuristic": entry.timings[0].config,
        "tuned": entry.config,
        "tried": len(entry.timings),
        "right": len(right),
        "medians_ms": [round(1e3 * timing.median, 4) for timing in right],
    }


def in_turn(programs: dict[str, Any], arguments: tuple[Any, ...], rounds: int) -> dict[str, Any]:
    """Times in alternation, the other one first in every second round; the ratio is tuned over heuristic, round by round."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program(*arguments))
    for turn in range(rounds):
        for name in sorted(programs, reverse=bool(turn % 2)):
            start = time.perf_counter()
            jax.block_until_ready(programs[name](*arguments))
            times[name].append(1e3 * (time.perf_counter() - start))
    ratios = [tuned / heuristic for tuned, heuristic in zip(times["tuned"], times["heuristic"], strict=True)]
    shown = {f"{name}_ms": spread(values) for name, values in times.items()}
    return {**shown, "ratio": spread(ratios)}


def spread(values: list[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    found = {"median": median, "lower_quartile": lower, "upper_quartile": upper, "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()}


def verdict(ratio: dict[str, float]) -> str:
    """`slower` only if most rounds say so: the lower quartile of the ratios is above 1 and their median above what is allowed."""
    if ratio["median"] > ALLOWED and ratio["lower_quartile"] > 1:
        return "slower"
    return "faster" if ratio["median"] < 1 / ALLOWED and ratio["upper_quartile"] < 1 else "same"


def ratio_of(found: dict[str, Any]) -> str:
    return f"{found['ratio']['median']:.3f} " if "ratio" in found else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each side")
    parser.add_argument("--tuning-rounds", type=int, default=5, help="timed runs of each config in the tuner")
    parser.add_argument("--case", default="*", help="cases whose name matches this pattern")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tuning_cpu.json")
    options = parser.parse_args()
    start = time.perf_counter()
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "device": provenance.describe_device(jax.local_devices()[0]),
        "versions": provenance.versions(()),
        "settings": {"rounds": options.rounds, "tuning_rounds": options.tuning_rounds, "allowed": ALLOWED},
        "cases": [],
    }
    for selected in select(Settings(("flash_attention",), size="cpu", case=options.case).on("cpu")):
        case = measure(selected, options.rounds, options.tuning_rounds)
        report["cases"].append(case)
        words = (f"{name} {ratio_of(case[name])}{case[name]['verdict']}" for name in PROGRAMS)
        print(f"{case['name']:28s} tuned / heuristic: {', '.join(words)}; tuned in {case['tuning_s']} s", flush=True)
    measured = [(case["name"], name, case[name]) for case in report["cases"] for name in PROGRAMS]
    report["summary"] = {
        verdict: [f"{case} {name}" for case, name, found in measured if found["verdict"] == verdict]
        for verdict in ("slower", "same", "faster", "the heuristic's own config")
    }
    report["seconds"] = round(time.perf_counter() - start, 1)
    print(", ".join(f"{len(cases)} {verdict}" for verdict, cases in report["summary"].items()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["summary"]["slower"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
