"""What only a real GPU shows of the CUDA library: caches in place, configs that agree, CUDA graphs, memory errors, speed.

    python tests/device/cuda_library.py --out results

`rows.py --platform cuda` beside this checks and times the operations over rows. Here: `paged_cache_update` over core's cases bit
by bit, in place, and its speed; `paged_attention` over core's cases and longer ones, a few configs against float64, equal runs, and
its speed; every config of every operation against the first, which must agree bit by bit where a config only deals rows out; many
runs of one program, which XLA turns into a CUDA graph; and all of it once more, on ragged shapes, under compute-sanitizer with
every array its own allocation, so that no kernel reads or writes outside of its arrays. Writes `cuda_library.json` under `--out`
(or `$OUT`), exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import check_gpu
import jax
import jax.numpy as jnp
import numpy as np
from row_problems import Prepared, Problem, added, norm, norm_rotary, rotary

from ejkernel.operations.paged_attention import cases as attention_cases, reference as attention_reference
from ejkernel.operations.paged_attention.interface import OPERATION as ATTENTION
from ejkernel.operations.paged_cache_update import cases
from ejkernel.operations.paged_cache_update.interface import OPERATION as UPDATE
from ejkernel.plugin import current_target
from ejkernel.testing.checks import widened
from ejkernel.utils.tolerance import FORWARD
from ejkernel_cuda.paged_attention import (
    capability as attention_capability,
    config as attention_config,
    kernel as attention_kernel,
)
from ejkernel_cuda.paged_cache_update import config, kernel

Row = dict[str, Any]
CHAIN = 20
LSE = 1e-4
"""Error of a log-sum-exp: tensor cores round sums of products in ways of their own."""
RAGGED = (
    *(norm("layer_norm", 13, width) for width in (1, 33, 128, 4099, 4096, 20000, 32768, 40000, 131072)),
    *(norm("rms_norm", 13, width) for width in (1, 33, 128, 4099, 4096, 20000, 65536, 40000, 131072)),
    *(norm(name, 73, width) for name in ("layer_norm", "rms_norm") for width in (32, 64, 128, 256)),
    *(Problem("softmax", {"x": (73, width)}) for width in (32, 64, 128, 256)),
    *(added(13, width) for width in (1, 33, 128, 4099, 4096, 20000, 40000, 131072)),
    *(Problem("softmax", {"x": (13, width)}) for width in (1, 33, 4096, 4099, 9000, 24000, 40000, 65536, 128256)),
    *(Problem("softmax", {"x": (4, 3, 9, 100), "where": where}) for where in ((4, 1, 9, 100), (9, 1))),
    *(rotary(layout, 3, 77, 6, 2, width, interleaved=turned)
      for layout in ("BTHD", "BHTD") for width in (26, 128) for turned in (False, True)),
    *(norm_rotary(layout, 3, 77, 6, 2, width, rotary, interleaved=turned) for layout in ("BTHD", "BHTD")
      for width, rotary in ((26, 26), (100, 36), (128, 128), (128, 64), (256, 256)) for turned in (False, True)),
)  # fmt: skip


def row(check: str, passed: bool | None, detail: str = "") -> Row:
    print(f"  {'skipped' if passed is None else 'ok' if passed else 'FAILED'} {check} {detail}", flush=True)
    return {"check": check, "passed": passed, "detail": detail}


def same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)) for a, b in pairs)


def update_problem(case: Any) -> Any:
    arrays = {name: jnp.asarray(array) for name, array in case.arrays(np.random.default_rng(0)).items()}
    return UPDATE.canonicalise(**arrays, **case.options)


def divided(inputs: Any) -> Any:
    """Keys and values divided by their scales on the host, where division is exact to the last bit."""
    for name in ("key", "value"):
        scale = getattr(inputs, f"{name}_scale")
        if scale is not None:
            quotient = np.asarray(getattr(inputs, name)) / np.asarray(scale)[:, None, :, None]
            inputs = inputs._replace(**{name: jnp.asarray(quotient), f"{name}_scale": None})
    return inputs


def check_updates() -> list[Row]:
    """Against XLA, bit by bit, for every config."""
    xla, rows = importlib.import_module("ejkernel_xla.paged_cache_update.kernel"), []
    for case in cases.CASES:
        if case.is_benchmark:
            continue
        bound = update_problem(case)
        wanted = jax.jit(lambda inputs, call=bound.call: xla.forward(call, inputs, None))(divided(bound.inputs))
        for cfg in config.FORWARD.search_space(bound.call, current_target()):
            run = jax.jit(lambda inputs, call=bound.call, cfg=cfg: kernel.forward(call, inputs, cfg))
            rows.append(row(f"update {case.name} {cfg}", same(run(bound.inputs), wanted)))
    return rows


def attention_problem(case: Any, dtype: str) -> Any:
    arrays = case.arrays(np.random.default_rng(0))
    made = {name: jnp.asarray(value, dtype if value.dtype == np.float32 else None) for name, value in arrays.items()}
    return ATTENTION.canonicalise(**made, **{**case.options, "return_lse": True})


def attention_problems(dtype: str) -> list[tuple[str, Any]]:
    """Core's cases that the kernel admits, and requests of many lengths at every size of head and type of pages."""
    found = [(case.name, attention_problem(case, dtype)) for case in attention_cases.CASES if not case.is_benchmark]
    requests = ((1, 3000), (1, 1), (0, 40), (1, 129), (2, 700), (1, 0))
    for size in (64, 128, 256):
        for stored in (None, "int8", "float8_e4m3fn", "float8_e5m2"):
            scales: dict[str, Any] = {"k_scale": (4,), "v_scale": ()} if stored else {}
            make = attention_cases._arrays(
                requests, page_size=16, heads=16, key_heads=4, head_size=size, stored=stored, sinks=(16,), **scales
            )
            case = type(attention_cases.CASES[0])(f"lengths {size} {stored}", make)
            found.append((case.name, attention_problem(case, dtype)))
    admitted = [(name, bound) for name, bound in found if attention_refusal(bound.call) is None]
    assert len(admitted) > 30, "hardly anything is admitted here"
    return admitted


def attention_refusal(call: Any) -> str | None:
    return attention_capability.supports_forward(call, current_target())


def few_workers(call: Any) -> dict[str, Any]:
    """Configs with few workers of several tiles each, for cp.async loads and for TMA loads of each number of key heads."""
    key_heads, with_tma = attention_config.tile_key_heads(call), attention_config.tma_tile_key_heads(call, current_target())
    found = {"cp.async": attention_config.PagedAttentionConfig(3, 7, max(key_heads))}
    return found | {f"TMA {count}": attention_config.PagedAttentionConfig(3, 7, count, tma=True) for count in with_tma}


def attend(call: Any, cfg: Any) -> Any:
    return jax.jit(lambda inputs: attention_kernel.forward(call, inputs, cfg))


def attention_error(got: Any, wanted: np.ndarray) -> float:
    """Relative L2 error; NaN where anything is NaN or an infinity has no partner."""
    got, sure = np.asarray(got, np.float64), np.isfinite(wanted)
    return check_gpu.relative(got[sure], wanted[sure]) if np.array_equal(got[~sure], wanted[~sure]) else float("nan")


def check_attention() -> list[Row]:
    """Against float64 with a few configs of each problem, each run three times."""
    rows = []
    for dtype in ("bfloat16", "float16"):
        for name, bound in attention_problems(dtype):
            wanted = attention_reference.forward(bound.call, widened(bound.inputs))
            space = attention_config.FORWARD.search_space(bound.call, current_target())
            some = (space[0], space[-1], attention_config.PagedAttentionConfig(2, 7), *few_workers(bound.call).values())
            for cfg in dict.fromkeys(some):
                got = [attend(bound.call, cfg)(bound.inputs) for _ in range(3)]
                errors = [attention_error(getattr(got[0], key), getattr(wanted, key)) for key in ("out", "lse")]
                passed = errors[0] <= FORWARD[dtype].norm and errors[1] <= LSE
                equal = all(same(got[0], other) for other in got[1:])
                rows.append(row(f"attention {name} {dtype} {cfg}", passed and equal, f"{errors} equal {equal}"))
    return rows


def check_in_place() -> list[Row]:
    """Donated caches come back in their own memory, nothing is copied, and nothing but the tokens' places changes."""
    shape, (tokens, heads, size) = (16384, 16, 8, 128), (64, 8, 128)
    caches = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2)]
    new = [jax.random.normal(jax.random.key(2 + i), (tokens, heads, size), jnp.bfloat16) for i in range(2)]
    tables = jnp.arange(tokens * 256, dtype=jnp.int32).reshape(tokens, 256)
    lengths, starts = jnp.full(tokens, 4096, jnp.int32), jnp.arange(tokens + 1, dtype=jnp.int32)

    def update(key_pages: Any, value_pages: Any, key: Any, value: Any) -> Any:
        bound = UPDATE.canonicalise(key, value, key_pages, value_pages, starts, lengths, tables)
        return bound.finish(kernel.forward(bound.call, bound.inputs, config.heuristic(bound.call, current_target())))

    page = np.asarray(tables[:, -1])
    expected = [jnp.asarray(cache).at[page, 15].set(fresh) for cache, fresh in zip(caches, new, strict=True)]
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*caches, *new).compile()
    memory = compiled.memory_analysis()
    before = [cache.unsafe_buffer_pointer() for cache in caches]
    for _ in range(50):  # long enough for XLA to replay a graph
        caches = compiled(*caches, *new)
    kept = before == [cache.unsafe_buffer_pointer() for cache in caches]
    detail = f"aliased {memory.alias_size_in_bytes}, temporary {memory.temp_size_in_bytes} bytes"
    return [
        row("donated caches stay in place", kept and memory.temp_size_in_bytes < 1e6, detail),
        row("only the tokens' places change", all(bool((a == b).all()) for a, b in zip(caches, expected, strict=True))),
    ]


def check_configs() -> list[Row]:
    """Every config against float64, and three equal runs of each."""
    rows = []
    problems = [norm("layer_norm", 37, 4096), norm("rms_norm", 37, 40000), norm("layer_norm", 37, 131072)]
    problems += [Problem("softmax", {"x": (37, width)}) for width in (4096, 40000, 131072)]
    problems += [rotary("BTHD", 3, 77, 6, 2, 128), norm_rotary("BTHD", 3, 77, 6, 2, 128, 128)]
    problems += [added(37, width) for width in (4096, 40000, 131072)]
    for index, problem in enumerate(problems):
        prepared = Prepared(problem, "bfloat16", index, "cuda")
        target, wanted = current_target(), prepared.exact()
        forward = prepared.config.FORWARD.search_space(prepared.call, target)
        backward = prepared.config.BACKWARD.search_space(prepared.call, target)
        for at in range(max(len(forward), len(backward))):
            pair = forward[at % len(forward)], backward[at % len(backward)]
            got = prepared.ours(*pair)
            errors = {key: check_gpu.relative(got[key], wanted[key], prepared.floors.get(key, 0.0)) for key in wanted}
            equal = all(same(got, prepared.ours(*pair)) for _ in range(2))
            rows.append(row(f"{problem.name} {pair}", equal and max(errors.values()) < 8e-3, f"{errors} equal {equal}"))
    return rows


def touch(every: int, match: str, process: int, processes: int) -> None:
    """Everything once, or one in `every`, on shapes with ragged ends, for compute-sanitizer; of what has one of some texts in its
    name, and of that what falls to one of some processes."""

    def update(case: Any) -> Any:
        bound = update_problem(case)
        cfg = config.heuristic(bound.call, current_target())
        return jax.jit(lambda i: kernel.forward(bound.call, i, cfg))(bound.inputs)

    runs = [
        (problem.name, functools.partial(lambda p, at: Prepared(p, "bfloat16", at, "cuda").ours(), problem, index))
        for index, problem in enumerate(RAGGED)
    ]
    runs += [(f"update {case.name}", functools.partial(update, case)) for case in cases.CASES if not case.is_benchmark]
    runs += [
        (f"attention {name} {dtype} {way}", functools.partial(lambda b, c: attend(b.call, c)(b.inputs), bound, cfg))
        for dtype in ("bfloat16", "float16")
        for name, bound in attention_problems(dtype)
        for way, cfg in few_workers(bound.call).items()
    ]
    mine = [one for one in runs if any(text in one[0] for text in match.split(","))][::every][process::processes]
    for name, run in mine:
        print(f"RUN {name}", flush=True)
        jax.block_until_ready(run())
    print(f"RAN {len(mine)} programs")


LOST = "Internal Sanitizer Error"
"""What compute-sanitizer says when it has lost track of a launch. Its summary counts that as a hazard."""

ATTEMPTS = 3


def sanitize(tool: str, limit: float, every: int, match: str, processes: int) -> Row:
    """Under one of compute-sanitizer's tools, by some processes beside each other, without CUDA graphs, into which it does not
    look."""
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",
    }
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--match", match]
    command += ["--touch", str(every), "--processes", str(processes), "--process"]

    lost: list[int] = []

    def run(process: int) -> subprocess.CompletedProcess[str]:
        for _ in range(ATTEMPTS):
            done = subprocess.run([*command, str(process)], env=environment, capture_output=True, text=True, timeout=limit)
            if LOST not in done.stdout + done.stderr:
                break
            lost.append(process)
        return done

    try:
        with concurrent.futures.ThreadPoolExecutor(processes) as pool:
            done = list(pool.map(run, range(processes)))
    except FileNotFoundError:
        return row(tool, None, "compute-sanitizer is not installed")
    except subprocess.TimeoutExpired:
        return row(tool, None, f"not done after {limit:.0f} s")
    said = [line for one in done for line in one.stdout.splitlines()]
    lines = [line for line in said if "SUMMARY" in line]
    lines += [
        line for one in done if one.returncode for line in (one.stdout + one.stderr).splitlines() if line[:3] in ("RUN", "===")
    ]
    counts = [int(line.split()[1]) for line in said if line.startswith("RAN ")]
    passed = all(one.returncode == 0 for one in done) and len(counts) == processes
    seen = f"one in {every} of what is named {match}" if match else f"one in {every}"
    detail = "; ".join(dict.fromkeys(lines)) or (done[0].stdout + done[0].stderr)[-300:]
    if lost:
        detail += f"; lost track of a launch and was asked again: {len(lost)} times"
    return row(f"{tool}, {seen}", passed, f"{sum(counts)} programs: {detail}")


def chained(module: Any, call: Any, cfg: Any, inputs: Any) -> Any:
    """Updates of one cache after each other; only the first one needs a copy of it."""
    for _ in range(CHAIN):
        outputs = module.forward(call, inputs, cfg)
        inputs = inputs._replace(key_pages=outputs.key_pages, value_pages=outputs.value_pages)
    return inputs.key_pages, inputs.value_pages


def time_updates() -> list[Row]:
    """Device time of 8192 new tokens, 8 heads of 128, by stored type and config, beside Triton's kernel where it is installed.

    A copy of the cache for every `CHAIN` updates is in it.
    """
    found = []
    tokens, heads, size = 8192, 8, 128
    for stored in ("bfloat16", "float8_e4m3fn"):
        new = [jax.random.normal(jax.random.key(i), (tokens, heads, size), jnp.bfloat16) for i in range(2)]
        described = (jnp.arange(0, tokens + 1, 512, dtype=jnp.int32), jnp.full(16, 512, jnp.int32))
        tables = jnp.arange(16 * 32, dtype=jnp.int32).reshape(16, 32)
        pages = [jnp.zeros((512, 16, heads, size), stored) for _ in range(2)]
        bound = UPDATE.canonicalise(*new, *pages, *described, tables, 0.5, 0.5)
        moved = 2 * tokens * heads * size * (2 + pages[0].dtype.itemsize)
        for name in ("cuda", "triton"):
            try:
                module = importlib.import_module(f"ejkernel_{name}.paged_cache_update.kernel")
                knobs = importlib.import_module(f"ejkernel_{name}.paged_cache_update.config").FORWARD
            except ImportError:
                continue
            space = (
                knobs.search_space(bound.call, current_target())
                if name == "cuda"
                else [knobs.heuristic(bound.call, current_target())]
            )
            for cfg in space:
                run = functools.partial(chained, module, bound.call, cfg)
                times, clock = check_gpu.seconds(run, [(bound.inputs,)])
                times = [value / CHAIN for value in times]
                best = float(np.median(times))
                print(
                    f"  update {stored} {name} {cfg}: {best * 1e6:.1f} us ({clock}), {moved / best / 1e12:.2f} TB/s", flush=True
                )
                found.append({"stored": stored, "platform": name, "config": str(cfg), "seconds": times, "bytes": moved})
    return found


def time_attention() -> list[Row]:
    """Device time of `paged.py`'s shapes that are admitted, by config, beside Triton's kernel, which that script needs."""
    try:
        shapes = importlib.import_module("paged")
    except ImportError as error:
        print(f"  attention is not timed: {error}", flush=True)
        return []
    found = []
    for shape in shapes.SHAPES:
        call, inputs = shapes.problem(shape, small=False)
        if (reason := attention_refusal(call)) is not None:
            print(f"  {shape.name}: {reason}", flush=True)
            continue
        runs = [("triton", shapes.kernel, shapes.config.heuristic(call, current_target()))]
        runs += [("cuda", attention_kernel, cfg) for cfg in attention_config.FORWARD.search_space(call, current_target())]
        wanted = np.asarray(runs[0][1].forward(call, inputs, runs[0][2]).out, np.float64)
        for name, module, cfg in runs:
            got = np.asarray(jax.jit(lambda i, m=module, c=cfg, k=call: m.forward(k, i, c).out)(inputs), np.float64)
            times, clock = check_gpu.seconds(lambda i, m=module, c=cfg, k=call: m.forward(k, i, c).out, [(inputs,)])
            best, error = float(np.median(times)), check_gpu.relative(got, wanted)
            print(
                f"  {shape.name} {name} {cfg}: {best * 1e6:.1f} us ({clock}), {shape.bytes / best / 1e12:.2f} TB/s, "
                f"{error:.1e} from Triton's",
                flush=True,
            )
            found.append({"shape": shape.name, "platform": name, "config": str(cfg), "seconds": times, "error": error})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of cuda_library.json")
    parser.add_argument("--touch", type=int, default=0, help="run one in so many of everything once, and end")
    parser.add_argument("--sanitize", type=float, default=150, help="seconds for a tool of compute-sanitizer; 0 = not at all")
    parser.add_argument("--tools", default="memcheck", help="of compute-sanitizer, with commas: memcheck, racecheck, synccheck")
    parser.add_argument("--every", type=int, default=1, help="those tools see one in so many")
    parser.add_argument("--processes", type=int, default=1, help="that share what a tool sees, beside each other")
    parser.add_argument("--process", type=int, default=0, help="with --touch, which of them this is")
    parser.add_argument(
        "--match", default="", help="those tools see what has one of these texts in its name alone, with commas"
    )
    parser.add_argument("--skip", default="", help="of checks,times")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    if options.touch:
        touch(options.touch, options.match, options.process, options.processes)
        return 0
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"versions": check_gpu.versions(), "checks": [], "times": []}
    stages = [] if "checks" in options.skip else [check_updates, check_attention, check_in_place, check_configs]
    if options.sanitize:
        stages += [
            lambda tool=tool: [sanitize(tool, options.sanitize, options.every, options.match, options.processes)]
            for tool in options.tools.split(",")
        ]
    for stage in stages:
        result["checks"] += stage()
        (folder / "cuda_library.json").write_text(json.dumps(result, indent=1))
    result["times"] = [] if "times" in options.skip else time_updates() + time_attention()
    (folder / "cuda_library.json").write_text(json.dumps(result, indent=1))
    wrong = [one for one in result["checks"] if one["passed"] is False]
    print(f"{len(result['checks'])} checks, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
