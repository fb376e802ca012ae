"""Every kernel of the CUDA library with its outputs between guards: bytes beside an output must stay as they were.

    python tests/device/guards.py --out results

JAX's allocator on GPUs cuts one arena into pieces and gives a freed piece to the next request of its size. So for every output of
a program three neighbours are allocated, the middle one is freed, and the program runs; where its output lies is read and must
be that place. Ragged shapes of all operations, forward and backward, each run several times; the outputs must be what they are
without guards. Outputs that were not placed between guards are counted, and more than a tenth of them is a failure. Writes
`guards.json` under `--out` (or `$OUT`), exits with 1 if anything is wrong.

compute-sanitizer (`cuda_library.py`) sees reads and scratch memory too.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import check_gpu
import flash_attention
import jax
import numpy as np
from cuda_library import RAGGED, attend, attention_problems, cases, config, few_workers, kernel, same, update_problem
from row_problems import Prepared

from ejkernel.plugin import current_target
from ejkernel_cuda.flash_attention import capability as flash_capability, config as flash_config, kernel as flash_kernel

GUARD = 1 << 16
"""Bytes of one guard."""
NOISE = np.random.default_rng(0).integers(0, 256, 1 << 26, np.uint8)
PIECE = 256
"""What JAX's allocator rounds a request up to."""
TRIES = 12
REPEATS = 2
KEPT: list[Any] = []
"""Arrays that lay elsewhere than wanted: as long as they live, the gaps that they filled stay filled."""

Run = tuple[str, Callable[..., Any], tuple[Any, ...]]


def row_runs() -> Iterator[Run]:
    """Operations over rows: forward and backward in one program."""
    for index, problem in enumerate(RAGGED):
        made = Prepared(problem, "bfloat16", index, "cuda")
        target = current_target()
        forward, backward = (space.heuristic(made.call, target) for space in (made.config.FORWARD, made.config.BACKWARD))

        def run(inputs: Any, grads: Any, made: Any = made, forward: Any = forward, backward: Any = backward) -> Any:
            outputs = made.kernel.forward(made.call, inputs, forward)
            return outputs, made.kernel.backward(made.call, inputs, outputs, grads, backward)

        yield f"{problem.name} {problem.options}", run, (made.inputs, made.cotangents)


def paged_runs() -> Iterator[Run]:
    for case in cases.CASES:
        if not case.is_benchmark:
            bound = update_problem(case)
            cfg = config.heuristic(bound.call, current_target())
            yield f"update {case.name}", lambda i, c=bound.call, cfg=cfg: kernel.forward(c, i, cfg), (bound.inputs,)
    for name, bound in attention_problems("bfloat16"):
        for way, cfg in few_workers(bound.call).items():
            yield f"attention {name} {way}", attend(bound.call, cfg), (bound.inputs,)


def flash_runs() -> Iterator[Run]:
    """Every config of the ragged problems, and lengths about a tile's edge with the heuristic's."""
    lengths = {
        f"length-{length}-{size}": flash_attention.Problem(2, length, 4, 2, size, options=flash_attention.options(causal=True))
        for length in (1, 63, 64, 65, 127, 129, 191, 193, 257)
        for size in (64, 128, 256)
    }
    for name, problem in (flash_attention.NUMBERS | lengths).items():
        call, inputs, _ = problem.build()
        if flash_capability.supports_forward(call, current_target()) is None:
            space = flash_config.FORWARD.search_space(call, current_target())
            for cfg in [flash_config.FORWARD.heuristic(call, current_target())] if name in lengths else space:
                yield f"flash {name} {cfg}", lambda i, c=call, cfg=cfg: flash_kernel.forward(c, i, cfg), (inputs,)


def filled(size: int) -> jax.Array:
    return jax.block_until_ready(jax.device_put(NOISE[:size]))


def neighbours(size: int) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """Three arrays side by side in memory, the middle one of `size` bytes; None if the allocator would not."""
    for _ in range(TRIES):
        trio = filled(GUARD), filled(size), filled(GUARD)
        begins = [array.unsafe_buffer_pointer() for array in trio]
        if begins[1] - begins[0] == GUARD and begins[2] - begins[1] == -(-size // PIECE) * PIECE:
            return trio
        KEPT.append(trio)
    return None


def check(name: str, program: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    wanted = jax.tree.map(np.asarray, program(*arguments))
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(wanted) if leaf.nbytes]
    guarded = changed = different = 0
    for _ in range(REPEATS):
        trios = [trio for trio in map(neighbours, sizes) if trio]
        places = {middle.unsafe_buffer_pointer() for _, middle, _ in trios}
        for _, middle, _ in trios:
            middle.delete()
        got = jax.block_until_ready(program(*arguments))
        guarded += sum(leaf.unsafe_buffer_pointer() in places for leaf in jax.tree.leaves(got) if leaf.nbytes)
        changed += sum(not np.array_equal(np.asarray(guard), NOISE[:GUARD]) for trio in trios for guard in (trio[0], trio[2]))
        different += not same(got, wanted)
    return {
        "check": name,
        "passed": not changed and not different,
        "outputs": REPEATS * len(sizes),
        "guarded": guarded,
        "guards changed": changed,
        "results changed": different,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of guards.json")
    parser.add_argument("--match", default="", help="only programs with this in their name")
    options = parser.parse_args()
    folder = pathlib.Path(options.out)
    if jax.default_backend() != "gpu":
        print(f"needs a GPU, JAX has {jax.devices()}")
        return 2
    rows = []
    with ThreadPoolExecutor(16) as pool:
        lowered = [
            (name, pool.submit(jax.jit(function).lower(*arguments).compile), arguments)
            for runs in (row_runs, paged_runs, flash_runs)
            for name, function, arguments in runs()
            if options.match in name
        ]
        programs = [(name, program.result(), arguments) for name, program, arguments in lowered]
    for one in programs:  # nothing else allocates now
        rows.append(check(*one))
        if not rows[-1]["passed"]:
            print(f"  FAILED {rows[-1]}", flush=True)
    outputs, guarded = (sum(row[key] for row in rows) for key in ("outputs", "guarded"))
    wrong = sum(not row["passed"] for row in rows)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "guards.json").write_text(json.dumps({"versions": check_gpu.versions(), "checks": rows}, indent=1))
    print(f"{len(rows)} programs, {wrong} wrong; {guarded} of {outputs} outputs lay between guards")
    return 1 if wrong or guarded < 0.9 * outputs else 0


if __name__ == "__main__":
    sys.exit(main())
