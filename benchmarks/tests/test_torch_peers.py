"""Adapters of torch on the CPU. The kernel of mamba_ssm, which needs a GPU, is replaced by its definition."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import sys
import types

import pytest

import ejkernel_bench as bench
from ejkernel.operations.linear_recurrence import cases
from ejkernel_bench import _run, peers
from ejkernel_bench.peers import known_peers

torch = pytest.importorskip("torch", reason="install torch to test its adapters", exc_type=ImportError)


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch):
    """Every adapter may run on the CPU; limits are made up."""
    adapters = tuple(dataclasses.replace(peer, backends=("cpu", "gpu")) for peer in known_peers())
    limits = {"flops_per_s": {"float32": 1e9, "bfloat16": 1e9}, "bytes_per_s": 1e9, "how": "made up"}
    monkeypatch.setattr(peers._find, "known_peers", lambda: adapters)
    monkeypatch.setattr(_run, "measure_limits", lambda dtypes, backend: limits)


def check(operation, case, peer, **settings):
    settings = {"phases": ("forward", "backward", "forward+backward"), "dtypes": ("float32",), **settings}
    wanted = bench.Settings((operation,), "test", case, platforms=("xla",), peers=(peer,), rounds=1, input_sets=2, **settings)
    for found in bench.run(wanted, progress=False)["cases"]:
        run = next(run for run in found["runs"] if run["name"] == peer)
        assert (run["status"], run["reason"]) == ("ok", None)
        assert len(run["wall_s"]) == 1 and run["compile_s"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["gqa-causal-tail", "mask-heads", "value-size"])
def test_sdpa(case, dtype):
    check("flash_attention", case, "torch SDPA", dtypes=(dtype,))


# torch.compile warns of its own parts.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "case"),
    [
        ("rms_norm", "scale"),
        ("add_rms_norm", "scale"),
        ("qk_norm_rope", "partial"),
        ("layer_norm", "scale-offset"),
        ("softmax", "scale"),
        ("cross_entropy", "logits-one-row"),
    ],
)
def test_compiled(operation, case):
    check(operation, case, "torch.compile")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("case", ["window-causal", "segments", "soft-cap", "gqa"])
def test_flex_attention(case):
    check("flash_attention", case, "FlexAttention", phases=("forward",))


def scan(x, dt, A, B, C, chunk):
    state, out = torch.zeros(x.shape[0], x.shape[2], B.shape[3], x.shape[3]), []
    B, C = (one.repeat_interleave(x.shape[2] // one.shape[2], 2).float() for one in (B, C))
    for t in range(x.shape[1]):
        written = dt[:, t, :, None, None] * B[:, t, :, :, None] * x[:, t, :, None, :].float()
        state = state * torch.exp(dt[:, t] * A)[..., None, None] + written
        out.append(torch.einsum("bhn,bhnp->bhp", C[:, t], state))
    return torch.stack(out, 1).to(x.dtype)


def test_mamba(monkeypatch):
    for name in ("triton", "mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.ssd_combined"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["mamba_ssm.ops.triton.ssd_combined"].mamba_chunk_scan_combined = scan
    small = cases.Case("ssd-small", cases.arrays(2, 12, 1, 4, 3, value_heads=4, decays="g", rate=0.3))
    monkeypatch.setattr(cases, "CASES", (*cases.CASES, small))
    check("linear_recurrence", "ssd-small", "mamba_ssm")
