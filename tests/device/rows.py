"""Operations over rows on a real GPU, in Triton or CUDA C++: norms, `softmax`, `rope`, what is fused of them, `mean_pooling`;
`causal_conv1d` and `cross_entropy` of logits.

    python tests/device/rows.py --out results

First numbers at many widths against the float64 references, equal runs, and offsets beyond 2^31 elements. Then, for the shapes of
the targets, configs of the search space: each is compared with XLA's result in float32 and timed (device time by CUPTI), beside
textbook jnp, our XLA platform, a Triton copy of as many bytes, torch.compile and Liger where they can be imported. Prints tables,
writes `rows.json` under `--out` (or `$OUT`), exits with 1 if a number is wrong.

`--platform cuda` (triton), `--only softmax,rope`, `--match x128,32768` for timed problems whose name has one of these texts,
`--budget` seconds after which nothing new is started (280), `--most` configs for each shape and phase (10; 0 = all), `--threads`
that compile (4), `--skip numbers,sweep,peers`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import check_gpu
import jax
import jax.numpy as jnp
import numpy as np
from as_much import can_move, moved
from row_problems import TIMED, Prepared, Problem, checked_problems, moved_bytes, norm, textbook

from ejkernel.operations import operation_module
from ejkernel.plugin import current_target

XLA, TEXTBOOK, TRITON, AS_MUCH = BESIDE = ("our XLA", "textbook jnp", "our Triton", "a copy of as many bytes")
TOLERANCE = {"float32": 2e-5, "bfloat16": 8e-3, "float16": 1.5e-3}


class Rows:
    """One row per check."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, check: str, passed: bool, detail: str) -> None:
        self.rows.append({"check": check, "passed": bool(passed), "detail": detail})
        if not passed:
            print(f"  FAILED {check}: {detail}", flush=True)

    def compare(
        self, check: str, got: dict[str, Any], wanted: dict[str, Any], limit: float, floors: dict[str, float] | None = None
    ) -> None:
        errors = {key: _relative(got[key], wanted[key], (floors or {}).get(key, 0.0)) for key in wanted}
        self.add(check, all(e <= limit for e in errors.values()), " ".join(f"{k} {e:.1e}" for k, e in errors.items()))


def _relative(got: Any, wanted: Any, floor: float = 0.0) -> float:
    """Relative L2 error, NaN where anything is; on the device unless `wanted` is on the host."""
    if isinstance(wanted, np.ndarray):
        return check_gpu.relative(got, wanted, floor)
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm(got - wanted) / jnp.maximum(jnp.linalg.norm(wanted), 1e-30))


def check_numbers(operation: str, rows: Rows, budget: float, platform: str) -> None:
    for index, problem in enumerate(checked_problems(operation)):
        for dtype in ("bfloat16", "float32") if index % 3 == 0 else ("bfloat16",):
            if check_gpu.remaining(budget) < 0:
                return
            prepared = Prepared(problem, dtype, index, platform)
            got = prepared.ours()
            wanted = prepared.exact()
            rows.compare(f"{problem.name} {problem.options or ''} {dtype}", got, wanted, TOLERANCE[dtype], prepared.floors)
    timed = next(problem for problem in (*TIMED, norm("rms_norm", 16384, 4096)) if problem.operation == operation)
    prepared = Prepared(timed, "bfloat16", platform=platform)
    first = jax.tree.map(np.asarray, prepared.ours())
    equal = all(
        all(
            np.array_equal(first[key].view(np.uint16), np.asarray(value).view(np.uint16))
            for key, value in prepared.ours().items()
        )
        for _ in range(2)
    )
    rows.add(f"{timed.name}: three equal runs", equal, "bit by bit")


def check_large(operation: str, rows: Rows, platform: str) -> None:
    """More than 2^31 elements, the last rows of which show whether offsets are 64 bits wide.

    The cotangent is zero but for the last rows, so that they alone make the parameters' gradients. It is x with its columns
    turned round: x itself would be a bad one, for layer_norm's gradient takes x off its cotangent but for epsilon / variance
    of it, 1e-6, of which float32 keeps one digit.
    """
    if operation not in ("softmax", "layer_norm"):
        return
    kernel = importlib.import_module(f"ejkernel_{platform}.{operation}.kernel")
    config = importlib.import_module(f"ejkernel_{platform}.{operation}.config")
    xla = importlib.import_module(f"ejkernel_xla.{operation}.kernel")
    interface = operation_module(operation, "interface")
    x = jax.jit(lambda: jax.random.normal(jax.random.key(0), (560_000, 4096), jnp.bfloat16))()
    parameters = [x[0], x[1]] if operation == "layer_norm" else []

    def run(module, x, configs):
        bound = interface.OPERATION.canonicalise(x, *parameters)
        call, inputs = dataclasses.replace(bound.call, save_residuals=True), bound.inputs
        last = jnp.arange(x.shape[0])[:, None] >= x.shape[0] - 64
        cotangent = jnp.where(last, x[:, ::-1], 0).reshape(inputs.x.shape)
        choose = [c.heuristic(call, current_target()) if c else None for c in configs]
        outputs = module.forward(call, inputs, choose[0])
        gradients = module.backward(call, inputs, outputs, interface.OPERATION.Outputs(cotangent), choose[1])
        named = {f"d_{key}": value for key, value in gradients._asdict().items() if value is not None}
        return named | {"out": outputs.out.reshape(x.shape)[-64:], "d_x": gradients.x.reshape(x.shape)[-64:]}

    got = jax.jit(lambda x: run(kernel, x, (config.FORWARD, config.BACKWARD)))(x)
    wanted = jax.jit(lambda x: run(xla, x, (None, None)))(x[-64:])
    rows.compare(f"{operation} beyond 2^31 elements", got, wanted, 8e-3)


# Speed


@dataclasses.dataclass
class Candidate:
    """One function of the prepared input sets, named."""

    name: str
    phase: str
    function: Callable[..., Any]
    chosen: bool = False
    wanted: Any = None


def gradients_of_interest(prepared: Prepared, gradients: Any) -> list[Any]:
    left_out = ("cos", "sin")
    return [value for name, value in gradients._asdict().items() if value is not None and name not in left_out]


def as_much(count: int) -> Callable[..., Any]:
    return lambda inputs, outputs, cotangents: moved((inputs.x, *cotangents)[:count])


def candidates(prepared: Prepared, most: int) -> list[Candidate]:
    target, found = current_target(), []

    def forward(module, cfg, call):
        return lambda inputs, outputs, cotangents: [
            getattr(module.forward(call, inputs, cfg), name) for name in prepared.public
        ]

    def backward(module, cfg, call):
        return lambda inputs, outputs, cotangents: gradients_of_interest(
            prepared, module.backward(call, inputs, outputs, cotangents, cfg)
        )

    for phase, make, call in (("forward", forward, prepared.light), ("backward", backward, prepared.call)):
        space = prepared.config.FORWARD if phase == "forward" else prepared.config.BACKWARD
        heuristic, configs = space.heuristic(call, target), space.search_space(call, target)
        for cfg in check_gpu.chosen_of(configs, heuristic, most or len(configs)):
            found.append(Candidate(check_gpu.knobs(cfg), phase, make(prepared.kernel, cfg, call), cfg == heuristic))
        found.append(Candidate(XLA, phase, make(prepared.xla, prepared.xla_config, call)))
        if prepared.problem.operation in ("softmax", "rms_norm", "layer_norm"):
            arrays = (prepared.inputs.x, *prepared.cotangents)[: 1 if phase == "forward" else 2]
            if can_move(arrays):
                found.append(Candidate(AS_MUCH, phase, as_much(len(arrays))))
        found.append(Candidate(TEXTBOOK, phase, textbook(prepared, phase)))
    return found


def _has(platform: str, operation: str) -> bool:
    return importlib.util.find_spec(f"ejkernel_{platform}") is not None and (
        importlib.util.find_spec(f"ejkernel_{platform}.{operation}") is not None
    )


def time_problem(problem: Problem, rows: Rows, options: argparse.Namespace) -> list[dict[str, Any]]:
    prepared = Prepared(problem, "bfloat16", platform=options.platform)
    set_bytes = sum(value.nbytes for value in jax.tree.leaves((prepared.inputs, prepared.cotangents)))
    sets = []
    for seed in range(max(1, min(8, -(-300_000_000 // set_bytes)))):
        one = Prepared(problem, "bfloat16", 10 * seed, options.platform)
        sets.append((one.inputs, one.outputs(), one.cotangents))
    found = candidates(prepared, options.most)
    if options.platform != "triton" and _has("triton", problem.operation):
        triton = candidates(Prepared(problem, "bfloat16"), 1)
        found += [dataclasses.replace(one, name=TRITON, chosen=False) for one in triton if one.chosen]
    wanted = {c.phase: jax.jit(c.function)(*map(check_gpu.in_float32, sets[0])) for c in found if c.name == TEXTBOOK}

    def compiled(candidate):
        single = jax.jit(candidate.function).lower(*sets[0]).compile()
        several = jax.jit(lambda sets: [candidate.function(*values) for values in sets]).lower(sets).compile()
        return single, several

    results = []
    share = (options.budget - (time.monotonic() - check_gpu.started)) / max(1, options.left)
    deadline = time.monotonic() + max(share, 3)
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        order = sorted(found, key=lambda c: not (c.chosen or c.name in BESIDE))
        while order and time.monotonic() < deadline:
            batch, order = order[: options.threads], order[options.threads :]
            for candidate, (single, several) in zip(batch, pool.map(compiled, batch), strict=True):
                got = single(*sets[0])
                if candidate.name != AS_MUCH:
                    rows.compare(
                        f"{problem.name} {candidate.phase} {candidate.name}",
                        {str(i): value for i, value in enumerate(got)},
                        {str(i): value for i, value in enumerate(wanted[candidate.phase])},
                        2e-2,
                    )
                results.append(timed(problem, prepared, candidate, several, sets))
    if order:
        print(f"  left out of {problem.name}, as its time was over: {[(c.phase, c.name) for c in order]}", flush=True)
    for phase in ("forward", "backward"):
        ranked = sorted((r for r in results if r["phase"] == phase and r["ours"]), key=lambda r: r["microseconds"])
        best = [(row["name"], round(row["fraction"], 3)) for row in ranked[:3]]
        print(f"  best of {len(ranked)} {phase} {problem.name}: {best}", flush=True)
    return results


def timed(problem: Problem, prepared: Prepared, candidate: Candidate, program: Any, sets: list[Any]) -> dict[str, Any]:
    from jax.experimental.mosaic.gpu import profiler

    # One run at a time: CUPTI may lose or add a record, and a run that has another number of kernels than most is left out.
    measure = profiler.Cupti(finalize=False).measure(program, aggregate=False)
    runs = [measure(sets)[1] or [] for _ in range(5)]
    usual = statistics.mode(len(run) for run in runs)
    runs = [run for run in runs if len(run) == usual]
    samples = [sum(ms for _, ms in run) / 1e3 / len(sets) for run in runs]
    kernels = {
        kernel: statistics.median(sum(ms for name, ms in run if name == kernel) * 1e3 / len(sets) for run in runs)
        for kernel in dict.fromkeys(name for name, _ in runs[0])
    }
    return result_row(problem.name, candidate.phase, candidate.name, samples, moved_bytes(prepared, candidate.phase), {
        "chosen": candidate.chosen, "ours": candidate.name not in (XLA, TEXTBOOK, AS_MUCH), "clock": "device",
        "kernels": kernels,
    })  # fmt: skip


def result_row(problem: str, phase: str, name: str, samples: list[float], moved: int, more: dict[str, Any]) -> dict[str, Any]:
    median = statistics.median(samples)
    row = {
        "problem": problem, "phase": phase, "name": name, "microseconds": median * 1e6,
        "spread": (max(samples) - min(samples)) / median, "fraction": moved / check_gpu.BANDWIDTH / median, **more,
    }  # fmt: skip
    mark = "*" if more.get("chosen") else " "
    print(f"  {problem:34s} {phase:8s} {mark}{name:62s} {row['microseconds']:9.1f} us  {row['fraction']:.3f}", flush=True)
    return row


# Peers


def torch_functions() -> dict[str, dict[str, Callable[..., Any]]]:
    """Functions of torch tensors by operation and peer."""
    import torch

    functions = torch.nn.functional

    def rope(query, key, cos, sin):
        def rotate(x):
            first, second = x.chunk(2, dim=-1)
            return torch.cat([first * c - second * s, second * c + first * s], dim=-1).to(x.dtype)

        c, s = cos[None, :, None], sin[None, :, None]
        return rotate(query), rotate(key)

    found = {
        "layer_norm": {"torch.compile": torch.compile(lambda x, s, o: functions.layer_norm(x, x.shape[-1:], s, o, 1e-6))},
        "softmax": {"torch.compile": torch.compile(lambda x: torch.softmax(x, -1))},
        "rope": {"torch.compile": torch.compile(rope)},
        "mean_pooling": {"torch.compile": torch.compile(lambda x: x.mean(1))},
    }
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        found["layer_norm"]["Liger"] = lambda x, s, o: LigerLayerNormFunction.apply(x, s, o, 1e-6)
        found["softmax"]["Liger"] = LigerSoftmaxFunction.apply
    return found


def time_peers(problem: Problem, peers: dict[str, Callable[..., Any]], platform: str) -> list[dict[str, Any]]:
    """Time torch functions by events around a queue that the host fills ahead of time."""
    import torch
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # backward is timed again and again over the same forward
    if "cu_seqlens" in problem.shapes or problem.options.get("layout") == "BHTD":
        return []
    prepared, rows = Prepared(problem, "bfloat16", platform=platform), []
    for name, function in peers.items():
        count = 4
        sets = []
        for _ in range(count):
            arrays = [
                torch.randn(*shape, device="cuda", dtype=torch.float32 if key in problem.float32 else torch.bfloat16)
                for key, shape in problem.shapes.items()
            ]
            sets.append([a if a.dtype == torch.float32 else a.requires_grad_() for a in arrays])
        outs = [function(*values) for values in sets]
        outs = [out if isinstance(out, tuple) else (out,) for out in outs]
        grads = [tuple(torch.randn_like(o) for o in out) for out in outs]

        def forward(i, function=function, sets=sets):
            with torch.no_grad():
                return function(*sets[i])

        def backward(i, sets=sets, outs=outs, grads=grads):
            return torch.autograd.grad(outs[i], [a for a in sets[i] if a.requires_grad], grads[i], retain_graph=True)

        for phase, call in (("forward", forward), ("backward", backward)):
            samples = []
            for repeat in range(6):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(20_000_000)
                begin.record()
                for i in range(count):
                    call(i)
                end.record()
                torch.cuda.synchronize()
                if repeat:
                    samples.append(begin.elapsed_time(end) / 1e3 / count)
            moved = moved_bytes(prepared, phase)
            rows.append(result_row(problem.name, phase, name, samples, moved, {"ours": False, "clock": "events"}))
        del sets, outs, grads
        torch.cuda.empty_cache()
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of rows.json")
    parser.add_argument("--platform", default="triton", help="whose kernels: triton or cuda")
    parser.add_argument("--only", default="", help="operations, comma separated")
    parser.add_argument("--match", default="", help="texts of which a timed problem's name has one, comma separated")
    parser.add_argument("--budget", type=float, default=280, help="seconds after which nothing new is started")
    parser.add_argument("--most", type=int, default=10, help="configs for each shape and phase; 0 = all")
    parser.add_argument("--threads", type=int, default=4, help="threads that compile")
    parser.add_argument("--skip", default="", help="of numbers,sweep,peers")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    operations = [one for one in options.only.split(",") if one] or [
        one for one in dict.fromkeys(problem.operation for problem in TIMED) if _has(options.platform, one)
    ]
    skip, rows, times = set(options.skip.split(",")), Rows(), []
    versions = check_gpu.versions()
    print(json.dumps(versions), flush=True)

    def save(stage: str) -> None:
        print(f"[{stage}: done at {time.monotonic() - check_gpu.started:.0f} s]", flush=True)
        folder = pathlib.Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rows.json").write_text(json.dumps({"versions": versions, "checks": rows.rows, "times": times}, indent=1))

    if "numbers" not in skip:
        for operation in operations:
            check_numbers(operation, rows, options.budget * 0.3, options.platform)
            check_large(operation, rows, options.platform)
            save(f"numbers of {operation}")
    texts = options.match.split(",")
    problems = [problem for problem in TIMED if problem.operation in operations and any(text in problem.name for text in texts)]
    reserve = 0 if "peers" in skip else 45
    options.budget -= reserve
    for index, problem in enumerate(problems if "sweep" not in skip else ()):
        options.left = len(problems) - index
        times += time_problem(problem, rows, options)
        save(problem.name)
    options.budget += reserve
    if "peers" not in skip and importlib.util.find_spec("torch"):
        peers = torch_functions()
        for problem in problems:
            if check_gpu.remaining(options.budget) > 5:
                times += time_peers(problem, peers.get(problem.operation, {}), options.platform)
        save("peers")
    wrong = [row for row in rows.rows if not row["passed"]]
    print(f"{len(rows.rows)} checks, {len(wrong)} wrong")
    for row in wrong:
        print(f"  {row['check']}: {row['detail']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
