"""Sequences that are split over GPUs against one GPU: recurrences by `sequence_parallel`, attention by `ring_attention`.

    python tests/device/split_sequences.py --out results

Wall times of compiled calls on arrays that lie in place, forward and with gradients, in bfloat16; efficiency is the time of one
device divided by that of all times their number. Numbers are checked at a smaller length, against one device. Prints a table,
writes `split_sequences.json` under `--out` (or `$OUT`), exits with 1 if a number is wrong or a program failed.

`--small`: short sequences, on a CPU too; `--problems` names and `--lengths` in tokens, comma separated; `--budget` seconds after
which nothing new is timed; `--threads` that compile; `--repeat` times of each program; `--unchecked`: times without numbers.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
if "--small" in sys.argv:
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import ejkernel

HEADS, KEY_HEADS, WIDTH, GROUPS = 32, 8, 128, 8
TOLERANCE = 0.03
"""Of the norm of a difference, relative: roundings of bfloat16."""

Arrays = dict[str, Any]


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def heads(length: int, key_heads: int, size: int) -> Arrays:
    counts = {"query": size, "key": key_heads, "value": key_heads}
    return {name: normal(seed, 1, length, count, WIDTH) for seed, (name, count) in enumerate(counts.items())}


def delta_arrays(length: int, size: int) -> Arrays:
    beta = jax.nn.sigmoid(normal(3, 1, length, size))
    decay = -0.1 * jax.nn.softplus(normal(4, 1, length, size, dtype=jnp.float32))
    return {**heads(length, size, size), "beta": beta, "decay": decay}


def gla_arrays(length: int, size: int) -> Arrays:
    g = jax.nn.log_sigmoid(normal(3, 1, length, size, WIDTH, dtype=jnp.float32)) / 16
    return {**heads(length, size, size), "g": g.astype(jnp.bfloat16)}


def mamba_arrays(length: int, size: int) -> Arrays:
    groups = min(GROUPS, size)
    return {
        "x": normal(0, 1, length, size, WIDTH),
        "A": -jnp.linspace(1, 16, size),
        "B": normal(1, 1, length, groups, WIDTH),
        "C": normal(2, 1, length, groups, WIDTH),
        "dt": (0.02 * jax.nn.softplus(normal(3, 1, length, size, dtype=jnp.float32))).astype(jnp.bfloat16),
        "D": jnp.ones(size),
    }


def attention_arrays(length: int, size: int) -> Arrays:
    return heads(length, max(1, size * KEY_HEADS // HEADS), size)


class Problem(NamedTuple):
    """arrays: from the length and the number of heads. one: on one device; each: on each of several, with `axis_name="sp"`."""

    arrays: Callable[[int, int], Arrays]
    one: Callable[..., Any]
    each: Callable[..., Any]
    zigzag: bool = False


def state_space(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **arrays: function(**arrays)[0]


def ring(**options: Any) -> Problem:
    attention = functools.partial(ejkernel.flash_attention, causal=True)
    split = functools.partial(ejkernel.ring_attention, causal=True, axis_name="sp", **options)
    return Problem(attention_arrays, attention, split, options.get("layout") == "zigzag")


def recurrence(function: Callable[..., Any], arrays: Callable[[int, int], Arrays]) -> Problem:
    return Problem(arrays, function, ejkernel.sequence_parallel(function, "sp"))


PROBLEMS = {
    "gated_delta_rule": recurrence(ejkernel.gated_delta_rule, delta_arrays),
    "gla": recurrence(ejkernel.gla_attention, gla_arrays),
    "mamba2": Problem(
        mamba_arrays,
        state_space(ejkernel.state_space_v2),
        state_space(ejkernel.sequence_parallel(ejkernel.state_space_v2, "sp")),
    ),
    "attention zigzag": ring(layout="zigzag"),
    "attention contiguous": ring(),
    "attention all_to_all": ring(strategy="all_to_all"),
}


class Program(NamedTuple):
    compiled: Any
    values: Callable[[], tuple[Arrays, Any]]


def whole(name: str) -> bool:
    """Arrays that have no axis of tokens."""
    return name in ("A", "D")


class Setup:
    """The devices, and arrays that lie on one or on all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mesh = jax.make_mesh((len(jax.devices()),), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharding(self, several: bool, name: str) -> Any:
        if not several:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(self.mesh, P() if whole(name) else P(None, "sp"))

    def make(self, problem: Problem, length: int) -> tuple[Arrays, Any]:
        arrays = problem.arrays(length, self.size)
        shape = jax.eval_shape(lambda: problem.one(**arrays))
        return arrays, normal(9, *shape.shape, dtype=shape.dtype)

    def values(self, problem: Problem, length: int, several: bool) -> tuple[Arrays, Any]:
        shapes = jax.eval_shape(lambda: self.make(problem, length))
        shardings = {name: self.sharding(several, name) for name in shapes[0]}, self.sharding(several, "out")
        made = jax.jit(lambda: self.make(problem, length), out_shardings=shardings)()
        return jax.block_until_ready(made)

    def program(self, problem: Problem, length: int, phase: str, several: bool) -> Any:
        """Compiled, of arrays and the cotangent."""
        function = problem.one
        if several:
            names = jax.eval_shape(lambda: problem.arrays(length, self.size))
            specs = {name: P() if whole(name) else P(None, "sp") for name in names}
            shards = functools.partial(jax.shard_map, mesh=self.mesh, in_specs=(specs,), out_specs=P(None, "sp"))

            def function(**arrays: Any) -> Any:
                return shards(lambda arrays: problem.each(**arrays))(arrays)

        def run(arrays: Arrays, cotangent: Any) -> Any:
            if phase == "forward":
                return function(**arrays)
            out, pull = jax.vjp(lambda arrays: function(**arrays), arrays)
            return (out, *pull(cotangent))

        shapes = jax.eval_shape(lambda: self.make(problem, length))
        placed = (
            {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(several, name))
                for name, x in shapes[0].items()
            },
            jax.ShapeDtypeStruct(shapes[1].shape, shapes[1].dtype, sharding=self.sharding(several, "out")),
        )
        return jax.jit(run).lower(*placed).compile()


def seconds(compiled: Any, values: tuple[Arrays, Any], repeat: int) -> float:
    """The median of wall times; fewer of long programs."""
    jax.block_until_ready(compiled(*values))
    times: list[float] = []
    while len(times) < repeat and (len(times) < 3 or sum(times) < 3):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*values))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def largest_error(setup: Setup, problem: Problem, length: int, programs: dict[bool, Any]) -> float:
    """The largest relative difference of output and gradients, by norms; on all devices against one."""
    values = setup.values(problem, length, False)
    wanted = programs[False](*values)
    if problem.zigzag:
        order = functools.partial(ejkernel.zigzag_shard, axis_size=len(jax.devices()))
        values = jax.tree.map(order, values)
    placed = (
        {name: jax.device_put(x, setup.sharding(True, name)) for name, x in values[0].items()},
        jax.device_put(values[1], setup.sharding(True, "out")),
    )
    found = programs[True](*placed)
    if problem.zigzag:
        found = jax.tree.map(functools.partial(ejkernel.zigzag_unshard, axis_size=len(jax.devices())), found)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    wide = [(np.asarray(one, np.float64), np.asarray(other, np.float64)) for one, other in pairs]
    return max(float(np.linalg.norm(one - other) / np.linalg.norm(other)) for one, other in wide)


def attempt(work: Callable[[], Any]) -> Any:
    """What it returns, or what it raised as text: one program must not end the others."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - a program that fails is a finding
        return f"{type(error).__name__}: {error}"[:400]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--lengths", default="32768,131072")
    parser.add_argument("--unchecked", action="store_true")
    parser.add_argument("--budget", type=float, default=100)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    begin = time.perf_counter()
    lengths, checked = ([128], 128) if options.small else ([int(length) for length in options.lengths.split(",")], 8192)
    setup, names = Setup(2 if options.small else HEADS), options.problems.split(",")
    both = "forward", "forward+backward"

    def key(name: str, length: int, phase: str, several: bool) -> tuple[Any, ...]:
        shared = "attention" if name.startswith("attention") and not several else name
        return shared, length, phase, several

    to_check = [] if options.unchecked else names
    wanted = {key(name, checked, both[1], several): name for name in to_check for several in (False, True)}
    wanted |= {
        key(name, length, phase, several): name
        for length in lengths
        for name in names
        for phase in both
        for several in (False, True)
    }
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        made = {
            one: pool.submit(attempt, functools.partial(setup.program, PROBLEMS[name], *one[1:]))
            for one, name in wanted.items()
        }
        programs = {one: future.result() for one, future in made.items()}
    compile_seconds = time.perf_counter() - begin
    print(f"{len(programs)} programs in {compile_seconds:.1f} s", flush=True)

    checks: dict[str, Any] = {}
    for name in to_check:
        pair = {several: programs[key(name, checked, both[1], several)] for several in (False, True)}
        failed = next((one for one in pair.values() if isinstance(one, str)), None)
        checks[name] = failed or attempt(functools.partial(largest_error, setup, PROBLEMS[name], checked, pair))
        print(f"{name:22} T {checked}: {checks[name]}", flush=True)

    measured: dict[tuple[Any, ...], Any] = {}

    def timed(name: str, length: int, several: bool) -> None:
        """Both phases, on the same arrays."""
        missing = [phase for phase in both if key(name, length, phase, several) not in measured]
        if not missing:
            return
        late = time.perf_counter() - begin > options.budget
        values = (
            f"not timed after {options.budget} s" if late else attempt(lambda: setup.values(PROBLEMS[name], length, several))
        )
        for phase in missing:
            one = key(name, length, phase, several)
            problem = next((x for x in (programs[one], values) if isinstance(x, str)), None)
            measured[one] = problem or attempt(functools.partial(seconds, programs[one], values, options.repeat))

    rows: list[dict[str, Any]] = []
    for length in lengths:
        for name in names:
            for several in (False, True):
                timed(name, length, several)
            for phase in both:
                alone, split = (measured[key(name, length, phase, several)] for several in (False, True))
                row = {"problem": name, "length": length, "phase": phase}
                if isinstance(alone, float) and isinstance(split, float):
                    row |= {"one_ms": 1e3 * alone, "all_ms": 1e3 * split, "efficiency": alone / len(jax.devices()) / split}
                    print(
                        f"{name:22} T {length:7} {phase:17} {row['one_ms']:9.2f} {row['all_ms']:9.2f} ms {row['efficiency']:.3f}",
                        flush=True,
                    )
                else:
                    row["failure"] = next(x for x in (alone, split) if isinstance(x, str))
                    print(f"{name:22} T {length:7} {phase:17} {row['failure']}", flush=True)
                rows.append(row)

    record = {
        "devices": [device.device_kind for device in jax.devices()],
        "versions": {one: importlib.metadata.version(one) for one in ("jax", "jaxlib", "ejkernel-core")},
        "shape": {"batch": 1, "heads": setup.size, "key_heads": KEY_HEADS, "width": WIDTH, "dtype": "bfloat16"},
        "checks": {"length": checked, "tolerance": TOLERANCE, "errors": checks},
        "rows": rows,
        "compile_seconds": compile_seconds,
        "seconds": time.perf_counter() - begin,
    }
    os.makedirs(options.out, exist_ok=True)
    with open(os.path.join(options.out, "split_sequences.json"), "w") as file:
        json.dump(record, file, indent=1)
    print(f"{record['seconds']:.1f} s", flush=True)
    wrong = any(isinstance(error, str) or not error <= TOLERANCE for error in checks.values())
    return int(wrong or any("failure" in row and not row["failure"].startswith("not timed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
