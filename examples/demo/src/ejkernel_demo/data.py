"""The text that the demo learns from, and the order in which it is read."""

from __future__ import annotations

import importlib.resources

import numpy as np

TITLE = "The Devil's Dictionary, Ambrose Bierce, 1911 (public domain)"
VOCABULARY = 256


def load_text() -> bytes:
    """The shipped text; see `text/PROVENANCE.md` for where it comes from."""
    return importlib.resources.files("ejkernel_demo").joinpath("text/devils_dictionary.txt").read_bytes()


def batches(text: bytes, *, seed: int, steps: int, batch: int, length: int) -> np.ndarray:
    """Random windows of the text, `[steps, batch, length + 1]` bytes as int32; the same for the same seed."""
    data = np.frombuffer(text, np.uint8)
    starts = np.random.default_rng(seed).integers(0, len(data) - length, size=(steps, batch))
    return data[starts[..., None] + np.arange(length + 1)].astype(np.int32)
