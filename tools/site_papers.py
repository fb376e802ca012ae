"""Where the papers are that docstrings name. `site_docstrings.py` links them, and the reference lists them by function."""

from __future__ import annotations

import re

ARXIV = "https://arxiv.org/abs/"

PAPERS = {
    "Attention is all you need": "1706.03762",
    "Cut Your Losses in Large-Vocabulary Language Models": "2411.09009",
    "DeepSeek-V2": "2405.04434",
    "DeepSeek-V3": "2412.19437",
    "DeepSeek-V3.2": "2512.02556",
    "DeepSeekMath": "2402.03300",
    "DeepSpeed Ulysses": "2309.14509",
    "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products": "2502.10297",
    "Direct Preference Optimization": "2305.18290",
    "Distilling the Knowledge in a Neural Network": "1503.02531",
    "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence": "2404.05892",
    "Efficient memory management for large language model serving with PagedAttention": "2309.06180",
    "FP8 Formats for Deep Learning": "2209.05433",
    "Flash-Decoding for long-context inference": "https://crfm.stanford.edu/2023/10/12/flashdecoding.html",
    "FlashAttention": "2205.14135",
    "FlashAttention-2": "2307.08691",
    "GLU variants improve transformer": "2002.05202",
    "Gated Delta Networks: Improving Mamba2 with Delta Rule": "2412.06464",
    "Gated Delta Networks": "2412.06464",
    "Gated Linear Attention Transformers with Hardware-Efficient Training": "2312.06635",
    "Generating long sequences with sparse transformers": "1904.10509",
    "How to generate random matrices from the classical compact groups": "math-ph/0609050",
    "Hungry Hungry Hippos: Towards Language Modeling with State Space Models": "2212.14052",
    "Kimi Linear: An Expressive, Efficient Attention Architecture": "2510.26692",
    "LASP-2: Rethinking Sequence Parallelism for Linear Attention and Its Hybrid": "2502.07563",
    "Layer Normalization": "1607.06450",
    "Lightning Attention-2: A Free Lunch for Handling Unlimited Sequence Lengths in Large Language Models": "2401.04658",
    "Mamba: Linear-Time Sequence Modeling with Selective State Spaces": "2312.00752",
    "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts": "2211.15841",
    "MiniMax-01: Scaling Foundation Models with Lightning Attention": "2501.08313",
    "Muon: an optimizer for hidden layers in neural networks": "https://kellerjordan.github.io/posts/muon/",
    "Native Sparse Attention": "2502.11089",
    "On-Policy Distillation of Language Models": "2306.13649",
    "Online normalizer calculation for softmax": "1805.02867",
    "Outrageously Large Neural Networks": "1701.06538",
    "PagedAttention": "2309.06180",
    "PaLM": "2204.02311",
    "QLoRA": "2305.14314",
    "Retentive Network: A Successor to Transformer for Large Language Models": "2307.08621",
    "Ring Attention with Blockwise Transformers for Near-Infinite Context": "2310.01889",
    "RoFormer: Enhanced Transformer with Rotary Position Embedding": "2104.09864",
    "RoFormer": "2104.09864",
    "Root Mean Square Layer Normalization": "1910.07467",
    'RWKV-7 "Goose" with Expressive Dynamic State Evolution': "2503.14456",
    "RWKV: Reinventing RNNs for the Transformer Era": "2305.13048",
    "SARATHI: Efficient LLM inference by piggybacking decodes with chunked prefills": "2308.16369",
    "SARATHI": "2308.16369",
    "ST-MoE": "2202.08906",
    "Self-attention does not need O(n^2) memory": "2112.05682",
    "Switch Transformers": "2101.03961",
    "The Llama 3 Herd of Models": "2407.21783",
    "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality": "2405.21060",
    "Transformers are SSMs": "2405.21060",
    "TurboQuant": "2504.19874",
    "xLSTM 7B": "2503.13427",
    "xLSTM: Extended Long Short-Term Memory": "2405.04517",
}
"""Title as docstrings have it -> its number at arXiv, or its address."""

SOURCE = re.compile(r"^ *Source: .*(?:\n *\S.*)*", re.MULTILINE)
"""The entry of a docstring that names them, up to the next empty line."""


def _pattern(title: str) -> str:
    """A title however its lines are broken, and no longer one that begins or ends with it."""
    words = r"\s+".join(map(re.escape, title.split()))
    return rf"(?<![\w-]){words}(?![\w-]|\.\d)"


_TITLE = re.compile("|".join(map(_pattern, sorted(PAPERS, key=lambda one: -len(one)))))


def linked(docstring: str) -> str:
    """The same with a link at each paper of its sources."""
    return SOURCE.sub(lambda source: _TITLE.sub(_link, source[0]), docstring)


def sources(docstring: str) -> str:
    """What a docstring says of its sources, on one line and with links; empty if it names no paper."""
    found = SOURCE.search(docstring)
    text = " ".join(linked(found[0]).split()).removeprefix("Source: ") if found else ""
    return text if "](" in text else ""


def _link(found: re.Match[str]) -> str:
    title = " ".join(found[0].split())
    where = PAPERS[title]
    return f"[{title}]({where if '://' in where else ARXIV + where})"
