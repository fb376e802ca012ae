"""What is learnt, as batches: windows of one long text, or documents that are packed into rows.

A batch depends on the seed and the number of its step alone, so a resumed run sees the same, on however many devices.
"""

from __future__ import annotations

import bisect
import json
import pydoc_data.topics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

START = 256
"""The token before a document, which ends the one before."""

IGNORED = -100
"""The label of a token after which nothing is predicted."""


class Encoding(NamedTuple):
    """How text becomes tokens, and what stands before and after a document."""

    encode: Callable[[str], Sequence[int]]
    start: tuple[int, ...]
    end: tuple[int, ...]


BYTES = Encoding(lambda text: text.encode(errors="surrogateescape"), (START,), (START,))


class Document(NamedTuple):
    """Tokens, and whether each is learnt: one that is not, as of a prompt, is only read."""

    tokens: np.ndarray
    learnt: np.ndarray


class Packed(NamedTuple):
    """Rows of documents, int32 `[N, T]` each.

    Attributes:
        tokens: the documents of each row, one after the other.
        labels: the next token of the same document, or `IGNORED`.
        documents: which of its row each token is of, -1 after the last. None: a row is one text.
    """

    tokens: Any
    labels: Any
    documents: Any = None


Source: TypeAlias = "np.ndarray | Packed"
"""A text, whose windows are learnt, or packed documents."""


def load(files: Sequence[Path] = ()) -> np.ndarray:
    """The tokens of text files, one document each; by default of the help texts that every Python brings, some 490 kB."""
    documents = [path.read_bytes() for path in files] or [text.encode() for text in pydoc_data.topics.topics.values()]
    parts = [np.frombuffer(document, np.uint8).astype(np.int32) for document in documents]
    return np.concatenate([np.concatenate([[START], part]) for part in parts]).astype(np.int32)


def documents(paths: Sequence[Path], encoding: Encoding | None = BYTES) -> list[Document]:
    """Of files, and of all files in folders. Each line of a `.jsonl` file is a document, other files are one each.

    A line has `text`, or `prompt` and `completion`, of which the completion is learnt, or `tokens` and perhaps a `loss_mask`, 0 for
    each token that is only read.

    Raises:
        ValueError: a line that has none of these, or text without an encoding.
    """
    found: list[Document] = []
    for path in paths:
        for file in files_of(path):
            if file.suffix != ".jsonl":
                lines = [(0, file.read_bytes().decode(errors="surrogateescape"))]
            else:
                lines = [(number, line) for number, line in enumerate(file.read_bytes().split(b"\n"), 1) if line.strip()]
            for number, line in lines:
                try:
                    found.append(_of_line(encoding, json.loads(line)) if number else _document(encoding, "", str(line)))
                except ValueError as error:
                    raise ValueError(f"--data {file}{f', line {number}' if number else ''}: {error}") from None
    return found


def files_of(path: Path) -> list[Path]:
    """The file, or all files of a folder."""
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _of_line(encoding: Encoding | None, line: Any) -> Document:
    fields: dict[str, Any] = cast("dict[str, Any]", line) if isinstance(line, dict) else {}
    match fields:
        case {"text": str(text)}:
            return _document(encoding, "", text)
        case {"prompt": str(prompt), "completion": str(completion)}:
            return _document(encoding, prompt, completion)
        case {"tokens": [*tokens]} if all(type(token) is int and 0 <= token < 2**31 for token in tokens):
            learnt = fields.get("loss_mask", [1] * len(tokens))
            if not isinstance(learnt, list) or len(cast("list[Any]", learnt)) != len(tokens):
                raise ValueError(f"loss_mask is not a list of {len(tokens)} numbers, one for each token")
            return Document(np.array(tokens, np.int32), np.array(learnt, bool))
        case _:
            raise ValueError("give an object with text, with prompt and completion, or with tokens")


def _document(encoding: Encoding | None, prompt: str, text: str) -> Document:
    if encoding is None:
        raise ValueError("it is text, and the model has no tokenizer.json; give lines with tokens")
    read, learnt = [*encoding.start, *encoding.encode(prompt)], [*encoding.encode(text), *encoding.end]
    return Document(np.array(read + learnt, np.int32), np.arange(len(read) + len(learnt)) >= len(read))


def pack(documents: Sequence[Document], length: int) -> Packed:
    """Rows of `length` tokens. Each document is whole in one of them, but for longer ones, which are cut; the fullest row with
    room takes the next, the longest first.

    Raises:
        ValueError: no token is learnt.
    """
    pieces = sorted((piece for each in documents for piece in _cut(each, length)), key=lambda piece: -len(piece.tokens))
    if not pieces:
        raise ValueError("--data has no token that is learnt; the first of a document is only read")
    rows: list[list[Document]] = []
    room: list[tuple[int, int]] = []  # of rows that are not full, and their numbers; sorted
    for piece in pieces:
        size = len(piece.tokens) - 1
        at = bisect.bisect_left(room, (size, 0))
        if at == len(room):
            room.append((length, len(rows)))
            rows.append([])
        left, row = room.pop(at)
        rows[row].append(piece)
        if left > size:
            bisect.insort(room, (left - size, row))
    packed = Packed(*(np.full((len(rows), length), value, np.int32) for value in (0, IGNORED, -1)))
    for row, held in enumerate(rows):
        first = 0
        for number, (tokens, learnt) in enumerate(held):
            here = row, slice(first, first + len(tokens) - 1)
            packed.tokens[here], packed.documents[here] = tokens[:-1], number
            packed.labels[here] = np.where(learnt[1:], tokens[1:], IGNORED)
            first += len(tokens) - 1
    return packed


def _cut(document: Document, length: int) -> Iterator[Document]:
    """Pieces of at most `length` tokens and the label of the last, of which something is learnt."""
    for first in range(0, len(document.tokens) - 1, length):
        piece = Document(*(each[first : first + length + 1] for each in document))
        if piece.learnt[1:].any():
            yield piece


def windows(tokens: np.ndarray, length: int) -> Packed:
    """All of a text, in rows one after the other; the last is filled up."""
    missing = -(len(tokens) - 1) % length
    filled = np.pad(tokens[:-1], (0, missing)), np.pad(tokens[1:], (0, missing), constant_values=IGNORED)
    return Packed(*(each.astype(np.int32).reshape(-1, length) for each in filled))


Parts = TypeVar("Parts", np.ndarray, list[Document])


def without(source: Parts, share: float) -> tuple[Parts, Parts]:
    """What is left, and what is held out: the end of a text, or documents from everywhere."""
    if isinstance(source, list):
        held = {int(place / share) for place in range(round(len(source) * share))}
        return [one for at, one in enumerate(source) if at not in held], [source[at] for at in sorted(held)]
    last = len(source) - round(len(source) * share)
    return source[:last], source[last:]


def batch(source: Source, seed: int, step: int, size: int, length: int) -> Source:
    """Windows of a text at random places, `[size, length + 1]`: the labels are the tokens one later. Or so many rows of packed
    documents, each once before one comes again."""
    if isinstance(source, Packed):
        rounds, places = np.divmod(step * size + np.arange(size), len(source.tokens))
        orders = {
            number: np.random.default_rng((seed, number)).permutation(len(source.tokens)) for number in {*rounds.tolist()}
        }
        rows = np.array([orders[number][place] for number, place in zip(rounds.tolist(), places, strict=True)])
        return Packed(*(each[rows] for each in source))
    if len(source) <= length:
        raise ValueError(f"the text has {len(source)} tokens, and a window needs {length + 1}; give more with --text")
    starts = np.random.default_rng((seed, step)).integers(0, len(source) - length, size)
    return source[starts[:, None] + np.arange(length + 1)]
