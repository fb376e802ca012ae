"""Whole trainers on a real GPU, in turns: `examples/train` beside the trainer of jax-linear-attention, on the same shapes.

    python trainers.py --out FOLDER                         all rows, the most telling first; trainers.json
    python trainers.py --out FOLDER --rows llama-float8
    python trainers.py --small --rows llama                 try the script on a CPU

Both take 65,536 tokens a step, in parts of what fits: sequences of 2048, AdamW with clipping, float32 parameters, products in
bfloat16 or float8. Each run is a process of its own with JAX's compilation cache. In the first turn all settings of both trainers
are tried, then the fastest of each again, in turns; the median step of these counts. The share of the peak is computed here for
both, by one formula. Theirs learns from random tokens, ours from text: losses are not compared, times are.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from train import CUBLAS, environment

TOKENS = 65_536
"""Of a step."""
LENGTH = 2048
ROWS: dict[str, tuple[str, bool]] = {
    "llama": ("llama", False),
    "llama-float8": ("llama", True),
    "hybrid": ("hybrid", False),
    "mamba2": ("mamba2", False),
    "moe": ("moe", False),
    "hybrid-float8": ("hybrid", True),
}
"""By name: model of `examples/train` in its size 1.3b, and whether products are float8."""

OURS: dict[str, list[tuple[int, str, str]]] = {
    "llama": [(8, "--layers unroll", CUBLAS), (4, "--layers unroll", CUBLAS)],
    "hybrid": [(4, "--layers unroll", CUBLAS), (4, "--layers unroll --remat dots", CUBLAS)],
    "mamba2": [(4, "--layers unroll", CUBLAS), (4, "--layers unroll --remat dots", CUBLAS)],
    "moe": [(8, "--layers unroll", CUBLAS)],
}
"""Sequences of a part, options of our trainer and flags of XLA, all tried: their fastest count."""

UNROLL = {"scan_layers": False}
LEAN = {"remat": "none", "lean_vjp": True, **UNROLL}
THEIRS: dict[str, list[tuple[int, dict[str, Any], str]]] = {
    "llama": [(4, {"remat": "none", **UNROLL}, CUBLAS), (4, {"remat": "dots", **UNROLL}, CUBLAS), (8, LEAN, CUBLAS)],
    "hybrid": [
        (4, {"remat": "dots"}, CUBLAS),
        (4, {"remat": "dots", **UNROLL}, CUBLAS),
        (4, {**LEAN, "lean_remat_core": True}, CUBLAS),
    ],
    "mamba2": [(4, {"remat": "dots"}, CUBLAS), (4, {"remat": "dots", **UNROLL}, CUBLAS), (4, LEAN, CUBLAS)],
    "moe": [(4, {"remat": "dots", **UNROLL}, CUBLAS), (4, {"remat": "none", **UNROLL}, CUBLAS)],
}
"""Sequences of a part, settings of the model and flags of XLA, all tried: their fastest count. By default layers are a scan;
unrolled recurrent ones took over 125 s to compile on an H200's host."""


def experiment(
    model: str, *, float8: bool, micro: int, settings: dict[str, Any], small: bool, steps: int, out: str, repeats: int | None
) -> Any:
    """Their config of a model of ours, with as many repeats of its pattern."""
    from jla.config import DataConfig, ExperimentConfig, OptimConfig, TrainConfig
    from jla.models.config import AttentionConfig, LinearAttentionConfig, ModelConfig, MoEConfig, SSMConfig

    from ejkernel_train.config import MODELS

    sizes = MODELS[model]["tiny" if small else "1.3b"]
    if repeats is not None:
        sizes = dataclasses.replace(sizes, layers=repeats * len(sizes.pattern))
    heads = sizes.heads or 4
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=sizes.key_heads or heads,
        head_dim=sizes.head_size or sizes.width // heads,
        qk_norm=False,
        output_gate="gated_attention" in sizes.pattern,
    )
    named = {"attention": "attention", "gated_attention": "attention", "delta_rule": "gated_deltanet", "state_space": "mamba2"}
    kinds: dict[str, Any] = {"layer_types": tuple(named[kind] for kind in sizes.pattern) * sizes.repeats}
    if "delta_rule" in sizes.pattern:
        heads_of_keys, size = sizes.linear_key_heads, sizes.linear_head_size
        kinds["linear_attention"] = LinearAttentionConfig(
            num_k_heads=heads_of_keys, num_v_heads=sizes.linear_heads, head_k_dim=size, head_v_dim=size, conv_size=sizes.filter
        )
    if "state_space" in sizes.pattern:
        kinds["ssm"] = SSMConfig(d_state=sizes.state_size, expand=2, head_dim=sizes.linear_head_size, n_groups=sizes.groups)
        kinds["mlp_types"] = ("none",) * sizes.layers
    if sizes.experts:
        kinds["moe"] = MoEConfig(num_experts=sizes.experts, top_k=sizes.experts_per_token, d_ff_expert=sizes.hidden)
    length = 64 if small else LENGTH
    eight = {"fp8": "delayed", "fp8_fused": True, "fp8_min_features": 1024} if float8 else {}
    return ExperimentConfig(
        model=ModelConfig(
            vocab_size=sizes.vocabulary,
            d_model=sizes.width,
            n_layers=sizes.layers,
            d_ff=sizes.hidden,
            attention=attention,
            tie_embeddings=True,
            **kinds,
            **eight,
            **settings,
        ),
        optim=OptimConfig(lr=3e-4, warmup_steps=1),
        train=TrainConfig(
            max_steps=steps,
            seq_len=length,
            micro_batch_per_replica=micro,
            grad_accum=2 if small else TOKENS // length // micro,
            log_every=1,
            ce_impl="xla" if small else "auto",
            ce_grad_in_forward=not small,
            save_final=False,
            final_eval=False,
            resume="never",
            output_dir=out,
        ),
        data=DataConfig(source="synthetic", synthetic_kind="uniform", num_workers=0),
    )


def theirs(name: str, place: int, *, small: bool, steps: int, out: str) -> dict[str, Any]:
    """Seconds of their steps, the first three not counted; runs in its own process.

    One step with two repeats goes before, as in our trainer: XLA then knows the products of the whole program. Their weights start
    as other random numbers, as XLA takes minutes to compile one program that draws all of them from the normal distribution."""
    import jax
    from jla.training.trainer import Trainer

    jax.random.truncated_normal = hashed

    model, float8 = ROWS[name]
    micro, settings, flags = THEIRS[model][place]
    if small:
        settings = {key: value for key, value in settings.items() if key == "remat" and value != "names"}
    begin = time.monotonic()

    def run(steps: int, repeats: int | None) -> Any:
        asked: Any = {"float8": float8, "micro": micro, "settings": settings, "small": small, "out": f"{out}.{repeats}"}
        return Trainer(experiment(model, **asked, steps=steps, repeats=repeats)).run()

    run(1, 2)
    history = run(steps, None)
    seconds = [row["step_time"] for row in history.history[3:-1]]
    return {"seconds": seconds, "micro": micro, "settings": settings, "flags": flags, "whole": time.monotonic() - begin}


def hashed(key: Any, lower: float, upper: float, shape: tuple[int, ...], dtype: Any) -> Any:
    """Uniform numbers with the standard deviation of a normal distribution cut at two of its own."""
    import jax
    import jax.numpy as jnp

    bits = jax.lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(2654435761) + jax.random.key_data(key).ravel()[-1]
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    return ((((bits ^ (bits >> 13)) >> 8) / 2**24 - 0.5) * 2 * 0.88 * 3**0.5).astype(dtype).reshape(shape)


def ours(name: str, place: int, *, small: bool, steps: int, out: Path) -> str:
    """What is asked of our trainer."""
    model, float8 = ROWS[name]
    micro, more, _ = OURS[model][place]
    batch, length, parts = (4, 64, 2) if small else (TOKENS // LENGTH, LENGTH, TOKENS // LENGTH // micro)
    asked = f"--model {model} --size {'tiny' if small else '1.3b'} --batch {batch} --length {length} --accumulate {parts}"
    return f"{asked} --steps {steps} --out {out} {more}{' --float8' if float8 else ''}"


def run(command: list[str], variables: dict[str, str], limit: float) -> str:
    """What went wrong, else nothing; of a process that took too long the last that it compiled."""
    variables = {**variables, "JAX_LOG_COMPILES": "1"}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=max(limit, 1))
    except subprocess.TimeoutExpired as error:
        written = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        told = [line[:120] for line in written.splitlines() if "XLA compilation" in line or line.startswith("Compiling")]
        return f"more than {limit:.0f} s; {' | '.join(told[-3:])}"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1][:500]


def one(trainer: str, name: str, place: int, options: argparse.Namespace, left: float, written: Path) -> dict[str, Any]:
    """What a process of a trainer measured, or {"problem": ...}."""
    steps, settings_of = options.steps, (OURS if trainer == "ours" else THEIRS)[ROWS[name][0]]
    if trainer == "ours":
        asked = ours(name, place, small=options.small, steps=steps, out=written)
        command = [sys.executable, "-m", "ejkernel_train", *asked.split()]
    else:
        more = ["--small"] if options.small else []
        command = [sys.executable, __file__, "--theirs", name, str(place), "--steps", str(steps), "--out", str(written), *more]
    if problem := run(command, environment("", settings_of[place][2]), min(left, options.limit)):
        return {"problem": problem}
    found = json.loads(written.read_text())
    if trainer == "theirs":
        return found
    (build,) = found["builds"]
    return {
        "seconds": build["steps_seconds"],
        "operations": build["operations_per_step"],
        "bytes": build["program_bytes"],
        **dict(zip(("micro", "settings", "flags"), settings_of[place], strict=True)),
    }


def measure(options: argparse.Namespace) -> int:
    out, begin = Path(options.out), time.monotonic()
    folder = Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name in options.rows.split(","):
        row: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
        for turn in range(options.turns):
            for trainer, settings in (("ours", OURS), ("theirs", THEIRS)):
                tried = range(min(len(settings[ROWS[name][0]]), options.settings))
                for place in tried if turn == 0 else fastest(row[trainer]):
                    left = options.budget - (time.monotonic() - begin)
                    record = one(trainer, name, place, options, left, folder / f"{name}-{trainer}-{turn}-{place}.json")
                    row[trainer].append({"place": place, **record})
                    shown = record.get("problem") or round(statistics.median(record["seconds"]), 4)
                    print(f"  {name} {trainer} {settings[ROWS[name][0]][place]}: {shown}", flush=True)
        found[name] = {**row, **summary(row)}
        (out / "trainers.json").write_text(json.dumps(found, indent=1) + "\n")
        shown = {key: value for key, value in found[name].items() if key not in ("ours", "theirs")}
        print(f"{name} ({time.monotonic() - begin:.0f} s): {json.dumps(shown)}", flush=True)
    return 0


def medians(runs: list[dict[str, Any]]) -> dict[int, float]:
    """Seconds of a step, by the place of its settings."""
    seconds: dict[int, list[float]] = {}
    for each in runs:
        if "problem" not in each:
            seconds.setdefault(each["place"], []).extend(each["seconds"])
    return {place: statistics.median(of_place) for place, of_place in seconds.items()}


def fastest(runs: list[dict[str, Any]]) -> list[int]:
    """The place of the fastest settings, which alone run again; empty if none ran."""
    found = medians(runs)
    return [min(found, key=found.__getitem__)] if found else []


def summary(row: dict[str, Any], peak: float = 989e12) -> dict[str, Any]:
    """Tokens per second and the share of the peak that our count of operations gives, for the fastest settings of both."""
    operations = next((each["operations"] for each in row["ours"] if "operations" in each), None)
    said: dict[str, Any] = {}
    for trainer in ("ours", "theirs"):
        for place in fastest(row[trainer]):
            seconds = medians(row[trainer])[place]
            said |= {f"{trainer}_step_seconds": seconds, f"{trainer}_tokens_per_second": round(TOKENS / seconds)}
            said |= {f"{trainer}_share": round(operations / seconds / peak, 4)} if operations else {}
            said |= {f"{trainer}_place": place}
    if "ours_step_seconds" in said and "theirs_step_seconds" in said:
        said["ratio"] = round(said["theirs_step_seconds"] / said["ours_step_seconds"], 3)
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--rows", default=",".join(ROWS), help="some of them, in this order")
    parser.add_argument("--steps", type=int, default=8, help="of each process; the first three are not counted")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--settings", type=int, default=9, help="of each trainer that are tried at most")
    parser.add_argument("--budget", type=float, default=560, help="seconds; a process that they end is stopped")
    parser.add_argument("--limit", type=float, default=90, help="seconds of one process, which XLA can spend on one program")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script on a CPU")
    parser.add_argument("--theirs", nargs=2, metavar=("ROW", "PLACE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.theirs:
        return measure(options)
    name, place = options.theirs
    found = theirs(name, int(place), small=options.small, steps=options.steps, out=f"{options.out}.run")
    Path(options.out).write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
