"""Choosing an implementation: settings, priorities, refusals, and what the user is told."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel
from ejkernel import NoKernelError, explain, kernel_registry, use
from ejkernel.call.order import measured_in
from ejkernel.errors import FallbackWarning
from ejkernel.operations.rms_norm.interface import RmsNormOutputs
from ejkernel.plugin import Target

X = jnp.ones((2, 3, 8))


def verdicts(explanation, phase="forward"):
    return {v.candidate.id: (v.verdict, v.reasons) for v in getattr(explanation, phase).verdicts}


def test_highest_priority_registration_wins_and_ties_are_alphabetical(registered):
    low, high, tied = registered("low", priority=1), registered("zeta", priority=5), registered("beta", priority=5)
    assert explain("rms_norm", X).chosen == "beta"
    ejkernel.rms_norm(X)
    assert (len(low), len(high), len(tied)) == (0, 0, 1)


def test_argument_beats_use_beats_priority(registered):
    one, two = registered("one", priority=9), registered("two", priority=-1)
    with use("two"):
        assert explain("rms_norm", X).forward.setting == "use"
        ejkernel.rms_norm(X)
        ejkernel.rms_norm(X, platform="one")
        assert explain("rms_norm", X, platform="one").forward.setting == "argument"
    assert (len(one), len(two)) == (1, 1)


def test_platform_is_strict_and_a_tuple_is_an_order(registered):
    registered("refuses", supports=lambda call, target: "only on Sundays")
    taken = registered("takes")
    with pytest.raises(NoKernelError, match="only on Sundays"):
        ejkernel.rms_norm(X, platform="refuses")
    assert explain("rms_norm", X, platform=("refuses", "takes")).chosen == "takes"
    ejkernel.rms_norm(X, platform=("refuses", "takes"))
    assert len(taken) == 1


def test_a_variant_is_asked_for_by_its_id(registered):
    one, other = registered("many", variant="one"), registered("many", variant="other", priority=5)
    assert explain("rms_norm", X, platform="many").chosen == "many.other"
    assert explain("rms_norm", X, platform="many.one").chosen == "many.one"
    with use("many", forbid={"many.other"}):
        ejkernel.rms_norm(X)
    assert (len(one), len(other)) == (1, 0)


def test_all_reasons_are_reported(registered):
    registered("elsewhere", backend="tpu", supports=lambda call, target: "never asked")
    with use("xla", forbid={"elsewhere"}):
        verdict, reasons = verdicts(explain("rms_norm", X))["elsewhere"]
    assert verdict == "forbidden"
    assert reasons == (
        "runs on tpu, the target is cpu",
        "use asks for xla",
        "forbidden by use(...) or EJKERNEL_FORBID",
    )


def test_raising_supports_is_broken_not_unsupported(registered):
    def supports(call, target):
        raise KeyError("table")

    registered("faulty", supports=supports, priority=10)
    verdict, reasons = verdicts(explain("rms_norm", X))["faulty"]
    assert verdict == "broken"
    with pytest.warns(FallbackWarning, match=r"runs on xla: faulty: supports\(\) raised KeyError"):
        ejkernel.rms_norm(X)
    ejkernel.rms_norm(X + 1, epsilon=1e-5)  # warned of once, and warnings are errors here
    assert reasons == ("supports() raised KeyError: 'table'",)
    assert explain("rms_norm", X).chosen == "xla"


def test_leaving_an_accelerator_to_xla_is_warned_of(registered):
    registered("picky", backend="gpu", priority=50, supports=lambda call, target: "width 8 is odd")
    lowered = jax.jit(ejkernel.rms_norm).trace
    with use("xla", target="gpu:9.0"):
        lowered(X)
    with use(forbid={"triton", "cuda"}, target="gpu:9.0"), pytest.warns(FallbackWarning, match="picky: width 8 is odd"):
        lowered(X)


def test_forbid_adds_up_when_nested(registered):
    registered("a", priority=3)
    registered("b", priority=2)
    with use(forbid={"a"}):
        assert explain("rms_norm", X).chosen == "b"
        with use(forbid="b"):
            assert explain("rms_norm", X).chosen == "xla"
    assert explain("rms_norm", X).chosen == "a"


def test_asking_for_what_is_forbidden_is_a_contradiction():
    with use(forbid={"xla"}), pytest.raises(ValueError, match=r"platform: got xla, expected .* not forbidden"):
        ejkernel.rms_norm(X, platform="xla")


@pytest.mark.parametrize("argument", ["trition", "xlaa"])
def test_unknown_platform_gets_a_suggestion(argument):
    with pytest.raises(ValueError, match=r"did you mean '(triton|xla)'"):
        ejkernel.rms_norm(X, platform=argument)


def test_uninstalled_first_party_platform_says_how_to_install():
    if "cuda" in kernel_registry.list_platforms() or any(r.name == "cuda" for r in kernel_registry.records):
        pytest.skip("ejkernel-cuda is installed; without it the message would be checked")
    with pytest.raises(ValueError, match="pip install ejkernel-cuda"):
        ejkernel.rms_norm(X, platform="cuda")


def test_auto_cannot_be_combined():
    with pytest.raises(ValueError, match="'auto' alone"):
        ejkernel.rms_norm(X, platform=("auto", "xla"))


def test_a_misspelt_operation_of_the_platform_asked_for_is_named(site, python):
    site.plugin("acme", implementations="(Implementation('rms_nrom', 'acme_light:forward', backends=('any',)),)")
    code = """
        import ejkernel, jax.numpy
        ejkernel.rms_norm(jax.numpy.ones((2, 8)), platform="acme")
        """
    said = python(code, fails=True)
    assert "NoKernelError: rms_norm forward on cpu: nothing" in said
    assert "see `ejkernel doctor`. acme implements 'rms_nrom', which is no operation; did you mean 'rms_norm'?" in said


def test_unknown_operation_gets_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'rms_norm'"):
        explain("rmsnorm", X)


def test_use_retraces_an_already_compiled_function(registered):
    traced = registered("mine", priority=-1)
    function = jax.jit(lambda x: ejkernel.rms_norm(x))
    function(X)
    assert not traced
    with use("mine"):
        function(X)
    assert len(traced) == 1
    function(X)
    assert len(traced) == 1


def test_registering_retraces_an_already_compiled_function(registered):
    function = jax.jit(lambda x: ejkernel.rms_norm(x))
    function(X)
    traced = registered("late", priority=1)
    function(X)
    assert len(traced) == 1


def test_backward_keeps_the_settings_of_the_forward_call(registered):
    """The `with` block is over by the time the cotangent arrives."""
    backward = []
    traced = registered("both")

    @kernel_registry.register("rms_norm", "both", phase="backward")
    def _backward(call, inputs, outputs, cotangents, config):
        backward.append(call)
        return type(inputs)(cotangents.out * 0)

    try:
        with use("both"):
            _, pullback = jax.vjp(ejkernel.rms_norm, X)
        pullback(X)
    finally:
        kernel_registry.unregister("rms_norm", "both", phase="backward")
    assert traced[-1].save_residuals
    assert len(backward) == 1


def test_platform_without_backward_trains_with_anothers(registered):
    registered("forward_only")
    found = explain("rms_norm", X, platform="forward_only")
    assert found.chosen == "forward_only"
    assert found.backward.chosen.id == "xla"
    assert found.backward.setting == "priority"
    gradient = jax.grad(lambda x: (ejkernel.rms_norm(x, platform="forward_only") * jnp.arange(8.0)[None, None]).sum())(X * 2)
    expected = jax.grad(lambda x: (ejkernel.rms_norm(x, platform="xla") * jnp.arange(8.0)[None, None]).sum())(X * 2)
    assert jnp.allclose(gradient, expected, atol=1e-6)


def refuse(call, target):
    return "not of this shape"


def test_platform_whose_backward_refuses_the_call_trains_with_anothers(registered):
    """Its forward stays strict: what it refuses there runs nowhere else."""
    registered("picky")
    kernel_registry.register("rms_norm", "picky", phase="backward", supports=refuse)(lambda *_: 1 / 0)
    registered("pickier", supports=refuse)
    try:
        found = explain("rms_norm", X, platform="picky")
        assert (found.chosen, found.backward.chosen.id) == ("picky", "xla")
        assert "not of this shape" in str(found.backward)
        gradient = jax.grad(lambda x: (ejkernel.rms_norm(x, platform="picky") * jnp.arange(8.0)[None, None]).sum())(X * 2)
        expected = jax.grad(lambda x: (ejkernel.rms_norm(x, platform="xla") * jnp.arange(8.0)[None, None]).sum())(X * 2)
        assert jnp.allclose(gradient, expected, atol=1e-6)
        with pytest.raises(NoKernelError, match="not of this shape"):
            jax.grad(lambda x: ejkernel.rms_norm(x, platform="pickier").sum())(X)
    finally:
        kernel_registry.unregister("rms_norm", "picky", phase="backward")


def test_an_implementation_that_breaks_the_contract_is_named():
    @kernel_registry.register("rms_norm", "liar")
    def _forward(call, inputs, config):
        return ejkernel.operations.rms_norm.interface.RmsNormOutputs(inputs.x[:1])

    try:
        with pytest.raises(
            TypeError, match=r"liar \(forward\) breaks the contract of rms_norm: out: returned float32\[1,3,8\]"
        ):
            ejkernel.rms_norm(X, platform="liar")
    finally:
        kernel_registry.unregister("rms_norm", "liar")


def test_target_of_use_reaches_supports(registered):
    seen = []
    registered("gpu_only", backend="gpu", priority=99, supports=lambda call, target: seen.append(target))
    with use(target=Target("gpu", "NVIDIA H200", "9.0")):
        assert explain("rms_norm", X).chosen == "gpu_only"
    assert seen[-1].capability == (9, 0)
    assert explain("rms_norm", X).chosen == "xla"


def test_explanation_prints_and_serialises(registered):
    registered("other", priority=-1, supports=lambda call, target: "too small")
    found = explain("rms_norm", X, X[0, 0])
    text = str(found)
    assert text.startswith("rms_norm forward on cpu: xla (by priority)")
    assert "too small" in text
    data = found.to_dict()
    assert data["chosen"] == "xla"
    assert data["call"]["x"] == "float32[2,3,8]"
    assert {c["implementation"] for c in data["forward"]["candidates"]} >= {"xla", "other"}


def test_explanation_names_the_records_behind_the_order(registered):
    """Where the order decided, and was measured; what a user registered was not."""
    assert explain("rms_norm", X).forward.records == () and "measured" not in str(explain("rms_norm", X))
    with use(target=Target("gpu", "NVIDIA H200", "9.0"), forbid=("triton", "pallas", "cuda")):
        found = explain("gated_linear_unit", X, X)
        records = ("orders_grid_losses_more_h200.json", "orders_grid_losses_h200.json", "glu_sample_triton_h100.json")
        assert found.chosen == "xla" and found.forward.records == records
        assert f"\n  measured in {', '.join(records)}\n" in str(found)
        assert found.to_dict()["forward"]["records"] == [*records]
        assert explain("gated_linear_unit", X, X, platform="xla").forward.records == ()
        registered("own", backend="gpu", priority=99)
        assert explain("rms_norm", X).chosen == "own" and explain("rms_norm", X).forward.records == ()
    assert measured_in("triton", "rms_norm", "gpu") == ("rms_norm_h200.json",)
    assert measured_in("cuda.prefill", "paged_attention", "gpu") == (
        "orders_h100.json",
        "orders_grid_pages_h200.json",
        "orders_grid_pages_more_h200.json",
    )
    assert measured_in("triton", "scaled_matmul", "gpu") == ()


def test_explain_takes_shapes_and_computes_nothing(registered):
    traced = registered("never", priority=99)
    assert explain("rms_norm", jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)).chosen == "never"
    assert not traced


def test_explain_takes_a_public_function_too(registered):
    registered("one")
    assert explain(ejkernel.rms_norm, X).chosen == explain("rms_norm", X).chosen == "one"
    for other in (len, ejkernel.explain, 3):
        with pytest.raises((TypeError, ValueError), match=r"^operation: got .*, expected (a|the name of a) public function"):
            explain(other, X)


def test_explain_shows_what_the_call_itself_would_refuse():
    with pytest.raises(ValueError, match="scale: got shape"):
        explain("rms_norm", X, jnp.ones(3))


ENVIRONMENT = """
import jax.numpy as jnp, ejkernel
found = ejkernel.explain("rms_norm", jnp.ones((2, 4)))
print(found.chosen, found.forward.setting)
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"EJKERNEL_PLATFORM": "rms_norm=xla;*=xla"}, "xla environment"),
        ({"EJKERNEL_PLATFORM": "softmax=xla"}, "xla priority"),
        ({"EJKERNEL_PLATFORM": "xla"}, "xla environment"),
        ({"EJKERNEL_FORBID": "xla"}, "None priority"),
    ],
)
def test_environment(settings, expected):
    run = subprocess.run(
        [sys.executable, "-c", ENVIRONMENT], env={**os.environ, **settings}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == expected


def test_misspelled_environment_is_refused_with_its_name():
    run = subprocess.run(
        [sys.executable, "-c", ENVIRONMENT],
        env={**os.environ, "EJKERNEL_PLATFORM": "rms_nrom=xla"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "EJKERNEL_PLATFORM: got 'rms_nrom'" in run.stderr
    assert "did you mean 'rms_norm'" in run.stderr


def test_use_beats_the_environment(python):
    code = "import ejkernel as e, jax\nwith e.use('xla'):\n    print(e.explain('softmax', jax.numpy.ones(3)).forward.setting)"
    assert python(code, EJKERNEL_PLATFORM="xla").split()[-1] == "use"


def test_opaque_code_with_a_table_runs_on_an_auto_mesh():
    """JAX's custom_partitioning takes no code that holds arrays of its own."""
    table = np.linspace(1, 2, 8, dtype=np.float32)[None]

    def forward(call, inputs, config):
        rstd = 1 / jnp.sqrt(jnp.mean(inputs.x**2, -1) + call.epsilon)
        return RmsNormOutputs(inputs.x * rstd[..., None] * jnp.asarray(table), rstd if call.save_residuals else None)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.arange(1.0, 65).reshape(8, 8), NamedSharding(mesh, PartitionSpec("data")))
    kernel_registry.register("rms_norm", "tabular")(forward)
    try:
        with jax.set_mesh(mesh):
            got = jax.jit(lambda x: ejkernel.rms_norm(x, platform="tabular"))(x)
    finally:
        kernel_registry.unregister("rms_norm", "tabular")
    np.testing.assert_allclose(got, table * np.asarray(ejkernel.rms_norm(jax.device_get(x), platform="xla")), rtol=1e-6)
