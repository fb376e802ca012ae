"""`grouped_matmul` in Triton on a real GPU: every config's numbers, then device times over the configs and beside peers.

    python tests/device/grouped_matmul.py --out results [--parts numbers,times,peers] [--cases 8192-8,decode-8] [--space 8192-8:rhs]

Numbers are compared with the float64 reference, and at the timed sizes with a product per group by cuBLAS. Times are device times
(CUPTI; CUDA events for torch), the tables of tiles that XLA computes included. `lhs` and `rhs` are the gradients. Writes
`grouped_matmul.json` and exits with 1 if any number is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from check_gpu import versions
from kernel_times import device_times

from ejkernel.operations.grouped_matmul import reference
from ejkernel.operations.grouped_matmul.interface import OPERATION, GroupedMatmulOutputs
from ejkernel.operations.grouped_matmul.phases import bounds_of_call
from ejkernel.plugin import current_target
from ejkernel.testing.checks import widened
from ejkernel_triton.grouped_matmul import config, kernel

BEGIN = time.monotonic()
PRODUCTS, BANDWIDTH = 790e12, 4.3e12
PHASES = ("forward", "lhs", "rhs")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: rows of each group, and what is given beside."""

    sizes: tuple[int, ...]
    inner: int
    columns: int
    dtype: str = "bfloat16"
    rows: int = 0
    transpose: bool = False
    stored: str = ""
    scale: str = ""
    row_scale: bool = False
    bias: bool = False
    existing: bool = False
    offset: int | None = None
    held: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def count(self) -> int:
        return self.rows or sum(self.sizes)

    @property
    def flops(self) -> float:
        return 2.0 * sum(self.sizes) * self.inner * self.columns

    @property
    def narrow(self) -> bool:
        """Whether both sides are float8, and results bfloat16."""
        return jnp.dtype(self.dtype).itemsize == 1

    @property
    def bytes(self) -> float:
        matrices = sum(size > 0 for size in self.sizes) * self.inner * self.columns
        return (1.0 if self.narrow else 2.0) * (matrices + self.count * self.inner) + 2.0 * self.count * self.columns

    def build(self, seed: int = 0, *, poison: bool = False) -> tuple[Any, Any, Any]:
        """The call, its inputs and a cotangent; with `poison`, rows without a matrix hold NaN."""
        keys = jax.random.split(jax.random.key(seed), 7)
        held = self.held or len(self.sizes)

        def normal(i: int, *shape: int, dtype: str = self.dtype) -> Any:
            drawn = jnp.dtype("bfloat16" if jnp.dtype(dtype).itemsize == 1 else dtype)
            return jax.jit(lambda key: jax.random.normal(key, shape, drawn).astype(dtype))(keys[i])

        lhs = normal(0, self.count, self.inner)
        if poison:
            group = np.repeat(np.arange(len(self.sizes) + 1), [*self.sizes, self.count - sum(self.sizes)])
            first = self.offset or 0
            foreign = (group < first) | (group >= min(first + held, len(self.sizes)))
            lhs = jnp.where(foreign[:, None], jnp.nan, lhs)
        rhs = normal(1, held, *((self.columns, self.inner) if self.transpose else (self.inner, self.columns)))
        if self.stored and self.narrow:
            rhs = rhs.astype(self.stored)
        elif self.stored:
            rhs = (rhs.astype(jnp.float32) * 32).clip(-127, 127).astype(self.stored)
        arrays: dict[str, Any] = {"lhs": lhs, "rhs": rhs, "group_sizes": jnp.array(self.sizes, jnp.int32)}
        if self.offset is not None:
            arrays["group_offset"] = jnp.int32(self.offset)
        other = "bfloat16" if self.narrow else self.dtype
        dtype = dict(self.options).get("preferred_element_type", other)
        if self.existing:
            arrays["existing_out"] = normal(2, self.count, self.columns, dtype=dtype)
        if self.scale:
            wide = (self.columns,) if self.scale == "column" else ()
            arrays["rhs_scale"] = 1 + normal(3, held, *wide, dtype="float32" if self.narrow else self.dtype) / 4
        if self.row_scale:
            arrays["lhs_scale"] = (1 + normal(6, self.count, dtype="float32") / 4) / self.inner**0.5
            arrays["lhs_scale"] = jnp.where(foreign, jnp.nan, arrays["lhs_scale"]) if poison else arrays["lhs_scale"]
        if self.bias:
            arrays["bias"] = normal(4, held, self.columns, dtype=other)
        bound = OPERATION.canonicalise(**arrays, **dict(self.options), transpose_rhs=self.transpose)
        return bound.call, bound.inputs, normal(5, 1, self.count, self.columns, dtype=dtype)


RAGGED = (130, 0, 1, 257, 64, 0, 48)
NUMBERS = {
    "ragged": Problem(RAGGED, 192, 320, rows=520),
    "ragged-float16": Problem(RAGGED, 192, 320, "float16", rows=520, transpose=True),
    "even": Problem((128, 256, 128), 128, 512),
    "unaligned": Problem(RAGGED, 101, 203, rows=600, transpose=True),
    "shard": Problem(
        RAGGED,
        256,
        264,
        rows=520,
        offset=2,
        held=3,
        existing=True,
        bias=True,
        scale="group",
        options=(("preferred_element_type", "float32"),),
    ),
    "column-scale": Problem(RAGGED, 136, 256, rows=520, scale="column", bias=True),
    "column-scale-transposed": Problem(RAGGED, 136, 256, rows=520, scale="column", transpose=True),
    "int8": Problem(RAGGED, 200, 256, stored="int8", scale="column"),
    "few-rows": Problem((1, 0, 2, 5, 0, 0, 16), 256, 384),
    "float32": Problem(RAGGED, 100, 200, "float32", rows=520),
    "float32-high": Problem(RAGGED, 128, 256, "float32", options=(("precision", "high"),)),
}

EVERY = ("ragged", "shard")


def skewed(rows: int, groups: int) -> tuple[int, ...]:
    """Shares that fall as 1 / i, in a fixed random order."""
    shares = 1 / np.arange(1, groups + 1)
    sizes = np.floor(shares / shares.sum() * rows).astype(int)
    sizes[0] += rows - sizes.sum()
    return tuple(int(size) for size in np.random.default_rng(0).permutation(sizes))


def scattered(rows: int, groups: int) -> tuple[int, ...]:
    """Every row goes to a random group."""
    return tuple(int(n) for n in np.bincount(np.random.default_rng(1).integers(0, groups, rows), minlength=groups))


TIMES = {
    "8192-8": Problem((1024,) * 8, 4096, 14336),
    "32768-32": Problem((1024,) * 32, 7168, 4096),
    "131072-128": Problem((1024,) * 128, 2048, 768),
    "8192-8-skewed": Problem(skewed(8192, 8), 4096, 14336),
    "131072-128-skewed": Problem(skewed(131072, 128), 2048, 768),
    "8192-8-transposed": Problem((1024,) * 8, 4096, 14336, transpose=True),
    "8192-8-float32-out": Problem((1024,) * 8, 4096, 14336, options=(("preferred_element_type", "float32"),)),
    "decode-8": Problem(scattered(64, 8), 4096, 14336),
    "decode-32": Problem(scattered(64, 32), 7168, 4096),
    "decode-128": Problem(scattered(64, 128), 2048, 768),
    "float32-4096-8": Problem((512,) * 8, 2048, 2048, "float32"),
}

UNCHECKED = ("131072-128-skewed", "decode-32", "decode-128")
"""Uneven groups, too many for a product each to be compiled beside."""


def relative(got: Any, wanted: Any) -> float:
    """||got - wanted|| / ||wanted||; NaN where anything is."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30))


def compiled(programs: list[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
    """Compile side by side; an exception stands for a program that did not."""

    def one(program: tuple[Any, tuple[Any, ...]]) -> Any:
        function, arguments = program
        try:
            return jax.jit(function).lower(*arguments).compile()
        except Exception as error:  # noqa: BLE001 - what does not compile is a result
            return error

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(one, programs))


def check_numbers(save: Any) -> bool:
    """Configs of the search space, for `EVERY` all of them, against the float64 reference."""
    passed = True
    for name, problem in NUMBERS.items():
        call, inputs, grad = problem.build(poison=True)
        wanted = reference.forward(call, widened(inputs))
        gradients = reference.backward(call, widened(inputs), wanted, GroupedMatmulOutputs(np.asarray(grad, np.float64)))
        limit = {"float32": 1e-6, "float16": 1e-3}.get(problem.dtype, 6e-3)
        target = current_target()
        runs: list[tuple[str, Any, Any, tuple[Any, ...]]] = []
        most = None if name in EVERY else 4
        for choice in config.forward_space(call, target)[:most]:
            runs.append(("forward", choice, lambda i, c=choice, call=call: kernel.forward(call, i, c), (inputs,)))
        for choice in config.backward_space(call, target)[:most]:
            runs.append(
                (
                    "backward",
                    choice,
                    lambda i, g, c=choice, call=call: kernel.backward(call, i, g, g, c),
                    (inputs, GroupedMatmulOutputs(grad)),
                )
            )
        for (phase, choice, _, arguments), program in zip(runs, compiled([run[2:] for run in runs]), strict=True):
            errors: dict[str, float] = {}
            if not isinstance(program, Exception):
                got, want = program(*arguments), wanted if phase == "forward" else gradients
                errors = {n: relative(g, w) for n, g, w in zip(got._fields, got, want, strict=True) if g is not None}
                again = program(*arguments)
                if any(
                    not np.array_equal(a, b, equal_nan=True)
                    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True)
                ):
                    errors["repeat"] = float("nan")
            good = bool(errors) and all(error < limit for error in errors.values())
            detail = " ".join(f"{k} {v:.1e}" for k, v in errors.items()) or str(program).splitlines()[0][:150]
            save("numbers", {"case": name, "phase": phase, "config": brief(choice), "passed": good, "detail": detail})
            passed &= good
    return passed


def brief(choice: Any) -> str:
    """`128x256x64 w8 s3 band8 tma132`, of both gradients."""

    def one(tile: Any) -> str:
        way = f"tma{tile.programs}" if tile.tma else f"pointers{tile.programs or ''}"
        return f"{tile.block_m}x{tile.block_n}x{tile.block_k} w{tile.num_warps} s{tile.num_stages} band{tile.l2_swizzle} {way}"

    return one(choice) if isinstance(choice, config.Tile) else f"{one(choice.tile_of_lhs)} | {one(choice.tile_of_rhs)}"


def phases(call: Any) -> dict[str, Any]:
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


def by_group(problem: Problem, phase: str) -> Any:
    """`(lhs, rhs, grad) -> array`: one product per group by cuBLAS, for sizes that are known."""
    ends = np.cumsum(problem.sizes)
    groups = [(i, slice(end - size, end)) for i, (size, end) in enumerate(zip(problem.sizes, ends, strict=True))]
    precision = "highest" if problem.dtype == "float32" else None
    count, even = len(problem.sizes), len({*problem.sizes}) == 1

    def dot(a: Any, b: Any) -> Any:
        return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision).astype(problem.dtype)

    def run(lhs: Any, rhs: Any, grad: Any) -> Any:
        matrices = jnp.swapaxes(rhs, 1, 2) if problem.transpose else rhs
        if even and count > 8:  # one batched product: as many products as groups take long to compile
            lhs, grad = (array.reshape(count, -1, array.shape[1]) for array in (lhs, grad))
            left, right = {"forward": (lhs, matrices), "lhs": (grad, matrices.mT), "rhs": (lhs.mT, grad)}[phase]
            found = jnp.matmul(left, right, preferred_element_type=jnp.float32, precision=precision).astype(problem.dtype)
            return found if phase == "rhs" else found.reshape(-1, found.shape[2])
        if phase == "forward":
            return jnp.concatenate([dot(lhs[rows], matrices[i]) for i, rows in groups])
        if phase == "lhs":
            return jnp.concatenate([dot(grad[rows], matrices[i].T) for i, rows in groups])
        found = jnp.stack([dot(lhs[rows].T, grad[rows]) for _, rows in groups])
        return jnp.swapaxes(found, 1, 2) if problem.transpose else found

    return run


@jax.jit
def deviation(got: Any, wanted: Any) -> Any:
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.linalg.norm((got - wanted).ravel()) / jnp.linalg.norm(wanted.ravel())


def row_of(name: str, problem: Problem, phase: str, seconds: float) -> dict[str, Any]:
    rate = PRODUCTS * (2 if problem.narrow else 1)  # of float8 nothing was measured
    limit = max(problem.flops / rate, problem.bytes / BANDWIDTH)
    return {
        "case": name, "phase": phase, "us": seconds * 1e6, "tflops": problem.flops / seconds / 1e12,
        "terabytes_per_second": problem.bytes / seconds / 1e12, "fraction": limit / seconds,
    }  # fmt: skip


def candidates(call: Any, phase: str, every: bool) -> list[Any]:
    target = current_target()
    space = config._space(config._product_of(call, target, phase))
    return space if every else space[:1]


def time_configs(name: str, problem: Problem, save: Any, every: list[str]) -> bool:
    call, inputs, grad = problem.build()
    passed = True
    for phase in PHASES if not name.startswith("decode") else ("forward",):
        run = phases(call)[phase]
        choices = candidates(call, phase, f"{name}:{phase}" in every)
        programs = compiled([(lambda i, g, c=c, run=run: run(i, g, c), (inputs, grad)) for c in choices])
        wanted = None
        if name not in UNCHECKED:
            wanted = jax.jit(by_group(problem, phase))(inputs.lhs[0], inputs.rhs[0], grad[0].astype(problem.dtype))
        for choice, program in zip(choices, programs, strict=True):
            if isinstance(program, Exception):
                save(
                    "times",
                    {"case": name, "phase": phase, "config": brief(choice), "failed": str(program).splitlines()[0][:150]},
                )
                passed = False
                continue
            error = None if wanted is None else float(deviation(program(inputs, grad)[0], wanted))
            seconds, kernels = device_times(program, (inputs, grad))
            parts = {k[:40]: round(v * 1e6, 1) for k, v in kernels.items()} if choice is choices[0] else {}
            passed &= error is None or error < 6e-3
            save("times", {**row_of(name, problem, phase, seconds), "config": brief(choice), "error": error, "parts": parts})
    return passed


def time_jax(name: str, problem: Problem, save: Any) -> None:
    """XLA's own ways: ragged_dot, a product per group, and the platform `xla`."""
    from ejkernel_xla.grouped_matmul import config as xla_config, kernel as xla_kernel

    call, inputs, grad = problem.build()
    lhs, rhs, sizes = inputs.lhs[0], inputs.rhs[0], inputs.group_sizes[0]
    choice = xla_config.heuristic(call, current_target())
    ways: list[tuple[str, str, Any, tuple[Any, ...]]] = [
        ("by group", phase, by_group(problem, phase), (lhs, rhs, grad[0].astype(problem.dtype)))
        for phase in PHASES
        if name not in UNCHECKED and not name.startswith("decode")
    ]
    ways.append(("xla", "forward", lambda inputs: xla_kernel.forward(call, inputs, choice), (inputs,)))
    if not problem.transpose:
        ways.append(("ragged_dot", "forward", lambda lhs, rhs, sizes: jax.lax.ragged_dot(lhs, rhs, sizes), (lhs, rhs, sizes)))
    for way, phase, function, arguments in ways:
        try:
            seconds, _ = device_times(jax.jit(function), arguments, 3)
            save("peers", {**row_of(name, problem, phase, seconds), "name": way})
        except Exception as error:  # noqa: BLE001 - what a peer cannot do is a result
            save("peers", {"case": name, "name": way, "phase": phase, "failed": str(error).splitlines()[0][:150]})


def time_torch(name: str, problem: Problem, save: Any) -> None:
    import torch

    ends = torch.tensor(np.cumsum(problem.sizes), dtype=torch.int32, device="cuda")
    lhs, grad = (torch.randn(problem.count, n, device="cuda", dtype=torch.bfloat16) for n in (problem.inner, problem.columns))
    rhs = torch.randn(len(problem.sizes), problem.inner, problem.columns, device="cuda", dtype=torch.bfloat16)
    if problem.transpose:
        rhs = rhs.transpose(1, 2).contiguous().transpose(1, 2)
    ways = {
        "forward": lambda: torch._grouped_mm(lhs, rhs, offs=ends),
        "lhs": lambda: torch._grouped_mm(grad, rhs.transpose(1, 2), offs=ends),
        "rhs": lambda: torch._grouped_mm(lhs.T, grad, offs=ends),
    }
    for phase, function in ways.items():
        time_torch_way(name, problem, phase, "torch._grouped_mm", function, save)
    torch.cuda.empty_cache()


def time_torch_float8(name: str, problem: Problem, save: Any) -> None:
    """With sums of the tensor cores promoted, as ours are, and without (`use_fast_accum`)."""
    import torch

    ends = torch.tensor(np.cumsum(problem.sizes), dtype=torch.int32, device="cuda")
    groups, inner, columns = len(problem.sizes), problem.inner, problem.columns
    lhs = torch.randn(problem.count, inner, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    rhs = torch.randn(groups, columns, inner, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    of_rows = torch.rand(problem.count, device="cuda")
    of_columns = torch.rand(groups, columns, device="cuda")
    for fast in (False, True):

        def function(fast: bool = fast) -> Any:
            return torch._scaled_grouped_mm(
                lhs,
                rhs.transpose(1, 2),
                of_rows,
                of_columns,
                offs=ends,
                out_dtype=torch.bfloat16,
                use_fast_accum=fast,
            )

        time_torch_way(name, problem, "forward", f"torch._scaled_grouped_mm{' fast' if fast else ''}", function, save)
    torch.cuda.empty_cache()


def time_torch_way(name: str, problem: Problem, phase: str, way: str, function: Any, save: Any) -> None:
    import torch

    try:
        for _ in range(2):
            function()
        samples = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(3):
                function()
            end.record()
            samples.append((begin, end))
        torch.cuda.synchronize()
        seconds = statistics.median(a.elapsed_time(b) for a, b in samples) / 3e3
        save("peers", {**row_of(name, problem, phase, seconds), "name": way})
    except Exception as error:  # noqa: BLE001 - what a peer cannot do is a result
        save("peers", {"case": name, "name": way, "phase": phase, "failed": str(error).splitlines()[0][:150]})


def shown(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 10
        else str(round(value, 1) if isinstance(value, float) else value)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--parts", default="numbers,times,peers")
    parser.add_argument("--cases", default=",".join(TIMES))
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which nothing new is started")
    parser.add_argument(
        "--space",
        default=",".join(f"{name}:{phase}" for name in TIMES for phase in PHASES),
        help="case:phase of which every config is timed; of others the heuristic's",
    )
    given = parser.parse_args()
    parts, cases = given.parts.split(","), given.cases.split(",")
    result: dict[str, Any] = {"versions": versions(), "numbers": [], "times": [], "peers": []}

    def save(part: str, row: dict[str, Any]) -> None:
        result[part].append(row)
        if part != "numbers" or not row["passed"]:
            print(f"{time.monotonic() - BEGIN:6.1f}s", " ".join(map(shown, row.values())), flush=True)
        (Path(given.out) / "grouped_matmul.json").write_text(json.dumps(result, indent=1))

    passed = True
    if "numbers" in parts:
        passed = check_numbers(save)
        print(f"numbers: {sum(row['passed'] for row in result['numbers'])} of {len(result['numbers'])} right", flush=True)
    for name in cases:
        problem = TIMES[name]
        if "times" in parts and time.monotonic() - BEGIN < given.budget:
            passed &= time_configs(name, problem, save, given.space.split(","))
        if "peers" in parts and time.monotonic() - BEGIN < given.budget:
            time_jax(name, problem, save)
            if problem.dtype == "bfloat16" and not problem.options:
                time_torch(name, problem, save)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
