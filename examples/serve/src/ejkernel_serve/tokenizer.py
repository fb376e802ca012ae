"""The tokenizer of a public model's folder, by the package `tokenizers`: what its `tokenizer.json` and the files beside it say.

The bytes of a token must not depend on those around it, so that a text can be written while it grows: decoders of byte-level BPE
and of SentencePiece, which is what the models here have. Needs `pip install ejkernel-serve[public]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ejkernel_serve.vocabulary import BYTES, Vocabulary
from ejkernel_train.public import CONFIG, TOKENIZER

SETTINGS, GENERATION, TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"

OTHER_FORMATS = ("tokenizer.model", "vocab.json", "tekken.json")
"""Of tokenizers that are not read, in folders without a `tokenizer.json`."""

MARKS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load(folder: Path, possible: int) -> Vocabulary:
    """The tokens of a folder, of which its model has so many; bytes if no file says otherwise.

    Raises:
        ValueError: a file cannot be read, or says what cannot be followed.
        ImportError: the package `tokenizers` is missing.
    """
    if not (folder / TOKENIZER).is_file():
        if found := [name for name in OTHER_FORMATS if (folder / name).is_file()]:
            raise ValueError(
                f"it has {found[0]} and no {TOKENIZER}, which `AutoTokenizer.save_pretrained` of transformers writes"
            )
        return BYTES
    from tokenizers import Tokenizer

    try:
        tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER))
        decoder = _fields(folder / TOKENIZER).get("decoder")
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{folder / TOKENIZER}: {error}") from error
    settings, config, generation = (_fields(folder / name) for name in (SETTINGS, CONFIG, GENERATION))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    marks = {name: text for name in MARKS if (text := _text(settings.get(name))) is not None}
    tokenizer.add_special_tokens([text for text in marks.values() if tokenizer.token_to_id(text) is not None])
    ends = {
        *_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        tokenizer.token_to_id(marks.get("eos_token", "")),
    }
    ends = {end for end in ends if end is not None and end < possible}
    start = tokenizer.token_to_id(marks.get("bos_token", ""))
    if "bos_token" not in settings:
        start = next(iter(_ids(generation.get("bos_token_id", config.get("bos_token_id")))), None)
    for name, token in (("bos_token", start), ("eos_token", min(ends, default=None))):
        if name not in settings and token is not None and (text := tokenizer.id_to_token(token)) is not None:
            marks[name] = text
    try:
        return Tokens(tokenizer, possible, ends, start, settings.get("add_bos_token"), marks, _Decoder(decoder))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / TOKENIZER}: {error}") from error


def template_of(folder: Path) -> str | None:
    """The folder's chat template, None if it has none.

    Raises:
        ValueError: a file cannot be read.
    """
    try:
        if (folder / TEMPLATE).is_file():
            return (folder / TEMPLATE).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / TEMPLATE}: {error}") from error
    found = _fields(folder / SETTINGS).get("chat_template")
    if isinstance(found, list):
        named: list[Any] = found
        found = next((each.get("template") for each in named if isinstance(each, dict) and each.get("name") == "default"), None)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return found if isinstance(found, str) else None


class Tokens(Vocabulary):
    """The tokens of a tokenizer. Special ones are no text."""

    def __init__(
        self,
        tokenizer: Any,
        possible: int,
        ends: set[int],
        start: int | None,
        starts: bool | None,
        marks: Mapping[str, str],
        decoder: _Decoder,
    ) -> None:
        """`start`: what a document begins with. `starts`: whether it does; None: as the tokenizer writes it."""
        special = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        size = min(1 + max(tokenizer.get_vocab().values(), default=0), possible)
        texts = [None if token in special else tokenizer.id_to_token(token) for token in range(size)]
        spelling = [b"" if text is None else decoder.spell(text) for text in texts]
        super().__init__(spelling, ends, f"tokens in [0, {size})", stop_spelling=spelling, variables=marks)
        self._tokenizer, self._special, self._decoder = tokenizer, special, decoder
        self._start, self._marks = (start if starts else None), starts is not False

    @property
    def first(self) -> int:
        return next(iter(self.encode("")), 0)

    def encode(self, text: str) -> tuple[int, ...]:
        text.encode()  # raises a ValueError of half a surrogate pair
        found = tuple(self._tokenizer.encode(text, add_special_tokens=self._marks).ids)
        return found if self._start is None or found[:1] == (self._start,) else (self._start, *found)

    def encode_text(self, text: str) -> tuple[int, ...]:
        text.encode()
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def spelt(self, token: int, *, first: bool) -> bytes:
        return self._decoder.begin(self.spelling[token]) if first else self.spelling[token]

    def name(self, token: int) -> str:
        return super().name(token) if self.spelling[token] else self._special.get(token, f"token_id:{token}")


class _Decoder:
    """What `decoder` of a `tokenizer.json` makes of a token.

    Attributes:
        begin: what becomes of the first bytes of a document, in which the space that the tokenizer put there is left out.
    """

    def __init__(self, decoder: Any) -> None:
        """Raises:
        ValueError: the bytes of a token depend on others.
        """
        parts: list[Any] = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
        self.begin: Callable[[bytes], bytes] = bytes
        self._replaced: list[tuple[str, str]] = []
        self._bytes: dict[str, int] = {}
        self._fallback = False
        fused = False
        for part in parts:
            match part:
                case {"type": "ByteLevel"} if len(parts) == 1:
                    self._bytes = _byte_characters()
                case {"type": "Metaspace", "replacement": mark}:
                    self._replaced.append((mark, " "))
                    if part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space", True):
                        self.begin = lambda spelt: spelt.replace(b" ", b"")
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    self._replaced.append((old, new))
                case {"type": "ByteFallback"}:
                    self._fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fused:
                    self.begin = (lambda spelt: spelt.removeprefix(b" ")) if start else bytes
                case _:
                    raise ValueError(
                        f"the decoder {json.dumps(part)} cannot be followed; only those of byte-level BPE and SentencePiece"
                    )

    def spell(self, text: str) -> bytes:
        if self._bytes:
            known = self._bytes
            return bytes(known[each] for each in text) if all(each in known for each in text) else text.encode()
        if self._fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            return bytes.fromhex(text[3:5])
        for old, new in self._replaced:
            text = text.replace(old, new)
        return text.encode()


def _byte_characters() -> dict[str, int]:
    """The byte of each character of byte-level BPE: printable ones of Latin-1 are themselves, others follow from U+0100 on.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019, and the code that came with it.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _fields(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no file.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object")
    return found  # pyright: ignore[reportUnknownVariableType]


def _text(mark: Any) -> str | None:
    """Of a special token, which files write as its text or as an object."""
    text = mark.get("content") if isinstance(mark, dict) else mark  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return text if isinstance(text, str) else None


def _ids(given: Any) -> list[int]:
    return [each for each in (given if isinstance(given, list) else [given]) if type(each) is int]  # pyright: ignore[reportUnknownVariableType]
