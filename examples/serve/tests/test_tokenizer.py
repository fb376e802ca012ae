"""Tokens of tokenizers: against what the package itself decodes, and against every place where a text can end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import KINDS, LINES, MARKS, byte_level, write

from ejkernel_serve import tokenizer
from ejkernel_serve.__main__ import main
from ejkernel_serve.stops import StopMatcher
from ejkernel_serve.text import TextStream
from ejkernel_serve.vocabulary import BYTES, Vocabulary

TEXTS = ["The quick fox", " two  spaces", "Größe 中文 🙂🙃!", '{"a": [1, 2]}\n\n', "x"]


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Vocabulary]:
    """A tokenizer, and what is read of its folder."""
    made, folder = KINDS[request.param](), tmp_path_factory.mktemp("folder")
    write(folder, made)
    return made, tokenizer.load(folder, 10**6)


def streamed(
    vocabulary: Vocabulary, tokens: list[int], stop: str = "", *, begins: bool = False
) -> tuple[list[str], list[int], list[int]]:
    """The pieces of a request that ends when its tokens do, or at the stop; the certain tokens, and their offsets."""
    stops = (tuple(stop.encode()),) if stop else ()
    stream, matcher = TextStream(stops, vocabulary, begins=begins), StopMatcher(stops, vocabulary.stop_spelling)
    pieces, certain = list[str](), list[int]()
    for place, token in enumerate(tokens, 1):
        matcher.feed(token)
        reason = "stop" if matcher.matched or token in vocabulary.ends else "length" if place == len(tokens) else None
        piece = stream.feed(token, reason)
        pieces.append(piece.text)
        certain += piece.tokens
        if reason:
            break
    return pieces, certain, stream.offsets


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.unsampled
def test_texts_and_back(loaded: tuple[Any, Vocabulary], text: str):
    made, vocabulary = loaded
    tokens = vocabulary.encode(text)
    assert tokens[0] == made.token_to_id("<s>") == vocabulary.first
    assert vocabulary.encode_text(text) == tuple(made.encode(text, add_special_tokens=False).ids)
    decoded = made.decode(tokens)
    assert vocabulary.text(tokens) == decoded
    if made.token_to_id("<unk>") not in tokens:
        assert decoded.lstrip(" ") == text.lstrip(" ")  # a space at the beginning may be the one that is put there
    pieces, certain, offsets = streamed(vocabulary, [*tokens], begins=True)
    assert "".join(pieces) == decoded and tuple(certain) == tokens
    assert not any("\ufffd" in piece for piece in pieces)
    for token, offset in zip(certain, offsets, strict=True):
        begins = vocabulary.spelling[token].lstrip(b" ")
        if begins and begins[0] < 128:
            assert decoded[offset:].lstrip(" ").startswith(chr(begins[0]))


def test_any_tokens(loaded: tuple[Any, Vocabulary]):
    """Also such as no text becomes, among them halves of characters and marks."""
    made, vocabulary = loaded
    random = np.random.default_rng(0)
    for size in range(1, 40):
        tokens = random.integers(0, vocabulary.size, size).tolist()
        skipped = [token for token in tokens if token not in vocabulary.ends]
        spelt = b"".join(vocabulary.spelling[token] for token in tokens)
        pieces, certain, _ = streamed(vocabulary, skipped)
        assert certain == skipped and "".join(pieces) == spelt.decode(errors="replace")
        if "\ufffd" not in spelt.decode(errors="replace"):
            assert vocabulary.text(tokens) == made.decode(tokens)


def test_what_comes_after_a_prompt_keeps_its_space(loaded: tuple[Any, Vocabulary]):
    made, vocabulary = loaded
    whole = made.encode("The quick fox", add_special_tokens=False).ids
    for cut in range(1, len(whole)):
        pieces, _, _ = streamed(vocabulary, whole[cut:])
        assert vocabulary.text(whole[:cut]) + "".join(pieces) == "The quick fox"


@pytest.mark.parametrize("begin", [0, 3, 8])
@pytest.mark.unsampled
def test_stops_begin_and_end_anywhere(loaded: tuple[Any, Vocabulary], begin: int):
    _, vocabulary = loaded
    text = "quick brown foxes jump over dogs"
    tokens = [*vocabulary.encode_text(text)]
    text = "".join(streamed(vocabulary, tokens)[0])
    for end in range(begin + 1, len(text)):
        stop = text[begin:end]
        pieces, certain, offsets = streamed(vocabulary, tokens, stop)
        assert "".join(pieces) == text.partition(stop)[0]
        assert certain == tokens[: len(certain)] and all(offset < text.index(stop) for offset in offsets)
        assert sum(len(vocabulary.spelling[token]) for token in certain) >= text.index(stop)


def test_a_stop_that_never_comes_is_held_back_and_shown(loaded: tuple[Any, Vocabulary]):
    _, vocabulary = loaded
    tokens = [*vocabulary.encode_text("the dog does")]
    pieces, certain, _ = streamed(vocabulary, tokens, "dog does not")
    assert "".join(pieces).strip() == "the dog does" and certain == tokens
    assert pieces[-1].endswith("dog does")


def test_every_end_ends(loaded: tuple[Any, Vocabulary]):
    made, vocabulary = loaded
    assert vocabulary.ends == {made.token_to_id("</s>"), made.token_to_id("<|end|>")}
    (word,) = vocabulary.encode_text("x")[-1:]
    for end in vocabulary.ends:
        assert streamed(vocabulary, [word, end, word])[1] == [word]


def test_names(loaded: tuple[Any, Vocabulary]):
    made, vocabulary = loaded
    assert [vocabulary.name(made.token_to_id(mark)) for mark in MARKS] == MARKS
    for token in range(vocabulary.size):
        name, spelt = vocabulary.name(token), vocabulary.spelling[token]
        assert spelt in (b"", name.encode()) or name == "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


def test_added_tokens_that_are_text(tmp_path: Path):
    made = byte_level()
    write(tmp_path, made)
    vocabulary = tokenizer.load(tmp_path, 10**6)
    tokens = vocabulary.encode_text("<think>a  b")
    assert made.token_to_id("<think>") in tokens and made.token_to_id("  ") in tokens
    assert vocabulary.text(tokens) == "<think>a  b"


def test_marks_of_a_folder(tmp_path: Path):
    """What `generation_config.json` says goes before `config.json`; marks that `tokenizer_config.json` does not name have ids."""
    made = byte_level()
    write(tmp_path, made)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "bos_token_id": 1, "eos_token_id": 2}))
    vocabulary = tokenizer.load(tmp_path, 10**6)
    assert vocabulary.ends == {2} and vocabulary.variables == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
    assert tokenizer.load(tmp_path, 10**6).variables == {"eos_token": "</s>"}
    for said, first in ((True, 1), (None, 1), (False, made.token_to_id("x"))):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": said}))
        assert tokenizer.load(tmp_path, 10**6).encode("x")[0] == first
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert tokenizer.load(tmp_path, 10**6).ends == {5}
    assert tokenizer.load(tmp_path, 50).size == 50


@pytest.mark.parametrize("written", ["list", "file", "none"])
def test_templates_of_a_folder(tmp_path: Path, written: str):
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    settings = {"chat_template": None if written == "none" else templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if written == "file":
        (tmp_path / "chat_template.jinja").write_text("of its own")
    assert tokenizer.template_of(tmp_path) == {"list": "yes", "file": "of its own", "none": None}[written]


def test_folders_without_a_tokenizer_have_bytes(tmp_path: Path):
    assert tokenizer.load(tmp_path, 264) is BYTES


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "the decoder .*WordPiece.* cannot be followed; only those of byte-level",
        ),
        (
            {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "Strip.* cannot be followed",
        ),
        (None, "the decoder null cannot be followed"),
    ],
)
@pytest.mark.unsampled
def test_decoders_that_look_at_neighbours_are_refused(tmp_path: Path, decoder: Any, message: str):
    fields = json.loads(byte_level().to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**fields, "decoder": decoder}))
    with pytest.raises(ValueError, match=message):
        tokenizer.load(tmp_path, 1000)


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def refused() -> str:
        assert main(["--model-folder", str(tmp_path), "--port", "0"]) == 2
        return capsys.readouterr().err

    write(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    assert "tokenizer_config.json holds no object" in refused()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    assert "the chat template is no template" in refused()
    (tmp_path / "tokenizer_config.json").unlink()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "tokenizers", None)
        assert "tokenizers" in (said := refused()) and said.endswith("pip install ejkernel-serve[public]\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert f"{tmp_path / 'tokenizer.json'}: " in refused()
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    assert "it has tokenizer.model and no tokenizer.json" in refused()


def test_half_a_surrogate_pair(loaded: tuple[Any, Vocabulary]):
    with pytest.raises(ValueError, match="surrogates not allowed"):
        loaded[1].encode("\ud800")


def test_lines_are_whole_words(loaded: tuple[Any, Vocabulary]):
    """Training has merged something, so that what is tested has tokens of several bytes."""
    assert len(loaded[1].encode_text(LINES[0])) < 0.8 * len(LINES[0])
