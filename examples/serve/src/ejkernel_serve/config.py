"""Sizes of an engine, and what a request asks for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ejkernel_serve.grammar import Guide


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine.

    Attributes:
        pages, page_size: of the cache, each of so many tokens.
        max_length: tokens of a request, its prompt and what it generates.
        max_requests: how many run at once.
        max_waiting: how many may wait for that; more are refused.
        buckets: tokens of a step: it runs the program of the smallest that holds it. The largest is what a step may compute.
        burst: tokens that each request gets from one program while all decode, the next of which is launched before these are
            read. They come together, an end that is not last wastes the others, and a request that arrives waits for up to two
            programs; without, the device waits for the host after each token. 1 for none.
        drafts: guesses of its next tokens that a request which decodes gets in a step at most; see `speculative.py`.
        prefix_reuse: a prompt takes the pages of an earlier one that began the same.
        dtype: of products, activations and the cache.
    """

    pages: int = 1024
    page_size: int = 16
    max_length: int = 1024
    max_requests: int = 64
    max_waiting: int = 256
    buckets: tuple[int, ...] = (1, 4, 16, 64, 256)
    burst: int = 8
    drafts: int = 0
    prefix_reuse: bool = True
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("pages", "page_size", "max_length", "max_requests", "max_waiting", "burst"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.drafts < 0:
            raise ValueError(f"drafts is {self.drafts}; give at least 0")
        if not self.buckets or list(self.buckets) != sorted({*self.buckets}) or self.buckets[0] < 1:
            raise ValueError(f"buckets is {self.buckets}; give rising numbers of tokens")
        if self.buckets[-1] < self.max_requests:
            raise ValueError(f"the largest bucket is {self.buckets[-1]}; make it at least max_requests, {self.max_requests}")
        if self.pages < self.table:
            raise ValueError(f"pages is {self.pages}; a request of max_length={self.max_length} needs {self.table}")

    @property
    def table(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_length // self.page_size)

    @property
    def capacity(self) -> int:
        """Requests that run or wait."""
        return self.max_requests + self.max_waiting

    def bucket(self, tokens: int) -> int:
        return next(size for size in self.buckets if size >= tokens)


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much of the server one client may have.

    Attributes:
        body_bytes: of a request.
        bodies_bytes: of all requests that are being read; a client of more is told to come again.
        head_seconds, body_seconds: until a request's headers, and its body, must be whole.
        write_seconds: that a client may take to read what fills the send buffer.
        linger_seconds: that a client may go on sending when it has its answer.
        connections: open ones; more are told to come again, and beyond twice as many they are closed.
    """

    body_bytes: int = 1 << 20
    bodies_bytes: int = 1 << 26
    head_seconds: float = 10
    body_seconds: float = 30
    write_seconds: float = 30
    linger_seconds: float = 2
    connections: int = 1024


MIN_REPETITION, MAX_REPETITION = 0.01, 100
MAX_PENALTY = 2
MAX_BIAS = 100
MAX_TOP_LOGPROBS = 20


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn, and when it ends.

    Attributes:
        max_tokens: tokens to generate at most.
        temperature: 0 takes the likeliest.
        top_k: draw from the k likeliest; 0 from all.
        top_p: draw from the fewest that have this probability together.
        seed: in [0, 2**64). The n-th token is drawn with a key of the seed and n, so neither neighbours nor preemption change it.
        stop: sequences of tokens after which the request ends; of bytes, if there is a `spelling`.
        min_p: draw from those at least that probable, next to the most probable.
        repetition_penalty: divides the positive logits of tokens in the prompt or generated so far, and multiplies the negative.
        presence_penalty: taken from the logit of each token that was generated.
        frequency_penalty: taken from it as often as the token was generated.
        logit_bias: added to the logits of these tokens.
        top_logprobs: how many of the likeliest tokens are reported, with their log-probabilities, in place of each token.
        prompt_logprobs: the log-probabilities of the prompt's tokens are found too. Then `max_tokens` may be 0.
        guide: a grammar that the text follows; each request begins with a copy.
        spelling: the bytes of each token.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[tuple[int, ...], ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float])
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    guide: Guide | None = None
    spelling: Sequence[bytes] | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; give a number of at least 0")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a probability in [0, 1]")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k is {self.top_k}; give an int in [0, 2**31), 0 for all tokens")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; give an int in [0, 2**64)")
        if () in self.stop:
            raise ValueError("stop has an empty sequence; give at least one token in each")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; give a probability in [0, 1]")
        if not MIN_REPETITION <= self.repetition_penalty <= MAX_REPETITION:
            possible = f"[{MIN_REPETITION}, {MAX_REPETITION}]"
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; give a number in {possible}, 1 for none")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MAX_PENALTY:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number in [-{MAX_PENALTY}, {MAX_PENALTY}]")
        for token, bias in self.logit_bias.items():
            if token < 0 or not abs(bias) <= MAX_BIAS:
                raise ValueError(
                    f"logit_bias has {bias} for token {token}; give tokens, and numbers in [-{MAX_BIAS}, {MAX_BIAS}]"
                )
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; give an int in [0, {MAX_TOP_LOGPROBS}]")

    @property
    def adjusts(self) -> bool:
        """Logits are changed, or tokens left out, before one is drawn."""
        return self.penalised or bool(self.logit_bias) or self.guide is not None

    @property
    def penalised(self) -> bool:
        """Logits depend on which tokens came before, beyond what the model makes of them."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
