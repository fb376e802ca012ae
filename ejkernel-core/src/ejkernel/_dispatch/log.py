"""`EJKERNEL_LOG=dispatch`: a line for each new decision, as the program that it belongs to is traced."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from typing import Any

from ejkernel.call.arrays import ArraySpec
from ejkernel.call.decision import Decision
from ejkernel.errors import invalid, suggestion
from ejkernel.loggings import get_logger

_VARIABLE = "EJKERNEL_LOG"
_TOPICS = ("dispatch",)

_lock = threading.Lock()
_logged: set[Any] = set()


def logged_topics() -> frozenset[str]:
    """What `EJKERNEL_LOG` asks for.

    Raises:
        ValueError: it names something else.
    """
    names = frozenset(part.strip().lower() for part in os.environ.get(_VARIABLE, "").split(",") if part.strip())
    for name in sorted(names.difference(_TOPICS)):
        raise invalid(_VARIABLE, repr(name), f"one of {', '.join(_TOPICS)}{suggestion(name, _TOPICS)}")
    return names


def log_decision(decision: Decision) -> None:
    """Log a decision that is about to be acted on, unless the same was logged before."""
    if "dispatch" not in logged_topics() or decision.chosen is None:
        return
    call = dataclasses.replace(decision.call, save_residuals=False)  # the same to the user
    key = (decision.operation, decision.phase, call, decision.target, decision.chosen.id, decision.config)
    with _lock:
        new = key not in _logged
        _logged.add(key)
    if new:
        get_logger("ejkernel.dispatch", logging.INFO).info("%s", _line(decision))


def _line(decision: Decision) -> str:
    fields = ((field.name, getattr(decision.call, field.name)) for field in dataclasses.fields(decision.call))
    arrays = ", ".join(f"{name}={value}" for name, value in fields if isinstance(value, ArraySpec))
    config = "" if decision.config is None else f", {decision.config} from {decision.tier}"
    chosen = decision.chosen.id if decision.chosen else "nothing"
    return f"{decision.operation} {decision.phase}({arrays}) on {decision.target}: {chosen} by {decision.setting}{config}"
