"""Real wheels in fresh virtual environments: what a user gets with core alone, with each platform, and with bad company."""

from __future__ import annotations

import json

import pytest

from ejkernel.plugin import FIRST_PARTY

CALL = """
    import jax.numpy as jnp
    import ejkernel
    print(*ejkernel.rms_norm(jnp.array([3.0, 4.0]), epsilon=0.0).tolist())
    """
EXPECTED = "0.8485281"  # 3 / sqrt((9 + 16) / 2)

RECORDS = """
    import json
    import ejkernel
    print(json.dumps([record.to_dict() for record in ejkernel.kernel_registry.records]))
    """

WORKING = """
    from ejkernel.plugin import Plugin, hookimpl
    @hookimpl
    def ejkernel_plugin():
        return Plugin(name="shared", api_level=1, summary="made up")
    """


def records(environment, **settings):
    lines = environment.run(RECORDS, **settings).splitlines()
    found = json.loads(next(line for line in lines if line.startswith("[")))
    return {(record["name"], record["distribution"]): record for record in found}, lines


def test_core_alone(root, environment):
    output = environment(root / "ejkernel-core").run(
        """
        import jax.numpy as jnp
        import ejkernel
        assert ejkernel.kernel_registry.records == ()
        try:
            ejkernel.rms_norm(jnp.ones(4))
        except ejkernel.NoKernelError as error:
            print(error)
        try:
            ejkernel.rms_norm(jnp.ones(4), platform="triton")
        except ValueError as error:
            print(error)
        """
    )
    assert "no plugin implements it" in output
    assert "`pip install ejkernel-xla` runs everywhere" in output
    assert "platform: got 'triton', expected an installed platform; pip install ejkernel-triton" in output


@pytest.mark.parametrize("platform", FIRST_PARTY)
def test_core_and_one_platform(root, environment, platform):
    name = FIRST_PARTY[platform]
    made = environment(root / "ejkernel-core", root / name)
    found, lines = records(made, PYTHONWARNINGS="default")
    record = found.pop((platform, name))
    assert found == {}
    assert record["first_party"]
    assert record["heavy"] == []
    if record["state"] == "missing requirement":  # a GPU library that this machine does not have
        assert "pip install" in record["reason"]
        assert sum("PluginWarning" in line for line in lines) == 1
    else:
        assert (record["state"], record["reason"], len(lines)) == ("ok", "", 1)


COMMANDS = """
    import contextlib, io, json
    from ejkernel.cli import main
    def run(*arguments):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
        return status, out.getvalue(), err.getvalue()
    """


def test_commands_that_are_not_installed(root, environment):
    environment(root / "ejkernel-core", root / "ejkernel-xla").run(
        COMMANDS
        + """
    for name in ("bench", "demo"):
        status, out, err = run(name)
        needs = f"the command {name!r} comes with ejkernel-{name}; install it with: pip install ejkernel-{name}"
        assert (status, out, err) == (2, "", f"ejkernel: {needs}\\n"), err
    """
    )


def test_commands_that_are_installed(root, environment):
    environment(root / "ejkernel-core", root / "ejkernel-xla", root / "benchmarks", root / "examples" / "demo").run(
        COMMANDS
        + """
    import sys
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    assert "(from ejkernel-bench 0.1.0)" in out and "(from ejkernel-demo 0.1.0)" in out
    assert not [name for name in sys.modules if name.startswith(("ejkernel_bench", "ejkernel_demo", "matplotlib"))]
    status, out, err = run("bench", "softmax", "--size", "cpu", "--list", "--json")
    assert status == 0 and {case["operation"] for case in json.loads(out)["cases"]} == {"softmax"}
    status, out, err = run("demo", "--steps", "2", "--no-compare", "--json")
    assert status == 0 and json.loads(out)["ok"], err
    """
    )


def test_core_and_xla_compute(root, environment):
    made = environment(root / "ejkernel-core", root / "ejkernel-xla")
    assert made.run(CALL).startswith(EXPECTED)


def test_broken_plugin_beside_xla(root, environment, source):
    half = source("half-done", "half", "raise RuntimeError('half written')")
    made = environment(root / "ejkernel-core", root / "ejkernel-xla", half)
    output = made.run(CALL, PYTHONWARNINGS="default")
    assert EXPECTED in output
    assert output.count("PluginWarning") == 1
    assert "'half' (half-done 1.0) cannot be used, broken: importing 'half_done._plugin' raised RuntimeError" in output
    found, _ = records(made, PYTHONWARNINGS="ignore")
    assert found["half", "half-done"]["traceback"].rstrip().endswith("RuntimeError: half written")


def test_two_distributions_claim_one_name(root, environment, source):
    one, two = (source(f"{number}-claimant", "shared", WORKING) for number in ("first", "second"))
    found, lines = records(environment(root / "ejkernel-core", root / "ejkernel-xla", one, two), PYTHONWARNINGS="default")
    assert {key: record["state"] for key, record in found.items()} == {
        ("xla", "ejkernel-xla"): "ok",
        ("shared", "first-claimant"): "conflict",
        ("shared", "second-claimant"): "conflict",
    }
    assert sum("PluginWarning" in line for line in lines) == 2


def test_impostor_does_not_take_a_first_party_name(root, environment, source):
    impostor = source("impostor", "xla", WORKING)
    made = environment(root / "ejkernel-core", root / "ejkernel-xla", impostor)
    output = made.run(CALL, PYTHONWARNINGS="default")
    assert EXPECTED in output
    assert "'xla' (impostor 1.0) cannot be used, conflict: the platform name 'xla' belongs to ejkernel-xla" in output


def test_third_party_is_visible_but_opt_in(root, environment):
    acme = root / "examples" / "acme-ejkernel"
    output = environment(root / "ejkernel-core", root / "ejkernel-xla", acme).run(
        """
        import jax
        import jax.numpy as jnp
        import ejkernel
        x = jnp.array([3.0, 4.0])
        print(ejkernel.kernel_registry.list_platforms())
        print(ejkernel.explain("rms_norm", x))
        def program(**choice):
            return jax.jit(lambda x: ejkernel.rms_norm(x, epsilon=0.0, **choice)).lower(x).compile().as_text()
        assert "[xla]" in program() and "[acme]" not in program()
        assert "[acme]" in program(platform="acme") and "[xla]" not in program(platform="acme")
        with ejkernel.use("acme"):
            print(*ejkernel.rms_norm(x, epsilon=0.0).tolist())
        """
    )
    assert "['acme', 'xla']" in output
    assert "third party: ask for platform='acme'" in output
    assert EXPECTED in output
