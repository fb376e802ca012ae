"""`grouped_matmul` through Mosaic GPU on a real Hopper GPU: every config's numbers, then device times beside peers.

    python ejkernel-pallas/tests/device/mosaic_gpu_grouped_matmul.py --out results [--parts numbers,times,peers] [--cases 8192-8]

The problems, the measures and the peers in torch are those of `tests/device/grouped_matmul.py`. Small ragged problems, with NaN in
rows without a matrix, are compared with the float64 reference; at the timed sizes every config with a product per group by cuBLAS.
Times are device times (CUPTI), the tables of tiles that XLA computes included. `lhs` and `rhs` are the gradients. Cases named
`-float8` have both sides in float8 and scales for rows and columns; they run forward only, beside `torch._scaled_grouped_mm` (with
and without its promotion of sums), XLA's product in bfloat16 and our own kernel on the same problem in bfloat16. For comparison:
DeepGEMM, whose scales are per block of 128, publishes 1.3 to 1.5 PFLOP/s. Writes `mosaic_gpu_grouped_matmul.json` and exits with 1
if any number is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "device"))

import grouped_matmul as shared
import jax
import jax.numpy as jnp
import numpy as np
from check_gpu import versions

from ejkernel.operations.grouped_matmul import reference
from ejkernel.operations.grouped_matmul.interface import GroupedMatmulOutputs
from ejkernel.operations.grouped_matmul.phases import bounds_of_call
from ejkernel.plugin import current_target
from ejkernel.utils.tolerance import FORWARD
from ejkernel_pallas.mosaic_gpu.grouped_matmul import capability, config, kernel

BEGIN = time.monotonic()
PHASES = shared.PHASES
MAIN = ("8192-8", "32768-32", "131072-128")
"""Of these every config is timed."""
NARROW = {"dtype": "float8_e4m3fn", "transpose": True, "scale": "column", "row_scale": True}
FLOAT8 = {
    f"{name}-float8": dataclasses.replace(shared.TIMES[name], **NARROW)
    for name in (*MAIN, "8192-8-skewed", "decode-8", "decode-128")
}
TIMES = {**shared.TIMES, **FLOAT8}
CASES = (
    *FLOAT8,
    *(*MAIN, "8192-8-skewed", "131072-128-skewed", "8192-8-transposed", "8192-8-float32-out", "decode-8", "decode-128"),
)
NUMBERS = {
    **shared.NUMBERS,
    "ragged-large": shared.Problem((300, 0, 1, 513, 64, 0, 150), 320, 448, rows=1100),
    "float16-scale": dataclasses.replace(shared.NUMBERS["ragged-float16"], scale="column", bias=True),
    "all-empty": shared.Problem((0, 0, 0), 128, 192, rows=40),
    "whole-tiles": shared.Problem((256, 512, 128), 256, 512),
    "float8": shared.Problem(shared.RAGGED, 192, 320, rows=520, bias=True, **NARROW),
    "float8-large": shared.Problem((300, 0, 1, 513, 64, 0, 150), 384, 448, rows=1100, **NARROW),
    "float8-deep": shared.Problem((130, 0, 64, 200), 7168, 256, rows=400, **NARROW),
    "float8-mixed": shared.Problem(
        shared.RAGGED, 256, 264, rows=520, **{**NARROW, "dtype": "float8_e5m2"}, stored="float8_e4m3fn", offset=2, held=3
    ),
    "float8-float32-out": shared.Problem(
        (130, 0, 64, 200), 7168, 256, existing=True, options=(("preferred_element_type", "float32"),), **NARROW
    ),
}
EVERY = ("ragged-large", "float8-large")
"""Of these every config's numbers are looked at."""


def brief(choice: Any) -> str:
    """`128x256 s4 e2 band16 x132`, with the cluster; of both gradients."""

    def one(tile: Any) -> str:
        cluster = f" c{tile.cluster}" if tile.cluster > 1 else ""
        stages = f"s{tile.num_stages} e{tile.epilogue_stages}"
        return f"{tile.block_m}x{tile.block_n} {stages} band{tile.l2_swizzle}{cluster} x{tile.programs}"

    return one(choice) if isinstance(choice, config.Tile) else f"{one(choice.tile_of_lhs)} | {one(choice.tile_of_rhs)}"


def compiled(programs: list[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
    """Lowered one after the other, compiled side by side; an exception stands for a program that did not."""

    def lower(function: Any, arguments: tuple[Any, ...]) -> Any:
        try:
            return jax.jit(function).lower(*arguments)
        except Exception as error:  # noqa: BLE001 - what does not lower is a result
            return error

    def finish(lowered: Any) -> Any:
        if isinstance(lowered, Exception):
            return lowered
        try:
            return lowered.compile()
        except Exception as error:  # noqa: BLE001 - what does not compile is a result
            return error

    found = [lower(*program) for program in programs]
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(finish, found))


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else repr(error)


def check_numbers(save: Any, budget: float) -> bool:
    """Against the float64 reference, twice, and the two runs are the same bits."""
    target, passed = current_target(), True
    for name, problem in NUMBERS.items():
        call, inputs, grad = problem.build(poison=True)
        if capability.supports_forward(call, target) is not None or time.monotonic() - BEGIN > budget:
            continue
        wanted = reference.forward(call, shared.wide(inputs))
        gradients = reference.backward(
            call, shared.wide(inputs), wanted, GroupedMatmulOutputs(np.asarray(grad.astype(jnp.float32), np.float64))
        )
        limit = {"float16": 1e-3}.get(problem.dtype, FORWARD["bfloat16"].norm if problem.narrow else 6e-3)
        most = None if name in EVERY else 1
        runs: list[tuple[str, Any, Any, tuple[Any, ...]]] = [
            ("forward", choice, lambda i, c=choice, call=call: kernel.forward(call, i, c), (inputs,))
            for choice in config.forward_space(call, target)[:most]
        ]
        runs += [
            (
                "backward",
                choice,
                lambda i, g, c=choice, call=call: kernel.backward(call, i, g, g, c),
                (inputs, GroupedMatmulOutputs(grad)),
            )
            for choice in config.backward_space(call, target)[:most]
        ]
        for (phase, choice, _, arguments), program in zip(runs, compiled([run[2:] for run in runs]), strict=True):
            errors: dict[str, float] = {}
            if not isinstance(program, Exception):
                got, want = program(*arguments), wanted if phase == "forward" else gradients
                pairs = [(n, g, w) for n, g, w in zip(got._fields, got, want, strict=True) if g is not None]
                errors = {n: shared.relative(g.astype(jnp.float32), w) for n, g, w in pairs}
                again = program(*arguments)
                same = [
                    np.array_equal(a, b, equal_nan=True)
                    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True)
                ]
                errors |= {} if all(same) else {"repeat": float("nan")}
            good = bool(errors) and all(error < limit for error in errors.values())
            detail = " ".join(f"{k} {v:.1e}" for k, v in errors.items()) or first_line(program)
            save("numbers", {"case": name, "phase": phase, "config": brief(choice), "passed": good, "detail": detail})
            passed &= good
    return passed


def runs_of(call: Any) -> dict[str, Any]:
    """Forward and the two gradients, each `(inputs, grad, tile) -> array`."""
    return {
        "forward": lambda i, g, tile: kernel.forward(call, i, tile).out,
        "lhs": lambda i, g, tile: kernel.gradient_of_lhs(
            call, i, bounds_of_call(call, i), g.astype(call.product_dtype), None, tile
        ),
        "rhs": lambda i, g, tile: kernel.gradients_of_matrices(
            call, i, bounds_of_call(call, i), g.astype(call.product_dtype), tile
        )["rhs"],
    }


def time_configs(name: str, problem: Any, save: Any, *, every: bool) -> bool:
    call, inputs, grad = problem.build()
    passed = True
    for phase in phases_of(name, problem):
        run = runs_of(call)[phase]
        choices = config._space(config._product_of(call, phase), current_target())
        choices = choices if every else choices[:1]
        programs = compiled([(lambda i, g, c=c, run=run: run(i, g, c), (inputs, grad)) for c in choices])
        wanted = None
        if problem.narrow and len({*problem.sizes}) == 1:
            wanted = jax.jit(in_bfloat16)(inputs)
        elif not problem.narrow and name not in shared.UNCHECKED:
            by_group = jax.jit(shared.by_group(problem, phase))
            wanted = by_group(inputs.lhs[0], inputs.rhs[0], grad[0].astype(problem.dtype))
        for choice, program in zip(choices, programs, strict=True):
            row = {"case": name, "phase": phase, "config": brief(choice)}
            if isinstance(program, Exception):
                save("times", {**row, "failed": first_line(program)})
                passed = False
                continue
            error = None if wanted is None else float(shared.deviation(program(inputs, grad)[0], wanted))
            seconds, kernels = shared.device_times(program, (inputs, grad))
            parts = {k[:40]: round(v * 1e6, 1) for k, v in kernels.items()} if choice is choices[0] else {}
            passed &= error is None or error < 6e-3
            save(
                "times",
                {**shared.row_of(name, problem, phase, seconds), "config": brief(choice), "error": error, "parts": parts},
            )
    return passed


def phases_of(name: str, problem: Any) -> tuple[str, ...]:
    return ("forward",) if problem.narrow or name.startswith("decode") else PHASES


def in_bfloat16(inputs: Any) -> Any:
    """Groups of one size as one batched product of float8 values in bfloat16, which holds them, then scaled."""
    count, columns, _ = inputs.rhs[0].shape
    lhs = inputs.lhs[0].reshape(count, -1, inputs.lhs.shape[2]).astype(jnp.bfloat16)
    out = jnp.matmul(lhs, inputs.rhs[0].mT.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    out = out * inputs.lhs_scale.reshape(count, -1, 1) * inputs.rhs_scale.reshape(count, 1, columns)
    return out.astype(jnp.bfloat16).reshape(-1, columns)


def time_float8_peers(name: str, problem: Any, save: Any) -> None:
    _, inputs, _ = problem.build()
    half = dataclasses.replace(problem, dtype="bfloat16", scale="", row_scale=False)
    call, wide, _ = half.build()
    tile = config.forward_heuristic(call, current_target())
    ways: list[tuple[str, Any, Any]] = [("ours in bfloat16", lambda i: kernel.forward(call, i, tile).out, wide)]
    if len({*problem.sizes}) == 1:
        ways.append(("widened, by group", in_bfloat16, inputs))
    for way, function, arguments in ways:
        try:
            seconds, _ = shared.device_times(jax.jit(function), (arguments,), 3)
            save("peers", {**shared.row_of(name, problem, "forward", seconds), "name": way})
        except Exception as error:  # noqa: BLE001 - what a peer cannot do is a result
            save("peers", {"case": name, "name": way, "phase": "forward", "failed": first_line(error)})
    try:
        shared.time_torch_float8(name, problem, save)
    except ImportError as error:
        save("peers", {"case": name, "name": "torch._scaled_grouped_mm", "failed": first_line(error)})


def time_peers(name: str, problem: Any, save: Any) -> None:
    """Our Triton kernels, JAX's Mosaic GPU example, tokamax, a product per group by cuBLAS; torch."""
    call, inputs, grad = problem.build()
    lhs, rhs, sizes = inputs.lhs[0], inputs.rhs[0], inputs.group_sizes[0]
    ways: list[tuple[str, str, Any, tuple[Any, ...]]] = []
    for phase in PHASES if not name.startswith("decode") else ("forward",):
        (tile,) = shared.candidates(call, phase, every=False)
        run = shared.phases(call)[phase]
        ways.append(("ejkernel triton", phase, lambda i, g, run=run, tile=tile: run(i, g, tile), (inputs, grad)))
        if name not in shared.UNCHECKED and not name.startswith("decode"):
            ways.append(("by group", phase, shared.by_group(problem, phase), (lhs, rhs, grad[0].astype(problem.dtype))))
    if not problem.transpose and not problem.options:
        ways += [("jax example", "forward", example, (lhs, rhs, sizes)), ("tokamax", "forward", tokamax_way, (lhs, rhs, sizes))]
    for way, phase, function, arguments in ways:
        try:
            seconds, _ = shared.device_times(jax.jit(function), arguments, 3)
            save("peers", {**shared.row_of(name, problem, phase, seconds), "name": way})
        except Exception as error:  # noqa: BLE001 - what a peer cannot do is a result
            save("peers", {"case": name, "name": way, "phase": phase, "failed": first_line(error)})
    if not problem.options:
        try:
            shared.time_torch(name, problem, save)
        except ImportError as error:
            save("peers", {"case": name, "name": "torch._grouped_mm", "failed": first_line(error)})


def example(lhs: Any, rhs: Any, sizes: Any) -> Any:
    """With blocks from the middle of its own search."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    return ragged_dot_mgpu.ragged_dot(
        lhs, rhs, group_sizes=sizes, block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=8
    )


def tokamax_way(lhs: Any, rhs: Any, sizes: Any) -> Any:
    import tokamax

    return tokamax.ragged_dot(lhs, rhs, sizes, implementation="mosaic_gpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--parts", default="numbers,times,peers")
    parser.add_argument("--cases", default=",".join(CASES))
    fully = ",".join((*MAIN, *list(FLOAT8)[:3]))
    parser.add_argument("--every", default=fully, help="cases of which every config is timed; of others the heuristic's")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds after which nothing new is started")
    given = parser.parse_args()
    parts, every = given.parts.split(","), given.every.split(",")
    result: dict[str, Any] = {"versions": versions(), "numbers": [], "times": [], "peers": []}

    def save(part: str, row: dict[str, Any]) -> None:
        result[part].append(row)
        if part != "numbers" or not row["passed"]:
            print(f"{time.monotonic() - BEGIN:6.1f}s", " ".join(map(shared.shown, row.values())), flush=True)
        (Path(given.out) / "mosaic_gpu_grouped_matmul.json").write_text(json.dumps(result, indent=1))

    passed = True
    if "numbers" in parts:
        passed = check_numbers(save, given.budget / 2)
        print(f"numbers: {sum(row['passed'] for row in result['numbers'])} of {len(result['numbers'])} right", flush=True)
    for name in given.cases.split(","):
        problem = TIMES[name]
        if "times" in parts and time.monotonic() - BEGIN < given.budget:
            passed &= time_configs(name, problem, save, every=name in every)
        if "peers" in parts and time.monotonic() - BEGIN < given.budget:
            (time_float8_peers if problem.narrow else time_peers)(name, problem, save)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
