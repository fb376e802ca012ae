"""What the command line asks for, checked before anything is compiled. Every message names the option."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ejkernel_train.checkpoint import SIZES
from ejkernel_train.config import TrainConfig
from ejkernel_train.data import Packed, Source
from ejkernel_train.operations import choose
from ejkernel_train.step import check_mesh

_SAID = (
    *(
        "model",
        "size",
        "repeats",
        "float8",
        "seed",
        "batch",
        "length",
        "accumulate",
        "dtype",
        "kernels",
        "optimizer",
        "learning_rate",
        "warmup",
        "steps",
    ),
    *("weight_decay", "clip", "on_nonfinite"),
)
"""Fields of `TrainConfig` that a run's losses depend on."""


def check_processes(arguments: argparse.Namespace) -> None:
    """Raises:
    ValueError: --coordinator, --processes and --process do not fit.
    """
    if not arguments.coordinator:
        for name in ("processes", "process"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} is given without --coordinator")
        return
    host, _, port = arguments.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--coordinator is {arguments.coordinator!r}; write HOST:PORT")
    if (arguments.processes is None) != (arguments.process is None):
        raise ValueError("--processes and --process are given together, or neither is")
    if arguments.processes is not None:
        if arguments.processes < 1:
            raise ValueError(f"--processes is {arguments.processes}; give at least 1")
        if not 0 <= arguments.process < arguments.processes:
            raise ValueError(f"--process is {arguments.process}; give a number in [0, {arguments.processes})")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Those that are no fields of `TrainConfig`.

    Raises:
        ValueError: one is out of its range, or a file or folder cannot be used as it says.
    """
    if arguments.save_every < 1:
        raise ValueError(f"--save-every is {arguments.save_every}; give at least 1 step")
    if arguments.peak is not None and not 0 < arguments.peak < math.inf:
        raise ValueError(f"--peak is {arguments.peak}; give a finite number of operations per second above 0")
    if arguments.evaluate_every is not None and arguments.evaluate_every < 1:
        raise ValueError(f"--evaluate-every is {arguments.evaluate_every}; give at least 1 step")
    if arguments.evaluate_every is not None and arguments.held_out is None:
        raise ValueError("--evaluate-every needs --held-out, which says on what")
    if arguments.compare and arguments.held_out is not None:
        raise ValueError("one build is evaluated; leave out either --held-out or --compare")
    if isinstance(arguments.held_out, float) and not 0 < arguments.held_out < 1:
        raise ValueError(f"--held-out is {arguments.held_out}; give a share between 0 and 1, or a file or folder")
    if isinstance(arguments.held_out, Path) and not os.access(arguments.held_out, os.R_OK):
        raise ValueError(f"--held-out {arguments.held_out} is no file or folder that can be read")
    if arguments.compare and arguments.checkpoints:
        raise ValueError("--checkpoints are of one build; leave out either it or --compare")
    if arguments.source:
        for name, clashes in {"compare": arguments.compare, "repeats": arguments.repeats}.items():
            if clashes:
                raise ValueError(f"--from has its own sizes and weights; leave out either it or --{name}")
        if not arguments.data:
            raise ValueError("--from is of a model with its own tokens; give documents with --data")
    if arguments.data and arguments.text:
        raise ValueError("--data are documents and --text is one text; give one of them")
    for path in arguments.data:
        if not os.access(path, os.R_OK):
            raise ValueError(f"--data {path} is no file or folder that can be read")
    for file in arguments.text:
        if not file.is_file() or not os.access(file, os.R_OK):
            raise ValueError(f"--text {file} is no file that can be read")
    if arguments.out:
        _check_folder("--out", arguments.out.absolute().parent)
        if arguments.out.is_dir() or (arguments.out.exists() and not os.access(arguments.out, os.W_OK)):
            raise ValueError(f"--out {arguments.out} is no file that can be written")
    if arguments.checkpoints:
        _check_checkpoints(arguments.checkpoints)


def check_configs(configs: Sequence[TrainConfig], tokens: Source) -> None:
    """Raises:
    ValueError: too little text, an unknown operation, or a mesh that does not fit the batch or the model.
    """
    first = configs[0]
    if not isinstance(tokens, Packed) and len(tokens) <= first.length:
        raise ValueError(
            f"--length is {first.length}, and a window needs a token more; the text has {len(tokens)}: give more with --text"
        )
    if (largest := int(np.max(tokens.tokens if isinstance(tokens, Packed) else tokens))) >= first.sizes.vocabulary:
        raise ValueError(f"the text has the token {largest}, and the model knows {first.sizes.vocabulary}")
    for config in configs:
        choose(config.kernels, config.plain)
        check_mesh(config)


def settings(config: TrainConfig, tokens: Source) -> dict[str, Any]:
    """By option, all that a run's losses depend on."""
    found: dict[str, Any] = {f"--{name.replace('_', '-')}": getattr(config, name) for name in _SAID}
    arrays = [np.ascontiguousarray(each) for each in (tokens if isinstance(tokens, Packed) else (tokens,))]
    digest = hashlib.sha256(b"".join(each.tobytes() for each in arrays)).hexdigest()
    text = f"{arrays[0].size} tokens, SHA-256 {digest[:16]}"
    sizes = json.loads(json.dumps(dataclasses.asdict(config.sizes)))  # as they are read again
    return {**found, "--plain": ",".join(config.plain), "--data" if config.packed else "--text": text, SIZES: sizes}


def _check_checkpoints(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--checkpoints {folder} is a file; give a folder")
    if folder.is_dir():
        _check_folder("--checkpoints", folder)
        return
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    _check_folder("--checkpoints", there)


def _check_folder(option: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{option}: {folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: {folder} cannot be written to")
