"""Public models' folders with tokenizers of their own: small ones, trained on a few lines, and random weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from ejkernel_train import public
from ejkernel_train.config import MODELS
from ejkernel_train.model import Model

pytest.importorskip("safetensors", reason="runs where safetensors is installed")
tokenizers: Any = pytest.importorskip("tokenizers", reason="runs where tokenizers is installed")

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.\n\n",
    '{"kind": "red", "counts": [1, 2, 30], "sure": true}\n',
    "Größe, naïve café; 中文 und 🙂🙃 sind Zeichen.\n",
    "def double(number):\n    return 2 * number\n",
] * 4
MARKS = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}{% generation %}<|assistant|>{% endgeneration %}"
)


def byte_level() -> Any:
    """As Llama 3's and Qwen's; writes a mark before documents."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    made.add_tokens(["<think>", "  "])  # that are text
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def unigram() -> Any:
    """As SentencePiece's, with a space before the first word; bytes are not among its tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(vocab_size=170, special_tokens=MARKS, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(LINES, trainer)
    return made


def with_fallback() -> Any:
    """As Llama 2's: BPE over words after U+2581, and characters that it does not know as bytes."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    known = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    known.normalizer = _marked_spaces()
    latin = [line for line in LINES if line.isascii()]
    known.train_from_iterator(latin, tokenizers.trainers.BpeTrainer(vocab_size=120, special_tokens=MARKS, show_progress=False))
    model = json.loads(known.to_str())["model"]
    pieces = [*MARKS, *fallback, *(piece for piece in model["vocab"] if piece not in MARKS)]
    merges = [tuple(pair) for pair in model["merges"]]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = _marked_spaces()
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(MARKS)
    return made


def _marked_spaces() -> Any:
    normalizers = tokenizers.normalizers
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


KINDS = {"byte_level": byte_level, "unigram": unigram, "with_fallback": with_fallback}


def write(folder: Path, tokenizer: Any, *, spare: int = 7) -> Model:
    """A model with so many tokens more than the tokenizer, its files, and what a chat model's folder says of marks."""
    config = dataclasses.replace(MODELS["llama"]["tiny"], vocabulary=tokenizer.get_vocab_size() + spare)
    made = Model(config, jax.random.key(1))
    public.save(made, folder, "float32")
    tokenizer.save(str(folder / public.TOKENIZER))
    ends = [tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<|end|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made
