"""The model and the engine that a command line asks for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax

from ejkernel_serve import tokenizer
from ejkernel_serve.config import EngineConfig
from ejkernel_serve.engine import Engine
from ejkernel_serve.vocabulary import Vocabulary
from ejkernel_train import public
from ejkernel_train.checkpoint import Checkpoints, DamagedError
from ejkernel_train.config import DEFAULTS, TrainConfig
from ejkernel_train.model import Model
from ejkernel_train.resume import resume
from ejkernel_train.step import initialise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="what `ejkernel_train --checkpoints FOLDER` saved")
    source.add_argument(
        "--model-folder", type=Path, metavar="FOLDER", help="a public model, or what `ejkernel_train.export` wrote"
    )
    source.add_argument("--random", choices=list(DEFAULTS), metavar="SIZE", help="random weights of this size, to try it out")
    add("--model", choices=["llama", "moe", "hybrid"], default="llama")
    add("--size", choices=list(DEFAULTS), default="tiny", help="of the checkpoint's model")
    sizes = EngineConfig()
    add("--pages", type=int, default=sizes.pages, help="of the cache")
    add("--page-size", type=int, default=sizes.page_size, metavar="TOKENS")
    add("--max-length", type=int, default=sizes.max_length, metavar="TOKENS", help="of a request: prompt and completion")
    add("--max-requests", type=int, default=sizes.max_requests, help="that run at once")
    add("--max-waiting", type=int, default=sizes.max_waiting, help="that wait for that; more are refused")
    add("--buckets", type=int, nargs="+", default=list(sizes.buckets), metavar="TOKENS", help="of a step; one program for each")
    add("--burst", type=int, default=sizes.burst, metavar="TOKENS", help="that requests get from one program while all decode")
    add("--drafts", type=int, default=sizes.drafts, help="guesses of a request's next tokens that a step checks")
    add("--dtype", choices=["bfloat16", "float32"], default=sizes.dtype, help="of products and the cache")


def load_model(model: str, size: str, checkpoint: Path | None) -> Model:
    """With the weights of the newest checkpoint, or random ones.

    Raises:
        ValueError: there is no whole checkpoint in the folder, or it is of another model or size.
    """
    config = TrainConfig(model=model, size=size)
    if checkpoint is None:
        return Model(config.sizes, jax.random.key(0))
    if not checkpoint.is_dir():
        raise ValueError(f"--checkpoint {checkpoint} is no folder; give what ejkernel_train got as --checkpoints")
    try:
        opened = Checkpoints(checkpoint)
    except ImportError as error:
        raise ValueError(f"--checkpoint: {error}; pip install ejkernel-serve[checkpoints]") from None
    with opened as checkpoints:
        try:
            restored = resume(config, initialise(config), checkpoints)
        except DamagedError as error:
            raise ValueError(f"--checkpoint: {error}") from error
        except ValueError as error:
            raise ValueError(f"--checkpoint {checkpoint} is not of --model {model} --size {size}: {error}") from error
    if not int(restored.step):
        raise ValueError(f"--checkpoint {checkpoint} has no checkpoint")
    return restored.model


def load_folder(folder: Path, dtype: str) -> tuple[Model, Vocabulary]:
    """A model in public files and its tokens.

    Raises:
        ValueError: as `public.load` and `tokenizer.load`, or a package is missing.
    """
    try:
        vocabulary = tokenizer.load(folder, public.read_config(folder).vocabulary)
        return public.load(folder, dtype), vocabulary
    except ImportError as error:
        raise ValueError(f"--model-folder: {error}; pip install ejkernel-serve[public]") from None
    except ValueError as error:
        raise ValueError(f"--model-folder {folder}: {error}") from error


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    given: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("pages", "page_size", "max_length", "max_requests", "max_waiting", "burst", "drafts", "dtype")
    }
    return EngineConfig(**given, buckets=tuple(arguments.buckets))


def load_engine(arguments: argparse.Namespace) -> Engine:
    """Raises:
    ValueError: as `load_model`, or sizes that do not fit.
    """
    config = engine_config(arguments)
    if arguments.model_folder:
        model, vocabulary = load_folder(arguments.model_folder, config.dtype)
        return Engine(model, config, vocabulary)
    return Engine(load_model(arguments.model, arguments.random or arguments.size, arguments.checkpoint), config)


def name_of(arguments: argparse.Namespace) -> str:
    """Of the model, for clients."""
    if arguments.model_folder:
        return arguments.model_folder.resolve().name
    return f"{arguments.model}-{arguments.random or arguments.size}"
