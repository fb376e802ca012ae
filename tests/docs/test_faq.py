"""Each answer of docs/faq.md quotes a message that its snippet raises or warns with."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "faq.md").read_text()
PREAMBLE, *ANSWERS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
BLOCK = r"^```{}\n(.*?)^```$"


def blocks(kind: str, text: str) -> list[str]:
    return re.findall(BLOCK.format(kind), text, re.MULTILINE | re.DOTALL)


def test_there_are_answers():
    assert len(ANSWERS) >= 10


@pytest.mark.unsampled
@pytest.mark.parametrize("answer", ANSWERS, ids=[answer.partition("\n")[0] for answer in ANSWERS])
def test_message_is_raised(answer):
    names: dict[str, object] = {}
    (message,), (before,), (snippet,) = blocks("text", answer), blocks("py", PREAMBLE), blocks("py", answer)
    exec(before, names)
    said = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            exec(snippet, names)
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            said = str(error)
    assert message.strip() in "\n".join([said, *(str(one.message) for one in warned)])
