"""Arrays of more than 2^31 elements on a real GPU: every operation of a platform, forward and backward.

    python tests/device/large_offsets.py --out results

Each array that is long is zero but for its last rows. What comes out for them, and their gradients, must be what the small problem
of those rows alone gives on XLA in float32; rows before them must be what zeros give, equal in all rows, and their gradients 0:
an offset that wraps at 32 bits would read zeros, or write there. Prints a line per operation, writes `large_offsets.json` under
`--out` (or `$OUT`), exits with 1 if a number is wrong. Needs about 70 GiB of device memory.

`--platform triton`, `--operations` names with commas, `--elements` above which an array counts as long (2^31).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from check_gpu import versions

import ejkernel
from ejkernel.utils.tolerance import FORWARD, GRADIENT

_PAGE, _PAGES_OF_TAIL = 16, 64
Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    """An operation on arrays of which some are long in their first dim.

    Attributes:
        name: of the operation, and what is large.
        tails: the last rows of the long arrays, and the others whole.
        long: names of the arrays that are long.
        run: platform, arrays, and how many first rows the long ones have before their tails -> results; what belongs to the
            tail comes last.
        last: how many rows of each result belong to the tail; None for a result that belongs to it as a whole.
        moving: names of the arrays whose gradients are checked.
        columns: elements of a row of the result, where that is what is large; 0 = the long arrays are.
    """

    name: str
    tails: Arrays
    long: tuple[str, ...]
    run: Callable[[str, Arrays, int], Arrays]
    last: Mapping[str, int | None]
    moving: tuple[str, ...] = ()
    columns: int = 0

    def before(self, elements: int) -> int:
        """Rows before the tails, a multiple of theirs, so that the largest arrays have more elements than that."""
        tails = [self.tails[name] for name in self.long]
        return min(-(-elements // (tail.shape[0] * self.columns or tail.size)) * tail.shape[0] for tail in tails)

    def check(self, platform: str, elements: int) -> dict[str, float]:
        """Relative errors of the tail's results and gradients; the largest number where zeros should be."""
        before = self.before(elements)
        got = jax.jit(lambda tails: self._results(platform, tails, before))(self.tails)
        small = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, self.tails)
        wanted = jax.jit(lambda tails: self._results("xla", tails, 0))(small)
        found = {name: _relative(value, wanted[name]) for name, value in got.items() if not name.startswith("before ")}
        return found | {name: float(value) for name, value in got.items() if name.startswith("before ")}

    def _results(self, platform: str, tails: Arrays, before: int) -> dict[str, Any]:
        arrays = {name: _after_zeros(tail, before) if name in self.long else tail for name, tail in tails.items()}

        def forward(moving: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
            results = self.run(platform, {**arrays, **moving}, before)
            ours = {name: value if self.last[name] is None else value[-self.last[name] :] for name, value in results.items()}
            others = {
                f"before {name}": _unequal(value[: -self.last[name]])
                for name, value in results.items()
                if before and self.last[name] is not None
            }
            return ours, others

        found, pull, others = jax.vjp(forward, {name: arrays[name] for name in self.moving}, has_aux=True)
        if not self.moving:
            return {**found, **others}
        keys = jax.random.split(jax.random.key(7), len(found))
        cotangents = {
            name: jax.random.normal(key, value.shape, jnp.bfloat16).astype(value.dtype)
            for key, (name, value) in zip(keys, found.items(), strict=True)
        }
        (gradients,) = pull(cotangents)
        for name, gradient in gradients.items():
            tail = tails[name].shape[0]
            found[f"d_{name}"] = gradient[-tail:]
            if before and name in self.long:
                others[f"before d_{name}"] = jnp.max(jnp.abs(gradient[:-tail]))
        return {**found, **others}


def _after_zeros(tail: Any, before: int) -> Any:
    if not before:
        return tail
    return jnp.zeros((before + tail.shape[0], *tail.shape[1:]), tail.dtype).at[before:].set(tail)


def _unequal(rows: Any) -> Any:
    """The largest difference of rows that should be equal; infinite if one is not finite."""
    return jnp.max(jnp.where(jnp.isfinite(rows), jnp.abs(rows - rows[:1]), jnp.inf).astype(jnp.float32))


def _relative(got: Any, wanted: Any) -> float:
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm((got - wanted).ravel()) / jnp.maximum(jnp.linalg.norm(wanted.ravel()), 1e-30))


def _normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


# The problems


def _rows(name: str, parameters: tuple[str, ...]) -> Problem:
    tails = {"x": _normal(0, 64, 4096), **{key: _normal(1, 4096) for key in parameters}}

    def run(platform: str, arrays: Arrays, before: int) -> Arrays:
        return {"out": getattr(ejkernel, name)(**arrays, platform=platform)}

    return Problem(name, tails, ("x",), run, {"out": 64}, tuple(tails))


def _rope() -> Problem:
    angles = jax.random.uniform(jax.random.key(2), (256, 64), maxval=6.0)
    tails = {"x": _normal(0, 1, 256, 32, 128), "cos": jnp.cos(angles), "sin": jnp.sin(angles)}

    def run(platform: str, arrays: Arrays, before: int) -> Arrays:
        return {"out": ejkernel.rope(**arrays, platform=platform)}

    return Problem("rope", tails, ("x",), run, {"out": 1}, ("x", "cos", "sin"))


def _pooling(packed: bool) -> Problem:
    shape = (1024, 32, 128) if packed else (1, 1024, 32, 128)

    def run(platform: str, arrays: Arrays, before: int) -> Arrays:
        if not packed:
            return {"out": ejkernel.mean_pooling(arrays["x"], platform=platform)}
        ends = jnp.arange(0, before + 1025, 1024, dtype=jnp.int32)
        return {"out": ejkernel.mean_pooling(arrays["x"][None], ends, platform=platform)}

    return Problem(f"mean_pooling{' packed' * packed}", {"x": _normal(0, *shape)}, ("x",), run, {"out": 1}, ("x",))


def _attention(packed: bool) -> Problem:
    shape = (1024, 32, 128) if packed else (1, 1024, 32, 128)
    tails = {name: _normal(seed, *shape) for seed, name in enumerate(("query", "key", "value"))}

    def run(platform: str, arrays: Arrays, before: int) -> Arrays:
        query, key, value = (arrays[name] for name in ("query", "key", "value"))
        if not packed:
            return {"out": ejkernel.flash_attention(query, key, value, causal=True, platform=platform)}
        ends = jnp.arange(0, before + 1025, 1024, dtype=jnp.int32)
        return {"out": ejkernel.flash_attn_varlen(query, key, value, ends, causal=True, platform=platform)}

    return Problem(f"flash_attention{' packed' * packed}", tails, tuple(tails), run, {"out": shape[0]}, tuple(tails))


def _recurrence(vector: bool) -> Problem:
    shape = (1, 1024, 32, 128)
    tails = {name: 0.3 * _normal(seed, *shape) for seed, name in enumerate(("query", "key", "value"))}
    decay = "gk" if vector else "g"
    tails[decay] = -0.1 * abs(_normal(4, *(shape if vector else shape[:3])))

    def run(platform: str, arrays: Arrays, before: int) -> Arrays:
        out, state = ejkernel.recurrent(**arrays, platform=platform)
        return {"out": out, "state": state}

    last = {"out": 1, "state": 1}
    return Problem(f"linear_recurrence {decay}", tails, tuple(tails), run, last, tuple(tails))


def _grouped(name: str) -> Problem:
    """Many rows of lhs, of rhs or of the result. The last group has the tail's rows."""
    rows, inner, columns, groups = {"lhs": (512, 4096, 256, 1), "rhs": (256, 4096, 4096, 1), "out": (512, 64, 16384, 1)}[name]
    tails = {"lhs": _normal(0, rows, inner), "rhs": _normal(1, groups, inner, columns) / 64}

    def run(platform: str, arrays: Arrays, before: int) -> Arrays:
        lhs, rhs = arrays["lhs"], arrays["rhs"]
        if name == "rhs":  # all groups but the last are empty
            sizes = jnp.zeros(rhs.shape[0], jnp.int32).at[-1].set(rows)
        else:
            rhs = jnp.concatenate([rhs, rhs]) if before else rhs
            sizes = jnp.array([before, rows] if before else [rows], jnp.int32)
        return {"out": ejkernel.grouped_matmul(lhs, rhs, sizes, platform=platform)}

    long = ("rhs",) if name == "rhs" else ("lhs",)
    last = {"out": None if name == "rhs" else rows}
    return Problem(f"grouped_matmul {name}", tails, long, run, last, ("lhs", "rhs"), columns if name == "out" else 0)


def _paged() -> Problem:
    """Requests whose pages are the last ones of the cache; before, new tokens are stored there."""
    tokens, heads = _PAGE * _PAGES_OF_TAIL, 8
    pages = {name: _normal(seed, _PAGES_OF_TAIL, _PAGE, heads, 128) for seed, name in enumerate(("keys", "values"))}
    new_pages = {name: _normal(seed, 8, heads, 128) for seed, name in enumerate(("new_keys", "new_values"), 4)}
    tails = {**pages, **new_pages, "query": _normal(3, 8, 32, 128)}

    def run(platform: str, arrays: Arrays, before: int) -> Arrays:
        tables = before + jnp.arange(_PAGES_OF_TAIL, dtype=jnp.int32)[None]
        where = (jnp.array([tokens], jnp.int32), tables, jnp.array([0, 8], jnp.int32))
        new = (arrays["new_keys"], arrays["new_values"])
        if arrays["keys"].dtype == jnp.float32:
            new = tuple(array.astype(jnp.float32) for array in new)
        keys, values = ejkernel.paged_cache_update(*new, arrays["keys"], arrays["values"], *where, platform=platform)
        out = ejkernel.unified_attention(arrays["query"], keys, values, *where, platform=platform)
        return {"keys": keys, "values": values, "out": out}

    last = {"keys": _PAGES_OF_TAIL, "values": _PAGES_OF_TAIL, "out": None}
    return Problem("paged_attention after paged_cache_update", tails, ("keys", "values"), run, last)


def problems() -> dict[str, Callable[[], Problem]]:
    """Made one at a time: together their arrays would be too large."""
    return {
        "softmax": lambda: _rows("softmax", ()),
        "rms_norm": lambda: _rows("rms_norm", ("scale",)),
        "layer_norm": lambda: _rows("layer_norm", ("scale", "offset")),
        "rope": _rope,
        "mean_pooling": lambda: _pooling(False),
        "mean_pooling packed": lambda: _pooling(True),
        "flash_attention": lambda: _attention(False),
        "flash_attention packed": lambda: _attention(True),
        "linear_recurrence gk": lambda: _recurrence(True),
        "linear_recurrence g": lambda: _recurrence(False),
        "grouped_matmul lhs": lambda: _grouped("lhs"),
        "grouped_matmul rhs": lambda: _grouped("rhs"),
        "grouped_matmul out": lambda: _grouped("out"),
        "paged_attention": _paged,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ".")))
    parser.add_argument("--platform", default="triton")
    parser.add_argument("--operations", default="", help="names with commas; default: all")
    parser.add_argument("--elements", type=int, default=2**31)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    record = {"versions": versions(), "elements": options.elements, "platform": options.platform, "checks": rows}
    wanted = [name for name in options.operations.split(",") if name]
    for name, make in problems().items():
        if wanted and name not in wanted and name.split()[0] not in wanted:
            continue
        started = time.monotonic()
        try:
            errors, failure = make().check(options.platform, options.elements), ""
        except Exception as error:  # noqa: BLE001 - the other operations are looked at
            errors, failure = {}, f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
        passed = not failure and all(
            value == 0
            if key.startswith("before ")
            else value < (GRADIENT if key.startswith("d_") else FORWARD)["bfloat16"].norm
            for key, value in errors.items()
        )
        seconds = round(time.monotonic() - started, 1)
        rows.append({"check": name, "passed": passed, "errors": errors, "failure": failure, "seconds": seconds})
        detail = failure or " ".join(f"{key} {value:.1e}" for key, value in errors.items())
        print(f"{'ok  ' if passed else 'FAIL'} {name} ({seconds} s): {detail}", flush=True)
        jax.clear_caches()
        (options.out / "large_offsets.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if rows and all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
