"""The dispatcher's own functions, for tools that decide, compile, run or time one implementation of a canonical call.

A `Request` (see `ejkernel.call`) goes in; nothing here looks at the arguments of a public function.
"""

from __future__ import annotations

from ejkernel._dispatch.decisions import decide, willing
from ejkernel._dispatch.execution import run_backward, run_forward
from ejkernel._dispatch.explanation import Captured, capture, explain_request
from ejkernel._plugins.records import Candidate
from ejkernel.call.decision import Decision, Explanation, Verdict, describe_call
from ejkernel.call.policy import Policy, policy_for_call
from ejkernel.tuning.problems import TuningProblem, pinned

__all__ = [
    "Candidate",
    "Captured",
    "Decision",
    "Explanation",
    "Policy",
    "TuningProblem",
    "Verdict",
    "capture",
    "decide",
    "describe_call",
    "explain_request",
    "pinned",
    "policy_for_call",
    "run_backward",
    "run_forward",
    "willing",
]
