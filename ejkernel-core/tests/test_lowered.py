"""Lowered code on disk: what is kept, what makes another key, and that programs which read it are right."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import sys
import textwrap
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel
from ejkernel import kernel_registry, use
from ejkernel._dispatch import lowered
from ejkernel._dispatch.recording import record_calls
from ejkernel._plugins.records import Candidate
from ejkernel.errors import PluginError
from ejkernel.plugin import Implementation, resolve
from ejkernel.utils.kernel_store import stored_kernels

X = jnp.linspace(-2, 3, 48).reshape(2, 3, 8)
CODE = """
    import dataclasses
    import jax.numpy as jnp
    from ejkernel.operations.rms_norm.interface import RmsNormInputs, RmsNormOutputs
    from ejkernel.plugin import ConfigSpace

    traced = []
    depends = "version 1"
    factor = 1

    @dataclasses.dataclass(frozen=True)
    class Config:
        rows: int = 1

    SPACE = ConfigSpace(Config, lambda call, target: Config(), lambda call, target: [Config(), Config(2)])

    def forward(call, inputs, config):
        traced.append((call, config))
        x = inputs.x.astype(jnp.float32)
        rstd = 1 / jnp.sqrt(jnp.mean(x**2, -1) + call.epsilon)
        scale = 1.0 if inputs.scale is None else inputs.scale.reshape(-1, *[1] * (x.ndim - 2), x.shape[-1])
        result = (factor * x * rstd[..., None] * scale).astype(inputs.x.dtype)
        return RmsNormOutputs(result, rstd if call.save_residuals else None)

    def fails(call, inputs, config):
        traced.append(call)
        raise ValueError("no such tile")

    def list_of_results(call, inputs, config):
        traced.append(call)
        return [inputs.x]

    def short(call, inputs, config):
        traced.append(call)
        return RmsNormOutputs(inputs.x[:1], None)

    def lowered_from():
        return depends
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """`mine(target)` has the platform `mine` run a function of a module on disk, and returns the module."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(lowered, "_IMPORTED", float("inf"))  # the module is written after ejkernel was imported
    (tmp_path / "made_up.py").write_text(textwrap.dedent(CODE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "made_up", raising=False)
    module = importlib.import_module("made_up")

    def register(target: str = "made_up:forward", lowered_from: Any = lambda: module.lowered_from(), **record: Any) -> Any:
        known = Implementation(
            "rms_norm", target, lowered_from=lowered_from, configs=module.SPACE, accepts=("scale", "epsilon"), **record
        )
        kernel_registry._add(Candidate("mine", known, "(this process)", "", "registered"))
        kernel_registry.refresh()
        return module

    second_process()
    yield register
    kernel_registry.unregister("rms_norm", "mine")
    monkeypatch.delitem(sys.modules, "made_up")
    second_process()


def second_process() -> None:
    """Forget all that a process knows of what it traced."""
    lowered._known.clear()
    resolve.cache_clear()
    lowered.digest.cache_clear()
    jax.clear_caches()


def run(x: Any = X, **options: Any) -> Any:
    return ejkernel.rms_norm(x, platform="mine", **options)


def expected(x: Any = X, **options: Any) -> Any:
    return ejkernel.rms_norm(x, platform="xla", **options)


def close(got: Any, wanted: Any) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6), got, wanted)


def test_traced_once_then_read(mine):
    module = mine()
    close(run(), expected())
    assert (len(module.traced), stored_kernels().count) == (1, 1)
    second_process()
    close(run(), expected())
    assert (len(module.traced), stored_kernels().count) == (1, 1)


def test_programs_of_maker_and_reader_are_equal(mine):
    module = mine()
    texts = []
    for _ in range(2):
        second_process()
        texts.append(jax.jit(lambda x: run(x).sum()).lower(X).as_text())
    assert texts[0] == texts[1] and len(module.traced) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: run(cfg={"rows": 2}),
        lambda: run(epsilon=1e-3),
        lambda: run(X[:1]),
        lambda: run(X, scale=jnp.ones(8)),
        lambda: run(X.astype(jnp.bfloat16)),
    ],
    ids=["config", "static option", "shape", "other arrays", "dtype"],
)
def test_another_call_is_traced(mine, call):
    module = mine()
    run()
    call()
    assert (len(module.traced), stored_kernels().count) == (2, 2)


@pytest.mark.parametrize(
    "setting",
    [jax.enable_x64(True), jax.default_matmul_precision("float32"), jax.threefry_partitionable(False)],
    ids=["x64", "matmul precision", "threefry"],
)
def test_other_settings_of_jax_are_traced(mine, setting):
    module = mine()
    run()
    with setting:
        close(run(), expected())
    second_process()
    run()
    assert (len(module.traced), stored_kernels().count) == (2, 2)


def test_another_lowered_from_is_traced(mine):
    module = mine()
    run()
    module.depends = "version 2"
    second_process()
    run()
    module.depends = None
    second_process()
    run()
    assert (len(module.traced), stored_kernels().count) == (3, 2)


def test_changed_source_is_traced(mine, tmp_path):
    module = mine()
    run()
    (tmp_path / "made_up.py").write_text(textwrap.dedent(CODE).replace("factor = 1", "factor = 2"))
    module.factor = 2
    second_process()
    close(run(), 2 * expected())
    assert (len(module.traced), stored_kernels().count) == (2, 2)


def test_nothing_is_kept_of_source_that_may_be_newer_than_what_runs(mine, monkeypatch):
    module = mine()
    monkeypatch.setattr(lowered, "_IMPORTED", 1.0)
    close(run(), expected())
    assert (len(module.traced), stored_kernels().count) == (1, 0)


def test_another_target_of_the_same_module_is_traced(mine):
    module = mine()
    run()
    kernel_registry.unregister("rms_norm", "mine")
    mine("made_up:short")
    with pytest.raises(TypeError, match="breaks the contract"):
        run()
    assert len(module.traced) == 2


@pytest.mark.parametrize("module", ["__main__", "no_such_module", "math"])
def test_a_module_without_source_has_no_digest(module):
    lowered.digest.cache_clear()
    assert lowered.digest(module) is None


def test_packages_and_modules_have_digests_by_content(tmp_path, monkeypatch):
    monkeypatch.setattr(lowered, "_IMPORTED", float("inf"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "folder_of_code").mkdir()
    found = []
    for content in ("a = 1", "a = 2"):
        for path in ("folder_of_code/inner.py", "file_of_code.py"):
            (tmp_path / path).write_text(content)
        importlib.invalidate_caches()
        lowered.digest.cache_clear()
        found += [lowered.digest("folder_of_code"), lowered.digest("file_of_code")]
    assert None not in found and len({*found}) == 4


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"x" + b[1:], lambda b: b""])
def test_a_damaged_file_is_traced_again(mine, damage):
    module = mine()
    run()
    (file,) = lowered.STORE.folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    second_process()
    close(run(), expected())
    second_process()
    run()
    assert len(module.traced) == 2


@pytest.mark.parametrize("content", [b"", b"no program", bytes(1000)])
def test_what_cannot_be_read_is_traced_again(mine, content):
    module = mine()
    run()
    (file,) = lowered.STORE.folder.iterdir()
    lowered.STORE.put(file.stem, content)
    second_process()
    close(run(), expected())
    second_process()
    close(run(), expected())
    assert len(module.traced) == 2


def test_exceptions_come_through_and_are_not_kept(mine):
    module = mine("made_up:fails")
    for attempt in (1, 2):
        with pytest.raises(ValueError, match="no such tile") as caught:
            run()
        notes = "\n".join(caught.value.__notes__)
        assert "raised in made_up:fails (rms_norm forward) of 'mine'" in notes and "Implementation.lowered_from" in notes
        assert (len(module.traced), stored_kernels().count) == (attempt, 0)


def test_a_result_of_another_type_is_a_broken_contract(mine):
    mine("made_up:list_of_results")
    with pytest.raises(TypeError, match=r"mine \(forward\) breaks the contract of rms_norm: returned list"):
        run()
    assert stored_kernels().count == 0


def test_a_result_of_another_shape_is_a_broken_contract_and_not_kept(mine):
    module = mine("made_up:short")
    for _ in range(2):
        second_process()
        with pytest.raises(TypeError, match=r"breaks the contract of rms_norm: .*returned float32\[1,3,8\]"):
            run()
    assert (len(module.traced), stored_kernels().count) == (2, 0)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("made_up:no_such_name", r"mine: lowered_from cannot be imported: AttributeError.*no_such_name"),
        ("no_such_module:name", r"mine: lowered_from cannot be imported: ModuleNotFoundError"),
        (lambda: 3, r"mine: lowered_from returned int, expected a str, or None"),
    ],
)
def test_a_wrong_lowered_from_is_named(mine, reference, message):
    mine(lowered_from=reference)
    with pytest.raises(PluginError, match=message):
        run()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"lowered_from": 3}, r"lowered_from: got int, expected 'package.module:attribute' or the object itself"),
        ({"lowered_from": "a module"}, r"lowered_from: got 'a module', expected 'package.module:attribute'"),
        ({"lowered_from": "a:b", "plain_jax": True}, "lowered_from: got 'a:b' with plain_jax=True, expected None"),
        (
            {"lowered_from": "a:b", "partitioning": "native"},
            "lowered_from: got 'a:b' with partitioning='native', expected None",
        ),
    ],
)
def test_a_wrong_record_is_refused(registered, record, message):
    with pytest.raises(ValueError, match=message):
        registered("wrong", **record)


def test_functions_registered_in_this_process_are_not_kept(registered, tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    traced = registered("here", lowered_from=lambda: "version 1")
    ejkernel.rms_norm(X, platform="here")
    assert (len(traced), stored_kernels().count) == (1, 0)


def test_without_flatbuffers_nothing_is_kept(mine, monkeypatch):
    module = mine()
    monkeypatch.setattr(lowered, "findable", lambda name: name != "flatbuffers")
    close(run(), expected())
    assert (len(module.traced), stored_kernels().count) == (1, 0)


@pytest.mark.parametrize("before", [True, False])
def test_the_setting_of_forward_compatibility_is_the_users(mine, before):
    module = mine()
    name = "jax_export_ignore_forward_compatibility"
    found = getattr(jax.config, name)
    jax.config.update(name, before)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            got = [*pool.map(lambda n: run(X, epsilon=1e-6 * (1 + n % 4)), range(16))]
        assert getattr(jax.config, name) is before
    finally:
        jax.config.update(name, found)
    for n, each in enumerate(got):
        close(each, expected(X, epsilon=1e-6 * (1 + n % 4)))
    assert stored_kernels().count == len({call.epsilon for call, _ in module.traced}) == 4


def test_a_call_is_traced_when_it_is_lowered(mine):
    module = mine()
    traced = jax.jit(lambda x: run(x)).trace(X)
    assert (traced.out_info.shape, len(module.traced), stored_kernels().count) == (X.shape, 0, 0)
    text = traced.lower().as_text()
    assert (len(module.traced), stored_kernels().count) == (1, 1)
    assert jax.jit(lambda x: run(x)).lower(X).as_text() == text and len(module.traced) == 1


def test_equal_calls_of_a_program_are_lowered_once(mine):
    module = mine()
    text = jax.jit(lambda x: run(run(x)) + run(x)).lower(X).as_text()
    assert len(module.traced) == 1 and text.count("stablehlo.sqrt") == 1


def test_of_a_gradient_only_what_it_runs_is_traced(mine):
    """JAX also traces the forward phase without residuals."""
    module = mine()
    close(jax.jit(jax.grad(lambda x: loss(lambda x: ejkernel.rms_norm(x, platform=("mine", "xla")), x)))(X), gradient_by_xla())
    assert [call.save_residuals for call, _ in module.traced] == [True] and stored_kernels().count == 1


@pytest.mark.parametrize("same", [True, False])
def test_a_program_that_is_lowered_under_other_settings(mine, same):
    """The dtypes are those of the settings under which it was traced; it is kept if it can be lowered under the same."""
    module = mine()
    with jax.enable_x64(True), contextlib.nullcontext() if same else jax.numpy_rank_promotion("warn"):
        traced = jax.jit(lambda x: run(x)).trace(X.astype(jnp.float64))
    text = traced.lower().as_text()
    assert "tensor<2x3x8xf64>" in text
    assert (len(module.traced), stored_kernels().count) == (1, int(same))


def gradient_by_xla() -> Any:
    return jax.grad(lambda x: loss(expected, x))(X)


def loss(function: Any, x: Any) -> Any:
    return (function(x) ** 3).sum()


@pytest.mark.parametrize(
    "transform",
    [
        jax.grad(lambda f, x: loss(f, x), 1),
        lambda f, x: jax.vmap(f)(x),
        lambda f, x: jax.jit(lambda x: jax.jit(f)(x) + f(2 * x))(x),
        jax.grad(lambda f, x: loss(jax.checkpoint(f), x), 1),
        lambda f, x: jax.jit(jax.vmap(jax.grad(lambda x: loss(f, x))))(x),
        lambda f, x: jax.lax.scan(lambda carry, row: (carry + f(row).sum(), f(row)), 0.0, x),
        lambda f, x: jax.jit(f, donate_argnums=0)(x + 0),
        lambda f, x: f(jnp.full_like(x, 2.0)) + f(np.asarray(x)),
    ],
    ids=["grad", "vmap", "jit in jit", "checkpoint", "all", "scan", "donated", "weak and numpy"],
)
def test_transformed(mine, transform):
    module = mine()
    wanted = transform(expected, X)
    for _ in range(2):
        second_process()
        close(transform(lambda x: ejkernel.rms_norm(x, platform=("mine", "xla")), X), wanted)
    calls = {repr(call) for call in module.traced}
    assert len(module.traced) == len(calls) == stored_kernels().count > 0


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_meshes(mine, kind):
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices; XLA_FLAGS=--xla_force_host_platform_device_count=4 gives them")
    mine()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    x = jnp.linspace(-1, 2, 8 * 16).reshape(8, 16)
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    both = jax.jit(jax.value_and_grad(lambda x: loss(lambda x: ejkernel.rms_norm(x, platform=("mine", "xla")), x)))
    wanted = jax.value_and_grad(lambda x: loss(expected, x))(x)
    for _ in range(2):
        second_process()
        close(jax.device_get(both(split)), wanted)
        with jax.set_mesh(mesh):
            close(jax.device_get(both(split)), wanted)


def test_in_shard_map_nothing_is_kept(mine):
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices; XLA_FLAGS=--xla_force_host_platform_device_count=4 gives them")
    module = mine()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jnp.linspace(-1, 2, 8 * 16).reshape(8, 16)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    close(jax.device_get(jax.jit(mapped)(x)), expected(x))
    assert len(module.traced) == 1 and stored_kernels().count == 0


def test_symbolic_sizes_are_traced(mine):
    module = mine()
    (rows,) = jax.export.symbolic_shape("rows")
    program = jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct((rows, 8), jnp.float32))
    assert len(module.traced) == 1 and stored_kernels().count == 0
    close(program.call(X[0]), expected(X[0]))


def test_exported_programs_contain_it(mine):
    module = mine()
    for _ in range(2):
        second_process()
        content = jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct(X.shape, X.dtype)).serialize()
        close(jax.export.deserialize(content).call(X), expected())
    assert len(module.traced) == 1


def test_without_jit(mine):
    mine()
    with jax.disable_jit():
        close(run(), expected())


def test_settings_explanations_and_listings(mine):
    module = mine()
    with use("mine"):
        assert ejkernel.explain("rms_norm", X).chosen == "mine"
        assert not module.traced
        close(ejkernel.rms_norm(X), expected())
        (recorded,) = record_calls(ejkernel.rms_norm, X)
        assert (recorded.chosen.id, recorded.config.rows, stored_kernels().count) == ("mine", 1, 1)
        text = jax.jit(lambda x: ejkernel.rms_norm(x)).lower(X).as_text(debug_info=True)
    assert "ejkernel.rms_norm[mine]" in text


PROGRAM = """
    import jax, jax.numpy as jnp, numpy as np
    import ejkernel
    x = jnp.linspace(-2, 2, 48).reshape(6, 8)
    function = jax.jit(lambda x: ejkernel.rms_norm(x, platform="foo"))
    np.testing.assert_allclose(function(x), ejkernel.rms_norm(x, platform="xla"), rtol=2e-6)
    print(hash(function.lower(x).as_text().encode()))
    import foo
    print(len(foo.traced))
"""


def test_processes_of_a_third_party_without_a_package(site, python, tmp_path):
    record = "'rms_norm', 'foo:forward', configs='foo:SPACE', accepts=('scale', 'epsilon'), lowered_from='foo:lowered_from'"
    site.plugin("foo", api_level="2", implementations=f"(Implementation({record}),)")
    (site.path / "foo.py").write_text(textwrap.dedent(CODE))
    environment = {"EJKERNEL_CACHE_DIR": str(tmp_path / "cache"), "PYTHONHASHSEED": "0"}
    first, second = (python(PROGRAM, **environment).split() for _ in range(2))
    assert (first[0], first[1], second[1]) == (second[0], "1", "0")
    (site.path / "foo.py").write_text(textwrap.dedent(CODE) + "\n# another version")
    assert python(PROGRAM, **environment).split()[1] == "1"
