"""Whole trainers on a real GPU, in turns: `examples/train` beside the trainer of jax-linear-attention, on the same shapes.

    python trainers.py --out FOLDER                         all rows, the most telling first; trainers.json
    python trainers.py --out FOLDER --rows llama-float8
    python trainers.py --small --rows llama                 try the script on a CPU

Both take 65,536 tokens a step, in parts of what fits: sequences of 2048, AdamW with clipping, float32 parameters, products in
bfloat16 or float8. A row is ours, theirs, ours, theirs, each a process of its own with JAX's compilation cache; the median step of
both of a trainer's processes counts. The share of the peak is computed here for both, by one formula. Theirs learns from random
tokens, ours from text: losses are not compared, times are.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from train import environment

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

OURS: dict[str, tuple[int, str]] = {"llama": (4, "none"), "hybrid": (2, "dots"), "mamba2": (2, "dots"), "moe": (2, "none")}
"""Sequences of a part, and what the backward computes again."""

THEIRS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "llama": [
        (4, {"remat": "dots"}),
        (2, {"remat": "none", "lean_vjp": True}),
        (4, {"remat": "names", "remat_names": ("attention", "linear", "kernels"), "mlp_kernel": "mosaic_gpu"}),
    ],
    "hybrid": [(4, {"remat": "dots"}), (2, {"remat": "none", "lean_vjp": True, "lean_remat_core": True})],
    "mamba2": [(4, {"remat": "dots"}), (2, {"remat": "none", "lean_vjp": True})],
    "moe": [(4, {"remat": "dots"}), (2, {"remat": "none"})],
}
"""Sequences of a part and settings of the model, all tried: their fastest counts."""


def experiment(model: str, *, float8: bool, micro: int, settings: dict[str, Any], small: bool, steps: int, out: str) -> Any:
    """Their config of a model of ours."""
    from jla.config import DataConfig, ExperimentConfig, OptimConfig, TrainConfig
    from jla.models.config import AttentionConfig, LinearAttentionConfig, ModelConfig, MoEConfig, SSMConfig

    from ejkernel_train.config import MODELS

    sizes = MODELS[model]["tiny" if small else "1.3b"]
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
    """Seconds of their steps, the first three not counted; runs in its own process."""
    from jla.training.trainer import Trainer

    model, float8 = ROWS[name]
    micro, settings = THEIRS[model][place]
    if small:
        settings = {key: value for key, value in settings.items() if key == "remat" and value != "names"}
    begin = time.monotonic()
    history = Trainer(experiment(model, float8=float8, micro=micro, settings=settings, small=small, steps=steps, out=out)).run()
    seconds = [row["step_time"] for row in history.history[3:-1]]
    return {"seconds": seconds, "micro": micro, "settings": settings, "whole": time.monotonic() - begin}


def ours(name: str, *, small: bool, steps: int, out: Path) -> list[str]:
    """The command of our trainer."""
    model, float8 = ROWS[name]
    micro, remat = OURS[model]
    batch = TOKENS // LENGTH
    asked = f"--model {model} --size {'tiny' if small else '1.3b'} --steps {steps} --rounds {steps} --out {out}"
    asked += (
        " --batch 4 --length 64 --accumulate 2"
        if small
        else f" --batch {batch} --length {LENGTH} --accumulate {batch // micro}"
    )
    return [sys.executable, "-m", "ejkernel_train", *asked.split(), "--remat", remat, *(["--float8"] if float8 else [])]


def run(command: list[str], variables: dict[str, str], limit: float) -> str:
    """What went wrong, else nothing."""
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"more than {limit:.0f} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1][:500]


def measure(options: argparse.Namespace) -> int:
    out, begin = Path(options.out), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name in options.rows.split(","):
        model, _ = ROWS[name]
        row: dict[str, Any] = {"ours": [], "theirs": [], "failed": []}
        for turn in range(options.turns):
            left = options.budget - (time.monotonic() - begin)
            record = out / f"{name}-{turn}.json"
            asked = ours(name, small=options.small, steps=options.steps, out=record)
            problem = run(asked, environment(" ".join(asked)), left)
            if problem:
                row["failed"].append({"trainer": "ours", "problem": problem})
            else:
                build = json.loads(record.read_text())["builds"][0]
                counted = build["steps_seconds"][3:]
                row["ours"].append(
                    {"seconds": counted, "operations": build["operations_per_step"], "bytes": build["program_bytes"]}
                )
            for place in range(len(THEIRS[model])):
                left = options.budget - (time.monotonic() - begin)
                if any(one["place"] == place for one in row["failed"] if "place" in one):
                    continue
                written = out / f"{name}-theirs-{turn}-{place}.json"
                more = ["--small"] if options.small else []
                command = [sys.executable, __file__, "--theirs", name, str(place), "--steps", str(options.steps)]
                problem = run([*command, "--out", str(written), *more], environment(""), max(left, 1))
                if problem:
                    row["failed"].append({"trainer": "theirs", "place": place, "problem": problem})
                else:
                    row["theirs"].append({"place": place, **json.loads(written.read_text())})
        found[name] = {**row, **summary(row)}
        (out / "trainers.json").write_text(json.dumps(found, indent=1) + "\n")
        shown = {key: value for key, value in found[name].items() if key not in ("ours", "theirs")}
        print(f"{name} ({time.monotonic() - begin:.0f} s): {json.dumps(shown)}", flush=True)
    return 0


def summary(row: dict[str, Any], peak: float = 989e12) -> dict[str, Any]:
    """Tokens per second and the share of the peak that our count of operations gives, for both."""
    if not row["ours"]:
        return {}
    operations = row["ours"][0]["operations"]
    medians = {"ours": statistics.median(second for one in row["ours"] for second in one["seconds"])}
    by_place: dict[int, list[float]] = {}
    for one in row["theirs"]:
        by_place.setdefault(one["place"], []).extend(one["seconds"])
    if by_place:
        place, medians["theirs"] = min(
            ((place, statistics.median(seconds)) for place, seconds in by_place.items()), key=lambda each: each[1]
        )
    said: dict[str, Any] = {f"{name}_tokens_per_second": round(TOKENS / seconds) for name, seconds in medians.items()} | {
        f"{name}_share": round(operations / seconds / peak, 4) for name, seconds in medians.items()
    }
    return said | ({"ratio": round(medians["theirs"] / medians["ours"], 3), "their_place": place} if by_place else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--rows", default=",".join(ROWS), help="some of them, in this order")
    parser.add_argument("--steps", type=int, default=9, help="of each process; the first three are not counted")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--budget", type=float, default=560, help="seconds; a process that they end is stopped")
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
