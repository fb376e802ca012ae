"""Batches of bytes of real text. A batch depends on the seed and the number of its step alone, so a resumed run sees the same."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

START = 256
"""The token before a document."""


def load(files: Sequence[Path] = ()) -> np.ndarray:
    """The tokens of text files, one document each; by default of the help texts that every Python brings, some 490 kB."""
    documents = [path.read_bytes() for path in files] or [text.encode() for text in pydoc_data.topics.topics.values()]
    parts = [np.frombuffer(document, np.uint8).astype(np.int32) for document in documents]
    return np.concatenate([np.concatenate([[START], part]) for part in parts]).astype(np.int32)


def batch(tokens: np.ndarray, seed: int, step: int, size: int, length: int) -> np.ndarray:
    """`[size, length + 1]`: windows of the text at random places; the labels are the tokens one later."""
    if len(tokens) <= length:
        raise ValueError(f"the text has {len(tokens)} tokens, and a window needs {length + 1}; give more with --text")
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - length, size)
    return tokens[starts[:, None] + np.arange(length + 1)]
