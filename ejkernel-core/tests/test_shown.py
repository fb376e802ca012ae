"""What interactive sessions and notebooks show."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import jax
import numpy as np
import pytest

import ejkernel
from ejkernel import MaskInfo, kernel_registry

Q = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")


class Page(HTMLParser):
    """Text and pictures of a piece of HTML, all of whose tags are closed."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.labels: list[str | None] = []
        self.feed(code)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        assert tag not in ("script", "link", "img", "iframe", "style")
        if tag == "svg":
            assert dict(attrs)["role"] == "img"
            self.labels.append(dict(attrs)["aria-label"])

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += f"{data}\n"


def takes_the_colours_of_the_page(code: str) -> bool:
    colours = re.findall(r"(?:color|background|fill|stroke)[:=]\"?([^;\"]+)", code)
    return (
        bool(colours)
        and {*colours} <= {"inherit", "none", "currentColor"}
        and "http" not in code.replace("http://www.w3.org/2000/svg", "")
    )


def test_explanation(registered):
    registered("picky", supports=lambda call, target: "width <8> is odd", priority=10)
    registered("worse", priority=-10)
    explanation = ejkernel.explain("rms_norm", Q)
    first, *phases = repr(explanation).splitlines()
    assert first == "<Explanation: rms_norm on cpu"
    assert phases[0] == "  forward: xla (by priority); picky refused: width <8> is odd"
    assert phases[1].startswith("  backward: xla (by priority)") and len(phases) == 2
    assert repr(explanation.forward) == f"<Decision: rms_norm forward on cpu: {phases[0].removeprefix('  forward: ')}>"
    assert len(str(explanation).splitlines()) > 4
    code = explanation._repr_html_()
    assert "<8>" not in code and "width <8> is odd" in Page(code).text
    assert code.count("font-weight:bold") == 2 * 4


def test_explanation_of_what_nothing_runs(registered):
    for name in "abc":
        registered(name, supports=lambda call, target, name=name: name * 300)
    with ejkernel.use(forbid={"xla"}):
        shown = repr(ejkernel.explain("rms_norm", Q)).splitlines()
    assert shown[1].startswith("  forward: nothing; ") and re.search(r"; \d more$", shown[1])
    assert len(shown) == 3 and max(map(len, shown)) < 400


def test_registry(registered):
    registered("mine")
    lines = repr(kernel_registry).splitlines()
    assert re.fullmatch(r"<KernelRegistry: \d+ operations", lines[0])
    assert "  mine ((this process)): ok" in lines or "  mine (this process): ok" in lines
    assert len(lines) <= 2 + len(kernel_registry.records) + 1
    text = Page(kernel_registry._repr_html_()).text.split("\n")
    assert text[text.index("mine") :][3:5] == ["1", "1"]


def test_executor():
    assert repr(ejkernel.Executor()) == "Executor()"
    assert repr(ejkernel.Executor(ejkernel.ops.ConfigSelectorChain())) == "Executor(<ConfigSelectorChain>)"


def test_mask():
    info = MaskInfo.causal(3)
    page = Page(info._repr_html_())
    assert page.labels == [repr(info)]
    assert "sizes\n(None, 3, 3)" in page.text
    assert info._repr_html_().count("<rect") == 6 + 1


def test_shares_of_a_large_mask():
    code = MaskInfo(dense=np.tril(np.ones((1, 1, 48, 48), bool)))._repr_html_()
    assert code.count('fill-opacity="1"') == 24 * 23 // 2
    assert code.count('fill-opacity="0.75"') == 24


@pytest.mark.parametrize(
    "info",
    [
        MaskInfo(),
        MaskInfo(causal=True),
        MaskInfo.causal(2**20),
        jax.eval_shape(lambda: MaskInfo(dense=np.ones((1, 1, 4, 4), bool))),
        jax.tree.map(lambda leaf: "a<b", MaskInfo.from_segments([[0, 1]])),
        jax.tree.map(lambda leaf: object(), MaskInfo.from_segments([[0, 1]])),
    ],
    ids=["nothing", "no sizes", "large", "shapes", "text", "objects"],
)
def test_a_mask_that_cannot_be_drawn(info):
    assert not Page(info._repr_html_()).labels


def test_masks_under_tracing():
    known = MaskInfo.from_segments([[0, 0, 1]])

    @jax.jit
    def shown(segments):
        traced = MaskInfo.from_segments(segments)
        assert not Page(traced._repr_html_()).labels and "int32[1,3]" in repr(traced)
        assert Page(known._repr_html_()).labels == [repr(known)]
        return segments

    shown(np.array([[0, 0, 1]]))
    jax.vmap(lambda segments: shown(segments[None]))(np.array([[0, 0, 1]]))


def test_colours():
    for shown in (ejkernel.explain("rms_norm", Q), kernel_registry, MaskInfo.causal(3)):
        assert takes_the_colours_of_the_page(shown._repr_html_())
