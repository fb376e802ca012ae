"""Input helpers, device information and logging."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import loggings, utils


def test_varlen_inputs_fit_together():
    arguments = dict(batch_size=3, qheads=4, kvheads=2, qseqlen=30, kseqlen=60, head_dim=8, dtype="bfloat16")
    q, k, v, metadata = utils.varlen_input_helper(**arguments)
    lengths_q, lengths_k = np.diff(metadata.cu_seqlens_q), np.diff(metadata.cu_seqlens_k)
    assert q.shape == (lengths_q.sum(), 4, 8) and k.shape == v.shape == (lengths_k.sum(), 2, 8)
    assert q.dtype == k.dtype == jnp.bfloat16
    assert lengths_q.min() >= 1 and lengths_q.max() == metadata.max_seqlens_q <= 10
    assert lengths_k.min() >= 1 and lengths_k.max() == metadata.max_seqlens_k <= 20
    assert metadata.layout == "thd" and metadata.sm_scale == 8**-0.5 and metadata.cu_seqlens_q.dtype == jnp.int32
    assert not np.array_equal(k, v)


def test_varlen_inputs_are_reproducible():
    arguments = dict(batch_size=2, qheads=1, kvheads=1, qseqlen=64, kseqlen=64, head_dim=4)
    first, again, other = (utils.varlen_input_helper(**arguments, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(utils.varlen_input_helper(**arguments)[0], first[0])
    assert first[3].cu_seqlens_q.tolist() != other[3].cu_seqlens_q.tolist()
    keyed = utils.varlen_input_helper(**arguments, key=jax.random.key(1))
    np.testing.assert_array_equal(keyed[0], other[0])
    with pytest.raises(ValueError, match="seed and key: got both"):
        utils.varlen_input_helper(**arguments, seed=1, key=jax.random.key(1))
    with pytest.raises(ValueError, match="qseqlen: got 64, expected at least 65"):
        utils.varlen_input_helper(**arguments | {"batch_size": 65})


def test_numeric_gen():
    a, b = utils.numeric_gen(2, 3), utils.numeric_gen(2, 3)
    assert a.shape == (2, 3) and a.dtype == jnp.float16 and not np.array_equal(a, b)
    np.testing.assert_array_equal(utils.numeric_gen(4, dtype="f4", seed=1), utils.numeric_gen(4, dtype=jnp.float32, seed=1))
    uniform = utils.numeric_gen(1000, dtype="f4", method="uniform", key=jax.random.key(0))
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1 and abs(float(uniform.mean()) - 0.5) < 0.05
    with pytest.raises(ValueError, match=r"method: got 'norml'.*did you mean 'normal'"):
        utils.numeric_gen(2, method="norml")


def test_block_indices_are_causal_sorted_and_shared_by_their_block():
    indices = np.asarray(utils.generate_block_indices(2, 10, 3, 4, 2))
    assert indices.shape == (2, 10, 3, 4) and indices.dtype == np.int32
    np.testing.assert_array_equal(indices[:, 0::2], indices[:, 1::2])
    for block in range(5):
        for row in indices[:, 2 * block].reshape(-1, 4):
            chosen = row[row >= 0]
            assert len(set(chosen)) == len(chosen) == min(block + 1, 4) and (np.diff(chosen) > 0).all()
            assert chosen.max() <= block and (row[len(chosen) :] == -1).all()
    assert len({tuple(row) for row in indices[:, 8].reshape(-1, 4)}) > 1
    np.testing.assert_array_equal(indices, utils.generate_block_indices(2, 10, 3, 4, 2, seed=42))
    assert utils.generate_block_indices(1, 2, 1, 4, 1)[0, 1, 0].tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize(("length", "block_size"), [(9, 2), (64, 16), (1, 4), (0, 4), (33, 32)])
def test_block_indices_cover_a_length_in_tokens(length: int, block_size: int):
    arguments = {"batch": 2, "sequence_length": length, "kv_heads": 3, "num_blocks_per_token": 4, "block_size": block_size}
    indices = np.asarray(utils.generate_block_indices(**arguments))
    assert indices.shape == (2, length, 3, 4)
    own = (np.arange(length) // block_size)[:, None, None]
    assert (indices <= own).all() and (indices >= -1).all()
    assert ((indices >= 0).sum(-1) == np.minimum(own[..., 0] + 1, 4)).all()
    with pytest.raises(ValueError, match="block_size: got 0, expected at least 1"):
        utils.generate_block_indices(**arguments | {"block_size": 0})


def test_numbers():
    assert [utils.next_power_of_2(x) for x in (1, 2, 3, 1023, 1024, 1025)] == [1, 2, 4, 1024, 1024, 2048]
    assert utils.cdiv(10, 4) == 3
    with pytest.raises(ValueError, match="x: got -1"):
        utils.next_power_of_2(-1)


def test_device_information():
    device = jax.devices("cpu")[0]
    information = utils.device_information(device)
    assert information.backend == "cpu" and information.kind == device.device_kind
    assert information.count == len(jax.local_devices(backend="cpu"))
    assert utils.device_information().backend == jax.local_devices()[0].platform


def run(code: str, **environment: str) -> str:
    variables = os.environ | environment
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, env=variables
    )
    assert done.stdout == ""
    return done.stderr


def test_imports_query_no_device_and_configure_no_logging():
    code = (
        "import logging\n"
        "import ejkernel.utils, ejkernel.loggings, ejkernel.xla_utils, ejkernel.types\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('ejkernel').handlers\n"
    )
    assert run(code, JAX_PLATFORMS="no_such_platform") == ""  # any device query would fail


def test_a_line_is_written_once_and_without_colour_to_a_pipe():
    code = (
        "from ejkernel.loggings import get_logger\n"
        "get_logger('client'); log = get_logger('client.part'); get_logger('client.part')\n"
        "log.warning('%d of %s', 3, 'x'); log.info('hidden')\n"
        "get_logger('client.part', level='INFO').info('shown')\n"
    )
    assert run(code) == "WARNING client.part: 3 of x\nINFO client.part: shown\n"


def test_the_application_s_handlers_take_over():
    code = (
        "import logging; from ejkernel.loggings import get_logger\n"
        "log = get_logger('client.part'); logging.basicConfig(format='APP %(message)s')\n"
        "log.warning('once')\n"
    )
    assert run(code) == "APP once\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.unsampled
@pytest.mark.parametrize(
    ("rich", "no_colour", "coloured", "expected"),
    [
        (True, None, True, "ERROR    client.part: [b]x[/b]"),
        (True, "1", False, "ERROR    client.part: [b]x[/b]"),
        (False, None, False, "ERROR client.part: [b]x[/b]"),
    ],
)
def test_a_terminal_s_line_is_rich_s_where_it_is_installed(monkeypatch, rich, no_colour, coloured, expected):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if no_colour:
        monkeypatch.setenv("NO_COLOR", no_colour)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.logging", None)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own are an application's
    loggings.get_logger("client.part").error("[b]x[/b]")
    written = terminal.getvalue()
    assert re.sub(r"\033\[[\d;]*m", "", written).rstrip() == expected
    assert ("\033[1;31mERROR" in written) == coloured


def test_a_long_line_to_a_file_stays_one_line():
    long = "x" * 300
    assert (
        run(f"from ejkernel.loggings import get_logger; get_logger('client').warning('{long}')") == f"WARNING client: {long}\n"
    )


def test_loggers_are_the_standard_library_s():
    assert loggings.get_logger("client.other") is logging.getLogger("client.other")
    before = list(logging.getLogger().handlers)
    loggings.get_logger("")
    assert logging.getLogger().handlers == before
