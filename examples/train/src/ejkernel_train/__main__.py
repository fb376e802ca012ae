"""`python -m ejkernel_train`: train a model, or compare its builds."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ejkernel_train import checks, data, public, report
from ejkernel_train.checkpoint import Checkpoints
from ejkernel_train.config import DEFAULTS, MODELS, TrainConfig
from ejkernel_train.evaluate import Evaluated
from ejkernel_train.finite import NotFiniteError
from ejkernel_train.operations import MODULES, Operations


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("ejkernel_train", description=__doc__)
    add = found.add_argument
    add("--model", choices=list(MODELS), default="llama")
    add("--size", choices=list(DEFAULTS), default="tiny")
    add("--kernels", choices=list(MODULES), default="ejkernel", help="ejkernel's, plain JAX, or the best of others")
    add("--plain", default="", metavar="NAMES", help=f"operations to leave in plain JAX, of {','.join(Operations._fields)}")
    add(
        "--compare",
        nargs="?",
        const="plain,ejkernel",
        metavar="BUILDS",
        help=f"hold builds against the first of them and time them in turns, of {','.join(MODULES)}; default: plain,ejkernel",
    )
    add("--rounds", type=int, help="steps of each build that --compare times; default: --steps")
    add("--steps", type=int)
    add("--batch", type=int, help="sequences of a step")
    add("--repeats", type=int, help="of the model's pattern of blocks, for fewer or more layers than the size has")
    add("--length", type=int, help="tokens of a sequence")
    add("--accumulate", type=int, metavar="PARTS", help="cut a step's sequences into parts, and sum their gradients")
    add("--seed", type=int)
    add("--optimizer", choices=["adamw", "muon"], help="of the matrices of blocks; all else is AdamW's")
    add("--learning-rate", type=float)
    add("--warmup", type=int)
    add("--dtype", choices=["bfloat16", "float32"], help="of products and activations")
    add("--float8", "--fp8", action="store_true", help="large linear layers multiply in float8 with delayed scales")
    add("--remat", choices=["none", "dots", "full"], help="what the backward computes again")
    add("--layers", choices=["scan", "unroll"], help="compile one repeat of the blocks, or all")
    add(
        "--on-nonfinite", choices=["stop", "skip"], help="a step whose loss or gradient is NaN ends the run (3), or is left out"
    )
    add("--mesh", help='devices of each axis, as "data=2,fsdp=2,tensor=2"')
    add("--coordinator", metavar="HOST:PORT", help="of a run of several processes, which all get the same command")
    add("--processes", type=int, help="how many, with --coordinator; a cluster that JAX knows needs neither this nor --process")
    add("--process", type=int, help="which one this is, from 0")
    add("--text", type=Path, nargs="+", default=(), metavar="FILE", help="what to learn; default: the help texts of Python")
    add(
        "--data",
        type=Path,
        nargs="+",
        default=(),
        metavar="PATH",
        help="files or folders of documents, packed into rows; not --text",
    )
    add(
        "--held-out",
        type=share_or_path,
        metavar="SHARE|PATH",
        help="evaluate on a share of what there is to learn, or on other files",
    )
    add("--evaluate-every", type=int, metavar="STEPS", help="on what is held out; default: after the last step")
    add(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help="begin with a public model's config.json and safetensors instead of --model and --size",
    )
    add("--checkpoints", type=Path, metavar="FOLDER", help="save the run there, and go on from what is there")
    add("--save-every", type=int, default=100, metavar="STEPS")
    add("--peak", type=float, help="operations per second of a device, which the share is of; default: its dense bfloat16")
    add("--out", type=Path, help="write the record as JSON")
    return found


def configure(arguments: argparse.Namespace) -> list[TrainConfig]:
    """One config for each build; what the command line does not say has the size's default."""
    names = {field.name for field in dataclasses.fields(TrainConfig)} - {"plain"}
    given: dict[str, Any] = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    plain = tuple(name for name in arguments.plain.split(",") if name)
    given = {**DEFAULTS[arguments.size], **given, "plain": plain, "packed": bool(arguments.data)}
    if arguments.source:
        given["given"] = public.read_config(arguments.source)
    config = TrainConfig(**given)
    if not arguments.compare:
        return [config]
    builds = arguments.compare.split(",")
    if unknown := sorted({*builds} - {*MODULES}):
        raise ValueError(f"--compare has {', '.join(unknown)}; name builds of {', '.join(MODULES)}")
    return [dataclasses.replace(config, kernels=name, plain=plain if name == "ejkernel" else ()) for name in builds]


def share_or_path(text: str) -> float | Path:
    try:
        return float(text)
    except ValueError:
        return Path(text)


def load(arguments: argparse.Namespace, length: int) -> tuple[data.Source, data.Source | None]:
    """What is learnt, and what is held out."""
    apart = arguments.held_out
    if not arguments.data:
        learnt, held = data.load(arguments.text), None
        if isinstance(apart, float):
            learnt, held = data.without(learnt, apart)
        elif apart is not None:
            held = data.load(data.files_of(apart))
        if held is not None and len(held) < 2:
            raise ValueError(f"--held-out {apart} has {len(held)} tokens; give at least 2")
        return learnt, held
    encoding = public.encoding(arguments.source) if arguments.source else data.BYTES
    found, held = data.documents(arguments.data, encoding), None
    if isinstance(apart, float):
        found, held = data.without(found, apart)
        if not held:
            raise ValueError(f"--held-out is {apart} of {len(found)} documents; give more")
    elif apart is not None:
        held = data.documents([apart], encoding)
    return data.pack(found, length), None if held is None else data.pack(held, length)


def show(record: dict[str, Any]) -> None:
    print(f"{record['parameters'] / 1e6:.1f}M parameters on {record['devices']} x {record['device']}")
    for build in record["builds"]:
        share = build["share_of_peak"]
        stages = " + ".join(f"{build[f'{stage}_seconds']:.2f}" for stage in ("trace", "lower", "compile"))
        print(
            f"{build['kernels']:>8}: {build['tokens_per_second']:,.0f} tokens/s"
            + (f", {share:.1%} of {record['peak_operations_per_second'] / 1e12:.0f} TFLOP/s each" if share else "")
            + f", {(build['program_bytes'] or 0) / 2**30:.2f} GiB; trace + lower + compile {stages} s; "
            f"loss {_loss(build['losses'][0])} -> {_loss(build['losses'][-1])}"
        )
        if not (held := build.get("agreement", {"agrees": True}))["agrees"]:
            print(f"{build['kernels']:>8}: NOT what {held['with']} computes: {held}")
    for build in record.get("failed", ()):
        print(f"{build['kernels']:>8}: failed, {build['error']}")


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        checks.check_processes(arguments)
        if arguments.coordinator:
            jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process)
        checks.check_arguments(arguments)
        configs = configure(arguments)
        tokens, held_out = load(arguments, configs[0].length)
        checks.check_configs(configs, tokens)
        with _checkpoints(arguments.checkpoints, checks.settings(configs[0], tokens)) as checkpoints:
            record = report.run(
                configs,
                tokens,
                peak=arguments.peak,
                rounds=arguments.rounds,
                progress=_progress(configs[0].steps),
                checkpoints=checkpoints,
                save_every=arguments.save_every,
                held_out=held_out,
                evaluate_every=arguments.evaluate_every,
                evaluated=_say_evaluated,
                model=public.load(arguments.source, float8=configs[0].float8) if arguments.source else None,
            )
    except NotFiniteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if jax.process_index():
        return 0  # the first process speaks for all
    show(record)
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(build.get("agreement", {"agrees": True})["agrees"] for build in record["builds"]))


def _checkpoints(folder: Path | None, settings: dict[str, Any]) -> contextlib.AbstractContextManager[Checkpoints | None]:
    """Raises:
    ValueError: Orbax is not installed.
    """
    if folder is None:
        return contextlib.nullcontext()
    try:
        return Checkpoints(folder, settings=settings)
    except ImportError as error:
        raise ValueError(f"--checkpoints: {error}; pip install ejkernel-train[checkpoints]") from None


def _say_evaluated(found: Evaluated) -> None:
    if not jax.process_index():
        text = (
            f"step {found.step:>5}  held out: loss {found.loss:.4f}, perplexity {found.perplexity:.2f}, {found.labels} labels"
        )
        print(text, flush=True)


def _progress(steps: int) -> Any:
    def write(step: int, losses: Sequence[float]) -> None:
        if (step == 1 or step == steps or not step % 10) and not jax.process_index():
            print(f"step {step:>5}  loss " + "  ".join(f"{loss:.4f}" for loss in losses), flush=True)

    return write


if __name__ == "__main__":
    sys.exit(main())
