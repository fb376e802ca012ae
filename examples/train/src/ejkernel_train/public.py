"""Models in the files that Hugging Face's `transformers` reads and writes: `config.json` and `.safetensors`, both ways.

Llama and Mistral, Qwen3, Mixtral and Qwen3's mixture, gpt-oss and Qwen3-Next. What these files can say and this package's model
cannot compute is refused, by the name of the field. Needs `pip install ejkernel-train[public]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_train.config import ModelConfig
from ejkernel_train.data import Encoding
from ejkernel_train.float8 import initial_scales
from ejkernel_train.model import Block, Model, restacked
from ejkernel_train.public_arrays import from_centred, from_mxfp4, stored
from ejkernel_train.public_config import CONFIG, fields_of, model_type, read_config

WEIGHTS, INDEX, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "tokenizer.json"


def _outer(model: Any) -> dict[str, Any]:
    """What is not of blocks; a head that is the embedding is in no file."""
    found = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    return found if model.head is None else {**found, "lm_head.weight": model.head}


def load(folder: Path, dtype: str = "float32", *, float8: bool = False) -> Model:
    """The model of a folder, its blocks stacked: matrices in `dtype`, vectors in float32.

    Raises:
        ValueError: as `read_config`, or an array is missing, has another shape, or is none of the model's.
    """
    config = read_config(folder)
    shapes: Any = jax.eval_shape(lambda: Model(config, jax.random.key(0), stacked=False))
    read, kind = _Files(folder), model_type(config)
    places = [_Place(config, block) for block in shapes.blocks[: len(config.pattern)]]

    def narrow(array: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(array, dtype if like.ndim > 1 else jnp.float32)

    def of_block(layer: int, block: Block) -> Block:
        found = places[layer % len(places)].read(read, f"model.layers.{layer}.")
        return jax.tree_util.tree_map_with_path(lambda path, like: narrow(found[jax.tree_util.keystr(path)], like), block)

    arrays = {name: read.tensor(name, like.shape) for name, like in _outer(shapes).items()}
    if kind == "qwen3_next":
        arrays["model.norm.weight"] = from_centred(arrays["model.norm.weight"])
    outer = {name: narrow(arrays[name], like) for name, like in _outer(shapes).items()}
    blocks = tuple(of_block(layer, block) for layer, block in enumerate(shapes.blocks))
    read.check_all_read(("lm_head.weight",) if config.tied else (), ("mtp.",) if kind == "qwen3_next" else ())
    parts = outer["model.embed_tokens.weight"], blocks, outer["model.norm.weight"], outer.get("lm_head.weight")
    model = eqx.tree_at(Model.parts, shapes, parts, is_leaf=lambda part: part is None)
    return _with_scales(restacked(model, True)) if float8 else restacked(model, True)


def _with_scales(model: Model) -> Model:
    """With the scales of float8 that a model of these weights begins with."""
    import dataclasses

    shapes: Any = jax.eval_shape(lambda: Model(dataclasses.replace(model.config, float8=True), jax.random.key(0)))
    weights = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}

    def leaf(path: Any, _: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        known = weights.get(name)
        return jax.vmap(initial_scales)(weights[name.removesuffix("scales") + "weight"]) if known is None else known

    return jax.tree_util.tree_map_with_path(leaf, shapes)


class _Place:
    """Where the parameters of a block are in files: of all blocks in one place of the pattern."""

    def __init__(self, config: ModelConfig, block: Block) -> None:
        likes = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(block)}
        self.stored = stored(config, [*likes])
        self._shapes = [jax.eval_shape(each.write, *(likes[path] for path in each.parameters)) for each in self.stored]

    def read(self, files: _Files, layer: str) -> dict[str, np.ndarray]:
        """By path."""
        found: dict[str, np.ndarray] = {}
        for each, shapes in zip(self.stored, self._shapes, strict=True):
            arrays = [files.tensor(layer + name, like.shape) for name, like in zip(each.names, shapes, strict=True)]
            found |= zip(each.parameters, each.read(*arrays), strict=True)
        return found


class _Files:
    """The arrays of a folder by name, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            if (folder / INDEX).is_file():
                files = sorted({*json.loads((folder / INDEX).read_text())["weight_map"].values()})
            else:
                files = [WEIGHTS]
            opened = [safe_open(folder / file, "np") for file in files]
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise ValueError(f"{folder} cannot be read: {error}") from error
        self._folder = folder
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 no mapping
        self._left = {*self._files}

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The array of this name, or of the two of MXFP4 that stand for it."""
        if name not in self._files and f"{name}_blocks" in self._files:
            experts, inputs, outputs = shape
            packed = experts, outputs, inputs // 32
            return from_mxfp4(self.tensor(f"{name}_blocks", (*packed, 16)), self.tensor(f"{name}_scales", packed))
        if name not in self._files:
            raise ValueError(f"{self._folder} has no {name}")
        found = self._files[name].get_tensor(name)
        if found.shape != shape:
            raise ValueError(f"{self._folder}: {name} is {list(found.shape)}, and {CONFIG} makes it {list(shape)}")
        self._left.discard(name)
        return found

    def check_all_read(self, others: tuple[str, ...], parts: tuple[str, ...]) -> None:
        """But for what is known to be there: names that end with `others`, and those that begin with `parts`."""
        known = ("rotary_emb.inv_freq", *others)
        if left := sorted(name for name in self._left if not name.endswith(known) and not name.startswith(parts)):
            raise ValueError(f"{self._folder} has {', '.join(left[:3])}, which the model of {CONFIG} has no place for")


def tensors(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """A model's arrays as files have them."""
    config = model.config
    kind, size = model_type(config), len(config.pattern)
    for name, array in _outer(model).items():
        yield name, np.asarray(array) - (1 if kind == "qwen3_next" and name == "model.norm.weight" else 0)
    for layer in range(config.layers):
        block = model.blocks[layer % size if model.stacked else layer]
        leaves = {
            jax.tree_util.keystr(path): np.asarray(leaf[layer // size] if model.stacked else leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(block)
        }
        for each in stored(config, [*leaves]):
            arrays = each.write(*(leaves[path] for path in each.parameters))
            yield from ((f"model.layers.{layer}.{name}", array) for name, array in zip(each.names, arrays, strict=True))


def save(model: Model, folder: Path, dtype: str = "bfloat16", *, length: int = 2048, most_bytes: int = 5 * 10**9) -> list[Path]:
    """Write `config.json` and the arrays, in several files with an index if they are more than `most_bytes`. Returns the files.

    Raises:
        ValueError: as `fields_of`.
    """
    from safetensors.numpy import save_file

    fields = fields_of(model.config, dtype, length)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    files: list[dict[str, str]] = []  # names of arrays, of each file
    held: dict[str, np.ndarray] = {}
    total = 0

    def write() -> None:
        save_file(held, folder / f"model-{len(files) + 1:05}.safetensors", metadata={"format": "pt"})
        files.append(dict.fromkeys(held, ""))
        held.clear()

    for name, array in tensors(model):
        narrow = np.ascontiguousarray(array, dtype=jnp.dtype(dtype))
        if held and sum(each.nbytes for each in held.values()) + narrow.nbytes > most_bytes:
            write()
        held[name], total = narrow, total + narrow.nbytes
    write()
    if len(files) == 1:
        return [(folder / "model-00001.safetensors").replace(folder / WEIGHTS)]
    paths: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        final = f"model-{number:05}-of-{len(files):05}.safetensors"
        paths.append((folder / f"model-{number:05}.safetensors").replace(folder / final))
        weight_map |= dict.fromkeys(names, final)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    return paths


def encoding(folder: Path) -> Encoding | None:
    """Of the folder's `tokenizer.json`, None if it has none. Documents end with the model's `eos_token_id`.

    Raises:
        ValueError: the file cannot be read, or the package `tokenizers` is missing.
    """
    if not (folder / TOKENIZER).is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(f"{folder / TOKENIZER}: {error}; pip install ejkernel-train[public]") from None
    try:
        tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:
        raise ValueError(f"{folder / TOKENIZER}: {error}") from error
    end = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("eos_token_id")
    ends = tuple(end[:1] if isinstance(end, list) else [] if end is None else [end])
    return Encoding(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, tuple(tokenizer.encode("").ids), ends)
