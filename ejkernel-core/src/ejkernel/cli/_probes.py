"""Questions to native code, asked in subprocesses, so that a crash or a hang there is an answer and not the end of doctor.

One subprocess answers question after question. Where it ends before its time, another one goes on with the question that it was
at, so that every failure was seen in a subprocess that had been asked nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

TIMEOUT = 60.0
"""Seconds; the first contact with a busy accelerator can take half a minute."""

_MARK = "ejkernel-probe:"


class Question(NamedTuple):
    """Code that calls `tell(value)`, and the text that it knows as `argument`."""

    code: str
    argument: str = ""


class Answer(NamedTuple):
    """What the code told before it ended, and how it failed if it did."""

    told: list[dict[str, Any]]
    error: str | None


DEVICES = Question("""
import jax
for device in jax.devices():
    tell({"platform": device.platform, "kind": device.device_kind, "id": device.id,
          "compute_capability": getattr(device, "compute_capability", None)})
""")
"""What `jax.devices()` says."""

DISPATCH = Question("""
from ejkernel.cli._examination import examine_dispatch
examine_dispatch(tell)
""")
"""Who would run each operation here."""

_DIAGNOSE = """
import pkgutil, pluggy
from ejkernel.plugin import Hooks
manager = pluggy.PluginManager("ejkernel")
manager.add_hookspecs(Hooks)
manager.register(pkgutil.resolve_name(argument))
manager.hook.ejkernel_diagnose(report=lambda name, finding: tell({"name": str(name), "finding": str(finding)}))
"""

_REFERENCES = """
from ejkernel.cli._examination import examine_references
examine_references(argument, tell)
"""

_PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
mark, questions = sys.argv[1:]
for number, (code, argument) in enumerate(json.loads(questions)):
    def tell(value, number=number):
        sys.stdout.write("\\n" + mark + json.dumps([number, value]) + "\\n")
        sys.stdout.flush()
    exec(code, {"__name__": "__main__", "argument": argument, "tell": tell})
    tell(None)
"""
"""Runs questions in turn; `None` is told where one is through."""


def diagnosis(value: str) -> Question:
    """What the `ejkernel_diagnose` of an entry point's value reports."""
    return Question(_DIAGNOSE, value)


def references(platform: str) -> Question:
    """What a plugin's implementations name that cannot be imported."""
    return Question(_REFERENCES, platform)


def ask(questions: Sequence[Question], timeout: float = TIMEOUT) -> list[Answer]:
    """The answer to each question; `timeout` is in seconds, for all that one subprocess is asked."""
    answers: list[Answer] = []
    while len(answers) < len(questions):
        told, failure = _run(questions[len(answers) :], timeout)
        through = sum(None in values for values in told)
        answers += [Answer(values[:-1], None) for values in told[:through]]
        if not through:
            answers.append(Answer(told[0], failure))
    return answers


def _run(questions: Sequence[Question], timeout: float) -> tuple[list[list[Any]], str]:
    """What a fresh subprocess told to each question, and how it ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "EJKERNEL_STRICT": "0"}
    command = [sys.executable, "-c", _PROGRAM, _MARK, json.dumps(questions)]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=timeout, env=environment, check=False, stdin=subprocess.DEVNULL
        )
        output, failure = done.stdout, _failure(done.returncode, done.stderr.decode("utf-8", "replace"))
    except subprocess.TimeoutExpired as late:
        output, failure = late.stdout, f"no answer within {timeout:g} s"
    told: list[list[Any]] = [[] for _ in questions]
    for line in (output or b"").decode("utf-8", "replace").splitlines():
        if line.startswith(_MARK):
            number, value = json.loads(line.removeprefix(_MARK))
            told[number].append(value)
    return told, failure


def _failure(status: int, errors: str) -> str:
    if status < 0:
        return f"the probe was killed by {signal.Signals(-status).name}"
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1].strip() if status and lines else f"the probe ended with status {status}"
