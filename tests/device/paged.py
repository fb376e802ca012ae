"""Check the paged kernels on a real GPU: every config against float64, caches in place, determinism, then speed beside others.

    python tests/device/paged.py --out results

Prints tables and writes `paged.json` under `--out` (or `$OUT`). Exits with 1 if any number is wrong. Needs the packages as
README.md beside this says.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from check_gpu import chosen_of, knobs, seconds, versions

import ejkernel
from ejkernel.call.case import Case
from ejkernel.operations.paged_attention import cases, reference
from ejkernel.operations.paged_attention.interface import OPERATION
from ejkernel.operations.paged_cache_update import cases as update_cases
from ejkernel.operations.paged_cache_update.interface import OPERATION as UPDATE
from ejkernel.plugin import current_target
from ejkernel.testing.checks import widened
from ejkernel_triton.paged_attention import config, kernel
from ejkernel_triton.paged_cache_update import config as update_config, kernel as update_kernel

BANDWIDTH, PRODUCTS = 4.3e12, 790e12
HEADS, KEY_HEADS, SIZE = 32, 8, 128


@dataclasses.dataclass(frozen=True)
class Shape:
    """Requests `(new tokens, keys)` to time, and small ones of the same shapes to check; both padded to as many requests."""

    name: str
    page_size: int
    timed: tuple[tuple[int, int], ...]
    checked: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> float:
        rows = sum(new for new, _ in self.timed)
        return sum(keys for _, keys in self.timed) * KEY_HEADS * SIZE * 4 + rows * HEADS * SIZE * 4

    @property
    def products(self) -> float:
        return sum(4 * HEADS * SIZE * (new * keys - new * (new - 1) / 2) for new, keys in self.timed)

    @property
    def limit(self) -> float:
        return max(self.bytes / BANDWIDTH, self.products / PRODUCTS)


SHAPES = (
    Shape("decode B64 4k page 16", 16, ((1, 4096),) * 64, ((1, 700), (1, 1), (0, 40), (1, 33), (1, 2500), (1, 0))),
    Shape("decode B1 128k page 64", 64, ((1, 131072),), ((1, 9001),)),
    Shape("decode skewed page 16", 16, ((1, 65536), *((1, 1024),) * 63), ((1, 3000), (1, 9), (1, 130))),
    Shape("decode B16 8k page 64", 64, ((1, 8192),) * 16, ((1, 700), (1, 1), (0, 40), (1, 2500))),
    Shape("decode B256 1k page 16", 16, ((1, 1024),) * 256, ((1, 700), (1, 1), (0, 40), (1, 33))),
    Shape(
        "mixed 32 x decode, 2048 new, page 16", 16, ((1, 4096),) * 32 + ((2048, 4096),), ((1, 1500), (9, 700), (70, 70), (1, 4))
    ),
    Shape("prefill 4 x 1024 of 8192 page 64", 64, ((1024, 8192),) * 4, ((90, 400), (3, 200), (1, 900))),
)


@functools.cache
def problem(shape: Shape, small: bool) -> tuple[Any, Any]:
    """A canonical call in bfloat16 and its arrays; the small one is compiled as the large one is."""
    requests = shape.checked if small else shape.timed
    requests = (*requests, *((0, 0),) * (len(shape.timed) - len(requests)))
    if small:
        rng = np.random.default_rng(3)
        described, used = cases.cache_of(rng, requests, page_size=shape.page_size)
        pages = rng.standard_normal((2, *used.shape, KEY_HEADS, SIZE)).astype(np.float32)
        pages[:, ~used] = np.nan
        keys, values = (jnp.asarray(array, jnp.bfloat16) for array in pages)
    else:
        need = [-(-keys // shape.page_size) for _, keys in requests]
        order, ends = np.random.default_rng(4).permutation(sum(need)), np.cumsum(need)
        tables = np.full((len(requests), max(need)), -1, np.int32)
        for row, (count, end) in enumerate(zip(need, ends, strict=True)):
            tables[row, :count] = order[end - count : end]
        starts = np.concatenate([[0], np.cumsum([new for new, _ in requests])]).astype(np.int32)
        lengths = np.array([keys for _, keys in requests], np.int32)
        described = {"query_start_loc": starts, "kv_lens": lengths, "block_tables": tables}
        tail = (sum(need), shape.page_size, KEY_HEADS, SIZE)
        keys, values = (
            jax.jit(jax.random.normal, static_argnums=(1, 2))(jax.random.key(i), tail, jnp.bfloat16) for i in range(2)
        )
    tokens = int(described["query_start_loc"][-1])
    query = jax.random.normal(jax.random.key(9), (tokens, HEADS, SIZE), jnp.bfloat16)
    bound = OPERATION.canonicalise(query, keys, values, **{k: jnp.asarray(v) for k, v in described.items()}, return_lse=True)
    return bound.call, bound.inputs


def relative(got: Any, wanted: np.ndarray) -> float:
    """Relative L2 error; NaN where anything is NaN or an infinity has no partner."""
    got = np.asarray(got, np.float64)
    if not np.array_equal(np.isneginf(got), np.isneginf(wanted)):
        return float("nan")
    finite = np.isfinite(wanted)
    return float(np.linalg.norm((got - wanted)[finite]) / max(np.linalg.norm(wanted[finite]), 1e-30))


def attend(call: Any, cfg: Any) -> Any:
    return jax.jit(lambda inputs: kernel.forward(call, inputs, cfg))


def output_of(call: Any, cfg: Any, inputs: Any) -> Any:
    return kernel.forward(call, inputs, cfg).out


class Report:
    def __init__(self, folder: str, budget: float) -> None:
        self.folder, self.budget, self.started = pathlib.Path(folder), budget, time.monotonic()
        self.result: dict[str, Any] = {"versions": versions(), "numbers": [], "times": []}

    def remaining(self) -> float:
        return self.budget - (time.monotonic() - self.started)

    def check(self, name: str, passed: bool, detail: str) -> None:
        self.result["numbers"].append({"check": name, "passed": bool(passed), "detail": detail})
        if not passed:
            print(f"  FAILED {name}: {detail}", flush=True)

    def time(self, shape: Shape, name: str, function: Any, *values: Any, error: float | None = None) -> None:
        samples, clock = seconds(function, [values])
        median = statistics.median(samples)
        row = {
            "shape": shape.name, "name": name, "clock": clock, "microseconds": median * 1e6, "error": error,
            "spread": (max(samples) - min(samples)) / median, "terabytes_per_second": shape.bytes / median / 1e12,
            "teraflops": shape.products / median / 1e12, "fraction": shape.limit / median,
        }  # fmt: skip
        self.result["times"].append(row)
        print(
            f"  {shape.name:38s} {name:90s} {row['microseconds']:8.1f} us {row['terabytes_per_second']:5.2f} TB/s "
            f"{row['teraflops']:6.1f} TF/s  {row['fraction']:.3f}  spread {row['spread']:.2f}  error {error or 0:.1e}",
            flush=True,
        )

    def save(self, stage: str) -> None:
        self.result["seconds"] = time.monotonic() - self.started
        print(f"[{stage}: done at {self.result['seconds']:.0f} s]", flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "paged.json").write_text(json.dumps(self.result, indent=1))


# Numbers


def check_config(report: Report, shape: Shape, cfg: Any) -> bool:
    call, inputs = problem(shape, True)
    exact = exact_of(shape)
    got = attend(call, cfg)(inputs)
    errors = relative(got.out, exact.out), relative(got.lse, exact.lse)
    passed = errors[0] < 8e-3 and errors[1] < 2e-3
    report.check(f"{shape.name}: {knobs(cfg)}", passed, f"out {errors[0]:.1e} lse {errors[1]:.1e}")
    return passed


@functools.cache
def exact_of(shape: Shape) -> Any:
    call, inputs = problem(shape, True)
    return reference.forward(call, widened(inputs))


def check_cases(report: Report) -> None:
    """The small cases of the operation, in float32 and bfloat16."""
    target = current_target()
    for case in cases.CASES:
        if "bench" in case.tags or report.remaining() < 120:
            continue
        check_case(report, case, target)
    report.save("cases")


def check_case(report: Report, case: Case, target: Any) -> None:
    arrays = {name: jnp.asarray(array) for name, array in case.arrays(np.random.default_rng(0)).items()}
    options: dict[str, Any] = {**case.options, "return_lse": True}
    bound = OPERATION.canonicalise(**arrays, **options)
    exact = reference.forward(bound.call, widened(bound.inputs))
    for cfg in (config.heuristic(bound.call, target), config.PagedAttentionConfig(2, 16, 4, 2, 8, 16)):
        got = attend(bound.call, cfg)(bound.inputs)
        errors = relative(got.out, exact.out), relative(got.lse, exact.lse)
        report.check(f"case {case.name}: {knobs(cfg)}", max(errors) < 2e-5, f"out {errors[0]:.1e} lse {errors[1]:.1e}")


def check_determinism(report: Report, shape: Shape) -> None:
    call, inputs = problem(shape, False)
    run = attend(call, config.heuristic(call, current_target()))
    first = np.asarray(run(inputs).out).view(np.uint16)
    equal = sum(np.array_equal(first, np.asarray(run(inputs).out).view(np.uint16)) for _ in range(20))
    report.check(f"{shape.name}: 20 equal runs", equal == 20, f"{equal} of 20 equal bit by bit")


def check_updates(report: Report) -> None:
    """Caches after an update, bit by bit against NumPy's float32 and rounding."""
    xla = importlib.import_module("ejkernel_xla.paged_cache_update.kernel")
    for case in update_cases.CASES:
        if "bench" in case.tags:
            continue
        arrays = {name: jnp.asarray(array) for name, array in case.arrays(np.random.default_rng(0)).items()}
        bound = UPDATE.canonicalise(**arrays, **case.options)
        unscaled = bound.inputs
        for name in ("key", "value"):
            scale = getattr(unscaled, f"{name}_scale")
            if scale is not None:
                divided = np.asarray(getattr(unscaled, name)) / np.asarray(scale)[:, None, :, None]
                unscaled = unscaled._replace(**{name: jnp.asarray(divided), f"{name}_scale": None})
        wanted = xla.forward(bound.call, unscaled, None)
        cfg = update_config.heuristic(bound.call, current_target())
        got = jax.jit(lambda inputs, call=bound.call, cfg=cfg: update_kernel.forward(call, inputs, cfg))(bound.inputs)
        same = all(
            w is None or np.array_equal(np.asarray(g).view(np.uint8), np.asarray(w).view(np.uint8))
            for g, w in zip(got, wanted, strict=True)
        )
        report.check(f"update {case.name}", same, "bit by bit")


def check_in_place(report: Report) -> None:
    """Donated caches come back in their own memory, and nothing is copied."""
    pages = (16384, 16, KEY_HEADS, SIZE)
    caches = [jnp.zeros(pages, jnp.bfloat16) for _ in range(2)]
    new = [jax.random.normal(jax.random.key(i), (64, KEY_HEADS, SIZE), jnp.bfloat16) for i in range(2)]
    tables = jnp.arange(64 * 256, dtype=jnp.int32).reshape(64, 256)
    lengths, starts = jnp.full(64, 4096, jnp.int32), jnp.arange(65, dtype=jnp.int32)

    def update(key_pages: Any, value_pages: Any, key: Any, value: Any) -> Any:
        bound = UPDATE.canonicalise(key, value, key_pages, value_pages, starts, lengths, tables)
        cfg = update_config.heuristic(bound.call, current_target())
        return bound.finish(update_kernel.forward(bound.call, bound.inputs, cfg))

    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*caches, *new).compile()
    memory = compiled.memory_analysis()
    size = 2 * caches[0].nbytes
    detail = f"aliased {memory.alias_size_in_bytes} of {size} bytes, temporary {memory.temp_size_in_bytes}"
    before = [cache.unsafe_buffer_pointer() for cache in caches]
    caches = compiled(*caches, *new)
    kept = before == [cache.unsafe_buffer_pointer() for cache in caches]
    report.check("donated caches", kept and memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < 1e6, detail)
    written = np.asarray(caches[0][np.asarray(tables[:, -1]), 15]), np.asarray(caches[1][np.asarray(tables[:, -1]), 15])
    report.check(
        "donated caches hold the tokens", all(np.array_equal(w, np.asarray(n)) for w, n in zip(written, new, strict=True)), ""
    )
    samples = []
    for _ in range(20):
        jax.block_until_ready(caches)
        begin = time.perf_counter()
        caches = jax.block_until_ready(compiled(*caches, *new))
        samples.append(time.perf_counter() - begin)
    print(f"  update of 64 tokens in caches of {size >> 20} MiB: {min(samples) * 1e6:.0f} us wall", flush=True)
    report.result["update_wall_microseconds"] = min(samples) * 1e6
    report.save("updates")


# Speed


def kernels_of(shape: Shape) -> list[tuple[str, float]]:
    """Every kernel of one call with its microseconds."""
    from jax.experimental.mosaic.gpu import profiler

    call, inputs = problem(shape, False)
    run = attend(call, config.heuristic(call, current_target()))
    jax.block_until_ready(run(inputs))
    _, found = profiler.Cupti(finalize=False).measure(run, aggregate=False)(inputs)
    return [(name[:60], milliseconds * 1e3) for name, milliseconds in found]


def time_shape(report: Report, shape: Shape, most: int) -> None:
    target = current_target()
    call, inputs = problem(shape, False)
    xla = jax.jit(lambda inputs: PLATFORM_XLA.forward(call, inputs, XLA_CONFIG.heuristic(call, target)))
    wanted = np.asarray(xla(inputs).out, np.float64)
    heuristic = config.heuristic(call, target)
    space = config.search_space(call, target)
    print(f"  {shape.name}: {len(space)} configs, heuristic {knobs(heuristic)}", flush=True)
    for cfg in chosen_of(space, heuristic, most):
        if report.remaining() < 15:
            break
        if check_config(report, shape, cfg):
            run = attend(call, cfg)
            error = relative(run(inputs).out, wanted)
            report.check(f"{shape.name}: {knobs(cfg)} beside XLA", error < 1e-2, f"{error:.1e}")
            report.time(shape, f"triton {knobs(cfg)}", functools.partial(output_of, call, cfg), inputs, error=error)
    report.result.setdefault("kernels", {})[shape.name] = kernels_of(shape)
    print("  " + "; ".join(f"{name} {time:.1f} us" for name, time in report.result["kernels"][shape.name]), flush=True)
    report.save(shape.name)


PLATFORM_XLA = importlib.import_module("ejkernel_xla.paged_attention.forward")
XLA_CONFIG = importlib.import_module("ejkernel_xla.paged_attention.config")


def time_xla(report: Report, shape: Shape) -> None:
    call, inputs = problem(shape, False)
    cfg = XLA_CONFIG.heuristic(call, current_target())
    report.time(shape, "xla", lambda inputs: PLATFORM_XLA.forward(call, inputs, cfg).out, inputs)


def time_pallas(report: Report, shape: Shape) -> None:
    """jax's own kernel reads `[K, pages, page_size, D]`, decoding only."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    call, inputs = problem(shape, False)
    keys, values = (jnp.transpose(array[0], (2, 0, 1, 3)) for array in inputs[1:3])
    tables, lengths = jnp.maximum(inputs.block_tables[0], 0), inputs.kv_lens[0]
    wanted = np.asarray(attend(call, config.heuristic(call, current_target()))(inputs).out[0], np.float64)
    query = inputs.query[0] * jnp.bfloat16(SIZE**-0.5)
    for splits, together in ((16, 8), (32, 8), (64, 4)):
        run = functools.partial(paged_attention, k_splits=splits, pages_per_compute_block=together)
        got = np.asarray(jax.jit(run)(query, keys, values, tables, lengths), np.float64)
        error = relative(got, wanted)
        report.time(
            shape, f"jax pallas splits={splits} pages={together}", run, query, keys, values, tables, lengths, error=error
        )


def time_flashinfer(report: Report, shape: Shape) -> None:
    """Decoding by FlashInfer, timed by events around a queue that the host fills ahead of time."""
    import flashinfer
    import torch

    _, inputs = problem(shape, False)
    counts = [-(-keys // shape.page_size) for _, keys in shape.timed]
    tables = np.asarray(inputs.block_tables[0])
    indices = np.concatenate([row[:count] for row, count in zip(tables, counts, strict=True)])
    starts = np.concatenate([[0], np.cumsum(counts)])
    last = [(keys - 1) % shape.page_size + 1 for _, keys in shape.timed]
    cache = torch.randn(sum(counts), 2, shape.page_size, KEY_HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(len(counts), HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True
    )
    integers = [torch.tensor(array, dtype=torch.int32, device="cuda") for array in (starts, indices, last)]
    wrapper.plan(*integers, HEADS, KEY_HEADS, SIZE, shape.page_size, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    samples = []
    for repeat in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)
        begin.record()
        for _ in range(10):
            wrapper.run(query, cache)
        end.record()
        torch.cuda.synchronize()
        if repeat:
            samples.append(begin.elapsed_time(end) / 1e3 / 10)
    median = statistics.median(samples)
    row = {
        "shape": shape.name, "name": "flashinfer", "clock": "events", "microseconds": median * 1e6,
        "terabytes_per_second": shape.bytes / median / 1e12, "fraction": shape.limit / median,
    }  # fmt: skip
    report.result["times"].append(row)
    print(f"  {shape.name:38s} flashinfer {median * 1e6:8.1f} us {row['terabytes_per_second']:5.2f} TB/s", flush=True)


def attempt(name: str, peer: Any, *arguments: Any) -> None:
    """A peer that is not installed or does not run is named; it says nothing of these kernels."""
    try:
        peer(*arguments)
    except (ImportError, RuntimeError, ValueError, TypeError, AttributeError, OSError) as error:
        print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of paged.json")
    parser.add_argument("--budget", type=float, default=230, help="seconds after which nothing new is started")
    parser.add_argument("--configs", type=int, default=14, help="configs to time per shape, drawn by a fixed seed")
    parser.add_argument("--skip", default="", help="of cases,updates,peers")
    parser.add_argument("--shapes", default="", help="only shapes whose name holds this")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    report, skip = Report(options.out, options.budget), set(options.skip.split(","))
    print(json.dumps(report.result["versions"]), "ejkernel", ejkernel.__version__, flush=True)
    shapes = [shape for shape in SHAPES if options.shapes in shape.name]
    for shape in shapes:
        time_shape(report, shape, 0)
        check_determinism(report, shape)
    if "updates" not in skip:
        check_updates(report)
        check_in_place(report)
    if "cases" not in skip:
        check_cases(report)
    for shape in shapes:
        time_shape(report, shape, options.configs)
        if "peers" not in skip and report.remaining() > 30:
            time_xla(report, shape)
            if all(new == 1 for new, _ in shape.timed):
                attempt("jax pallas", time_pallas, report, shape)
                attempt("flashinfer", time_flashinfer, report, shape)
        problem.cache_clear()
    report.save("times")
    failed = [row for row in report.result["numbers"] if not row["passed"]]
    print(f"{len(report.result['numbers']) - len(failed)} checks passed, {len(failed)} failed")
    for shape in shapes:
        rows = [row for row in report.result["times"] if row["shape"] == shape.name]
        for row in sorted(rows, key=lambda row: row["microseconds"])[:6]:
            print(f"  {shape.name:38s} {row['name']:90s} {row['microseconds']:8.1f} us {row['fraction']:.3f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
