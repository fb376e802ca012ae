"""Recurrences on a real GPU: their conformance, gradients that are sums over time, and times beside the tree before.

    python tests/device/recurrence_sums.py --out results --before /tmp/before

`--parts` of, comma separated:

- conformance: the suite of `--operations` in Triton, as pytest runs it; `recurrence_conformance.json`.
- sums: gradients of gates, steps, factors, and of what all tokens share (bonus, skip, bias, scales of norms), at `--lengths`, in
  `--dtype`, the worst of `--seeds` seeds, held to the suite's tolerances. Operations against the reference in float64; public
  functions, which prepare their arrays in plain JAX, against XLA in float64. Several heads, so that no sum is small by chance.
- times: of `recurrence_times.py`, B1 T8192 H32 D128. With `--before`, what PYTHONPATH was for the tree before, also of that, in
  processes one after the other: now, before, now.

Prints tables, writes `recurrence_sums.json` under `--out` (or `$OUT`), exits with 1 if a number is wrong. `--only` a regular
expression for names of sums and families; `--platform xla` for its sums; `--budget` seconds after which nothing new is started;
`--small` tries the script without a GPU, Triton in its interpreter.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the device
if "--small" in sys.argv or os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ["EJKERNEL_TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel.call.case import Case
from ejkernel.operations.causal_conv1d.cases import arrays as convolution
from ejkernel.operations.delta_rule.cases import arrays as delta
from ejkernel.operations.linear_recurrence.cases import arrays as linear
from ejkernel.operations.rwkv4.cases import arrays as rwkv4
from ejkernel.operations.selective_scan.cases import arrays as scan
from ejkernel.plugin import Target
from ejkernel.testing.problem import Problem, case_named, operations_of
from ejkernel.utils.tolerance import GRADIENT, Deviation, deviation

HEADS, WIDTH = 8, 16
FACTORS: Mapping[str, Any] = {"value_scale": True, "skip": "head"}
Arrays = dict[str, Any]

# Operations, by the length


def _linear(decays: str, rate: float, **more: Any) -> Callable[[int], Case]:
    sizes = {"heads": HEADS, "width": WIDTH, "channels": WIDTH, "decays": decays, "rate": rate, **more}
    return lambda length: Case("", linear(1, length, **sizes))


def _delta(**more: Any) -> Callable[[int], Case]:
    return lambda length: Case("", delta(1, length, HEADS, WIDTH, WIDTH, **more))


def _norm(operation: str) -> Callable[[int], Case]:
    """The operation's own case with a scale, with as many rows; sums over rows."""
    case = case_named(operation, "scale" if operation == "add_rms_norm" else "scale-offset")

    def grown(length: int, rng: np.random.Generator) -> Arrays:
        made = dict(case.arrays(rng))
        return made | {
            name: rng.standard_normal((length, x.shape[-1])).astype(x.dtype) for name, x in made.items() if x.ndim > 1
        }

    return lambda length: Case("", functools.partial(grown, length), case.options)


OPERATIONS: Mapping[str, tuple[str, Callable[[int], Case]]] = {
    **{
        f"linear {decays} {rate}": ("linear_recurrence", _linear(decays, rate))
        for decays in ("gamma", "g gamma", "gk", "gk gamma")
        for rate in (0.05, 2.0)
    },
    "linear bonus": ("linear_recurrence", _linear("gk", 0.5, bonus=True)),
    "linear factors": ("linear_recurrence", _linear("g", 0.1, **FACTORS)),
    "linear factors, shared keys": ("linear_recurrence", _linear("g gamma", 0.1, value_heads=HEADS, **FACTORS | {"heads": 1})),
    "delta gated": ("delta_rule", _delta()),
    "delta by channel": ("delta_rule", _delta(decay="channel")),
    "delta general": ("delta_rule", _delta(beta=False, decay="channel", low_rank="ab")),
    "delta general, beta": ("delta_rule", _delta(low_rank="ab")),
    "mamba-1": ("selective_scan", lambda length: Case("", scan(1, length, 16, 16))),
    "rwkv-4": ("rwkv4", lambda length: Case("", rwkv4(1, length, 32))),
    "convolution": ("causal_conv1d", lambda length: Case("", convolution(1, length, 32))),
    **{name: (name, _norm(name)) for name in ("rms_norm", "layer_norm", "add_rms_norm")},
}


# Public functions, by the length


def _drawn(length: int, seed: int, shapes: Mapping[str, tuple[int | str, ...]]) -> Arrays:
    """Normal numbers; "T" is the length."""
    rng = np.random.default_rng(seed)
    sizes = {name: tuple(length if isinstance(size, str) else size for size in shape) for name, shape in shapes.items()}
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


_TOKENS, _ROWS, _PER_HEAD = (1, "T", HEADS, WIDTH), (1, "T", 1, WIDTH), (1, "T", HEADS)
FUNCTIONS: Mapping[str, tuple[Callable[..., Any], Mapping[str, tuple[int | str, ...]]]] = {
    "mlstm": (  # with a divisor that is never near its least, where gradients jump
        lambda query, key, input_gate, **given: ejkernel.mlstm(abs(query), abs(key), input_gate=input_gate + 2, **given)[0],
        {**dict.fromkeys(("query", "key", "value"), _TOKENS), "input_gate": _PER_HEAD, "forget_gate": _PER_HEAD},
    ),
    "mamba-2": (
        lambda A, **given: ejkernel.state_space_v2(A=-jnp.exp(A), dt_softplus=True, **given)[0],
        {"x": _TOKENS, "A": (HEADS,), "B": _ROWS, "C": _ROWS, "D": (HEADS,), "dt": _PER_HEAD, "dt_bias": (HEADS,)},
    ),
    "mamba-3": (
        lambda A, **given: ejkernel.mamba3(A=-jnp.exp(A), dt_softplus=True, **given)[0],
        {
            "x": _TOKENS,
            "A": (HEADS,),
            "B": _ROWS,
            "C": _ROWS,
            "D": (HEADS,),
            "dt": _PER_HEAD,
            "dt_bias": (HEADS,),
            "trap": _PER_HEAD,
            "angles": (1, "T", 1, 4),
            "B_bias": (HEADS, WIDTH),
            "C_bias": (HEADS, WIDTH),
        },
    ),
    "rwkv-6": (
        lambda w, **given: ejkernel.rwkv6(w=-jnp.exp(w - 1), **given),
        {**dict.fromkeys(("r", "k", "v", "w"), _TOKENS), "u": (HEADS, WIDTH)},
    ),
}


def gradients(function: Callable[..., Any], arrays: Arrays, platform: str, dtype: str) -> Any:
    """Of a sum of what a public function returns with fixed weights, of numbers that the dtype holds."""

    def loss(given: Arrays) -> Any:
        out = function(**given, platform=platform)
        weights = np.random.default_rng(0).standard_normal(out.shape).astype(jnp.bfloat16)
        return jnp.sum(out * jnp.asarray(weights, out.dtype), dtype=jnp.promote_types(out.dtype, jnp.float32))

    return jax.jit(jax.grad(loss))({name: jnp.asarray(array, dtype) for name, array in arrays.items()})


def measured(name: str, length: int, seed: int, dtype: str, platform: str) -> dict[str, Deviation] | str:
    """How far gradients are off, by array; or why they were not computed."""
    if name in OPERATIONS:
        operation, make = OPERATIONS[name]
        if operation not in operations_of(platform):
            return f"{platform} has no code for it"
        case = dataclasses.replace(make(length), name=f"{name}-{length}-{seed}")
        problem = Problem(operation, case, dtype, platform)
        refusal = problem.refusal() or problem.refusal("backward")
        if refusal:
            return refusal
        found, exact = problem.gradients(), problem.expected_gradients
    else:
        function, shapes = FUNCTIONS[name]
        arrays = {key: np.asarray(jnp.asarray(x, dtype)) for key, x in _drawn(length, seed, shapes).items()}
        found = gradients(function, arrays, platform, dtype)
        with jax.enable_x64(True):
            wide = {key: array.astype(np.float64) for key, array in arrays.items()}
            exact = jax.tree.map(np.asarray, gradients(function, wide, "xla", "float64"))
    return {key: deviation(value, exact[key]) for key, value in found.items()}


def sums(options: argparse.Namespace, report: Report) -> None:
    limit = GRADIENT[options.dtype]
    for length in options.lengths:
        for name in (*OPERATIONS, *FUNCTIONS):
            if not re.search(options.only, name) or report.late():
                continue
            worst: dict[str, Deviation] = {}
            refusal = ""
            for seed in range(options.seeds):
                found = measured(name, length, seed, options.dtype, options.platform)
                if isinstance(found, str):
                    refusal = found
                    break
                for key, value in found.items():
                    before = worst.get(key, value)
                    worst[key] = Deviation(max(before.norm, value.norm), max(before.element, value.element))
            wrong = [key for key, value in worst.items() if not value.within(limit)]
            line = refusal or ", ".join(f"{key} {value.norm:.1e}" for key, value in worst.items())
            print(f"T{length} {name}: {line}{'  WRONG: ' + ', '.join(wrong) if wrong else ''}", flush=True)
            row = {"name": name, "length": length, "wrong": wrong, "refusal": refusal}
            report.add("sums", row | {"worst": {key: dataclasses.astuple(value) for key, value in worst.items()}}, not wrong)


def times(options: argparse.Namespace, report: Report) -> None:
    paths = {"now": os.environ.get("PYTHONPATH", "")}
    if options.before:
        paths |= {"before": options.before, "now, again": paths["now"]}
    found: dict[str, dict[str, float]] = {}
    for label, path in paths.items():
        if report.late():
            break
        small = ["--small"] if options.small else []
        command = [sys.executable, str(pathlib.Path(__file__).with_name("recurrence_times.py")), "--only", options.only, *small]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            report.add("times", {"tree": label, "failed": done.returncode}, False)
            continue
        found[label] = json.loads(done.stdout.splitlines()[-1])
    for name in found.get("now", {}):
        row = {label: of_tree[name] for label, of_tree in found.items() if name in of_tree}
        ratio = f"  before / now {row['before'] / row['now']:.2f}" if "before" in row else ""
        print(f"{name}: {', '.join(f'{label} {value:.3f} ms' for label, value in row.items())}{ratio}", flush=True)
        report.add("times", {"name": name, **row}, True)


def conformance(options: argparse.Namespace, report: Report) -> None:
    root = pathlib.Path(__file__).parents[2]
    chosen = options.operations.replace(",", " or ")
    if options.small:
        chosen = f"({chosen}) and (test_forward or test_sums_over_time)"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "ejkernel-triton/tests/test_conformance.py"]
    command += ["--ejkernel-platform=triton", "-k", chosen, f"--extent={'quick' if options.small else options.extent}"]
    command += [
        f"--ejkernel-report={pathlib.Path(options.out).resolve() / 'recurrence_conformance.json'}",
        *options.pytest.split(),
    ]
    done = subprocess.run(command, cwd=root, check=False)
    report.add("conformance", {"command": command[1:], "exit": done.returncode}, done.returncode == 0)


class Report:
    def __init__(self, options: argparse.Namespace) -> None:
        self.path, self.started, self.budget = (
            pathlib.Path(options.out) / "recurrence_sums.json",
            time.monotonic(),
            options.budget,
        )
        device = jax.devices()[0].device_kind
        self.result: dict[str, Any] = {"device": device, "jax": jax.__version__, "ejkernel": ejkernel.__version__}
        self.result["options"] = {name: value for name, value in vars(options).items() if name not in ("out", "before")}
        self.failed = 0

    def late(self) -> bool:
        return time.monotonic() - self.started > self.budget

    def add(self, part: str, row: Mapping[str, Any], passed: bool) -> None:
        self.result.setdefault(part, []).append({**row, "passed": passed})
        self.failed += not passed
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.result, indent=1))


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--parts", default="sums,times,conformance")
    parser.add_argument("--operations", default="linear_recurrence,delta_rule", help="whose conformance runs")
    parser.add_argument("--extent", default="standard", help="of the suite")
    parser.add_argument("--pytest", default="", help="more options, as '-n 8 -p no:benchmark'")
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[65, 1000, 8192])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--platform", default="triton")
    parser.add_argument("--only", default="", help="a regular expression for names")
    parser.add_argument("--before", default="", help="PYTHONPATH of the tree before")
    parser.add_argument("--budget", type=float, default=1500)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    if options.small:
        options.lengths, options.seeds = options.lengths[:1], 1
    return options


def parts_of(options: argparse.Namespace) -> Iterator[Callable[[argparse.Namespace, Report], None]]:
    known = {"sums": sums, "times": times, "conformance": conformance}
    for name in options.parts.split(","):
        if name not in known:
            raise SystemExit(f"--parts: got {name!r}, expected {', '.join(known)}")
        yield known[name]


def main() -> int:
    options = options_of(sys.argv[1:])
    on_gpu = jax.default_backend() == "gpu"
    with ejkernel.use(target=None if on_gpu else Target("gpu", "NVIDIA H200", "9.0")):
        report = Report(options)
        for part in list(parts_of(options)):
            part(options, report)
    print(f"{report.failed} wrong")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
