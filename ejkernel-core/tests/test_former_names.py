"""Former names of a contract's fields: code that was written before they were renamed runs as it is."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import explain, kernel_registry
from ejkernel.configs.entry import Check, Entry, dump_entries
from ejkernel.configs.key import Key, canonical_json
from ejkernel.configs.tables import _index
from ejkernel.errors import NoKernelError
from ejkernel.operations import OPERATIONS, get_operation, operation_module
from ejkernel.operations.flash_attention.interface import (
    OPERATION,
    FlashAttentionCall,
    FlashAttentionInputs,
    FlashAttentionOutputs,
)
from ejkernel.plugin import Implementation
from ejkernel.testing.shapes import bound_shapes

RENAMED = [name for name in OPERATIONS if get_operation(name).renamed]


def former_values(operation):
    """Of the operation's cases: a call, or its arrays, with a former name and the present one."""
    owner = get_operation(operation)
    for case in operation_module(operation, "cases").CASES[:3]:
        inputs, call = bound_shapes(operation, case, "float32")
        for old, new in owner.renamed:
            yield call, old, new
            if new in inputs._fields:
                yield inputs, old, new


@pytest.mark.parametrize("operation", RENAMED)
def test_either_name_reads_and_gives_a_field(operation):
    for record, old, new in former_values(operation):
        replaced = (
            record._replace
            if isinstance(record, tuple)
            else lambda record=record, **given: dataclasses.replace(record, **given)
        )
        names = record._fields if isinstance(record, tuple) else [field.name for field in dataclasses.fields(record)]
        given = {name: getattr(record, name) for name in names}
        assert new in names and old not in names
        assert getattr(record, old) is getattr(record, new)
        assert getattr(replaced(**{old: None}), new) is None
        assert type(record)(**{old if name == new else name: value for name, value in given.items()}) == record
        with pytest.raises(TypeError, match="scales"):
            type(record)(**given, scales=1)
        with pytest.raises(AttributeError):
            setattr(record, old, None)


@pytest.mark.parametrize("operation", RENAMED)
def test_plugins_leave_out_and_honour_fields_by_either_name(operation):
    owner = get_operation(operation)
    for old, new in owner.renamed:
        if since := owner.optional_fields.get(new):
            for name in (old, new):
                assert not owner.accepts(Implementation(operation, "a:b", contract=since, without=(name,)), new)
                assert owner.accepts(Implementation(operation, "a:b", accepts=(name,)), new)
            assert owner.accepts(Implementation(operation, "a:b", contract=since), new)


def test_records_are_copied_and_are_pytrees_as_before():
    case = next(case for case in operation_module("flash_attention", "cases").CASES if case.name == "sinks")
    inputs, call = bound_shapes("flash_attention", case, "float32")
    assert copy.copy(call) == pickle.loads(pickle.dumps(call)) == call
    assert hash(dataclasses.replace(call, scale=2.0)) == hash(dataclasses.replace(call, softmax_scale=2.0))
    assert jax.tree.map(lambda x: x, inputs) == inputs == FlashAttentionInputs._make(inputs)
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(inputs)}
    assert ".softmax_aux" in paths and ".sinks" not in paths


def forward(call, inputs, config):
    """As a plugin wrote it when the fields were called scale and sinks; causal=True and one head of keys per query head."""
    logits = call.scale * jnp.einsum("bthd,bshd->bhts", inputs.query, inputs.key)
    logits = jnp.where(jnp.tril(jnp.ones(logits.shape[2:], bool)), logits, -jnp.inf)
    sinks = jnp.broadcast_to(inputs.sinks[:, :, None], (*logits.shape[:3], inputs.sinks.shape[2]))
    lse = jax.nn.logsumexp(jnp.concatenate([logits, sinks], -1), -1)
    out = jnp.einsum("bhts,bshd->bthd", jnp.exp(logits - lse[..., None]), inputs.value)
    return FlashAttentionOutputs(out, lse.swapaxes(1, 2) if call.save_residuals or call.return_lse else None)


def backward(call, inputs, outputs, cotangents, config):
    def out(query, key, value, sinks):
        return forward(call, inputs._replace(query=query, key=key, value=value, sinks=sinks), config).out

    _, pull = jax.vjp(out, inputs.query, inputs.key, inputs.value, inputs.sinks)
    d_query, d_key, d_value, d_sinks = pull(cotangents.out)
    return FlashAttentionInputs(query=d_query, key=d_key, value=d_value, sinks=d_sinks)


def supports(call, target):
    return None if call.sinks is not None and call.scale > 0 else "needs sinks and a scale above 0"


@pytest.fixture
def older():
    record = {"supports": supports, "without": ("soft_cap",), "contract": 1}
    kernel_registry.register("flash_attention", "older", **record)(forward)
    kernel_registry.register("flash_attention", "older", phase="backward", **record)(backward)
    yield
    kernel_registry.unregister("flash_attention", "older")
    kernel_registry.unregister("flash_attention", "older", phase="backward")


def test_a_plugin_that_knows_former_names_computes_what_others_do(older):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((2, 7, 3, 4)), jnp.float32) for _ in range(3)]
    sinks = jnp.asarray(rng.standard_normal(3), jnp.float32)

    def run(platform):
        def loss(query, key, value, sinks):
            given = {"softmax_aux": sinks, "causal": True, "softmax_scale": 0.3, "platform": platform}
            return (ejkernel.flash_attention(query, key, value, **given) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2, 3))(*arrays, sinks)

    found = explain("flash_attention", *arrays, softmax_aux=sinks, causal=True, platform="older")
    assert (found.chosen, found.backward.chosen.id) == ("older", "older")
    for got, wanted in zip(jax.tree.leaves(run("older")), jax.tree.leaves(run("xla")), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(NoKernelError, match="older does not accept logits_soft_cap"):
        ejkernel.flash_attention(*arrays, softmax_aux=sinks, causal=True, logits_soft_cap=3.0, platform="older")
    with pytest.raises(NoKernelError, match="needs sinks"):
        ejkernel.flash_attention(*arrays, causal=True, platform="older")


def test_a_table_that_knows_former_names_is_found(tmp_path):
    """And is of calls without the fields that later revisions brought."""
    call = FlashAttentionCall(**OPERATION.canonicalise(*[jnp.ones((1, 8, 2, 4))] * 3, logits_soft_cap=3.0).call.__dict__)
    fields = json.loads(canonical_json({"soft_cap": call.logits_soft_cap, "scale": call.softmax_scale, "sinks": None}))
    key = Key("flash_attention", "forward", "xla", 1, canonical_json(fields), "cpu", "cpu", "", "0.11.2", "0.1")
    path = tmp_path / "table.json"
    path.write_text(dump_entries([Entry(key, {"block_q": 8}, check=Check(True, 0.5))]))
    (found,) = _index(((str(path), "xla", True),), "flash_attention").exact
    later = [name for name, revision in OPERATION.optional_fields.items() if revision > 1]
    assert "score_mod" in later
    known = {"logits_soft_cap": 3.0, "softmax_scale": 0.5, "softmax_aux": None}
    assert json.loads(found.call) == known | dict.fromkeys(later)
    assert not _index(((str(path), "xla", True),), "rms_norm").exact
