"""`import ejkernel` in fresh interpreters: cheap, without side effects, and proof against every plugin."""

from __future__ import annotations

import json

from ejkernel._plugins.records import PLUGIN_IMPORT_BUDGET

RUNS = 4
"""Timings are the best of so many processes, and processor time of the importing thread: other load must not count."""
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
"""Modules are compiled on their first import alone, as for users, whatever this machine has set."""


def test_budget_over_jax(python):
    timed = """
        import time
        import jax
        start = time.thread_time()
        import ejkernel
        print(time.thread_time() - start)
        """
    assert min(float(python(timed, **BYTECODE)) for _ in range(RUNS)) < 0.1


def test_budget_of_the_first_public_name(python):
    timed = """
        import time
        import jax.numpy
        import ejkernel
        start = time.thread_time()
        ejkernel.flash_attention
        print(time.thread_time() - start)
        """
    assert min(float(python(timed, **BYTECODE)) for _ in range(RUNS)) < 0.12


def test_dir_shows_public_names_alone(python):
    """Also after modules of core's own have become attributes of the package."""
    listed = "import ejkernel; ejkernel.rms_norm; print(*dir(ejkernel)); print(*ejkernel.__all__)"
    shown, exported = (line.split() for line in python(listed).splitlines())
    assert {"flash_attention", "FlashAttention", "explain", "masks", "tuning"} <= {*shown}
    assert {*exported} <= {*shown}
    assert [name for name in shown if name.startswith("_")] == ["__version__"]
    assert not {*shown} & {"Any", "annotations", "importlib", "call", "configs", "compositions", "targets"}


def test_first_public_name_imports_no_other_operation(python):
    listed = """
        import sys
        import ejkernel
        ejkernel.flash_attention
        print(*(name for name in sys.modules if name.startswith("ejkernel.operations.") and name.endswith(".interface")))
        """
    assert python(listed).split() == ["ejkernel.operations.flash_attention.interface"]


def test_budget_of_every_installed_light_module(python):
    timed = """
        import importlib, json, time
        import ejkernel  # with every plugin disabled, so that each is imported for the first time below
        spent = {}
        for record in ejkernel.kernel_registry.records:
            start = time.thread_time()
            importlib.import_module(record.value)
            spent[record.name] = time.thread_time() - start
        print(json.dumps(spent))
        """
    runs = [json.loads(python(timed, EJKERNEL_PLUGINS="", **BYTECODE)) for _ in range(RUNS)]
    assert "xla" in runs[0]
    for name in runs[0]:
        assert min(run[name] for run in runs) < PLUGIN_IMPORT_BUDGET, name


def test_installed_light_modules_import_nothing_heavy(python):
    listed = """
        import json
        import ejkernel
        print(json.dumps({record.name: record.heavy for record in ejkernel.kernel_registry.records if record.module}))
        """
    heavy = json.loads(python(listed, PYTHONWARNINGS="ignore"))
    assert "xla" in heavy
    assert not any(heavy.values()), heavy


def test_no_side_effects(python):
    """Audit hooks see every file opened for writing and every process; a device query would fail on this platform name."""
    output = python(
        """
        import os, sys
        import jax
        opened = []
        def watch(event, arguments):
            if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
                opened.append(arguments[0])
            elif event in ("os.mkdir", "os.rename", "os.remove", "os.putenv", "subprocess.Popen", "socket.connect"):
                opened.append((event, arguments))
        environment, config = dict(os.environ), dict(jax.config.values)
        sys.addaudithook(watch)
        import ejkernel
        assert ejkernel.kernel_registry.records, "nothing was discovered"
        assert not opened, opened
        assert dict(os.environ) == environment
        assert dict(jax.config.values) == config
        assert not os.listdir("."), os.listdir(".")
        try:
            jax.devices()
        except RuntimeError as error:
            print(error)
        """,
        JAX_PLATFORMS="nowhere",
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert "nowhere" in output


def test_plugin_that_exits_does_not_end_the_program(site, python):
    site.add("ejk-exit", "quitter = exit_light", {"exit_light": "raise SystemExit('gone')"})
    output = python("import ejkernel; print(ejkernel.kernel_registry.list_platforms())")
    assert "'xla'" in output
    assert output.count("PluginWarning") == 1
    assert "'quitter' (ejk-exit 1.0) cannot be used, broken: importing 'exit_light' raised SystemExit: gone" in output


def test_warning_points_at_the_import(site, python):
    site.plugin("old", api_level="0")
    output = python("x = 1\nimport ejkernel\n")
    assert "<string>:2: PluginWarning: ejkernel plugin 'old' (ejk-old 1.0) cannot be used, incompatible" in output


def test_strict_raises(site, python):
    site.plugin("old", api_level="0")
    output = python("import ejkernel", fails=True, EJKERNEL_STRICT="1", EJKERNEL_PLUGINS="old,xla")
    assert "PluginError: ejkernel plugin 'old' (ejk-old 1.0) cannot be used, incompatible" in output


def test_strict_command_line_reports(site, python):
    """`ejkernel doctor` under EJKERNEL_STRICT=1 is a report with status 1, any other command one line with status 2."""
    site.plugin("old", api_level="0")
    program = site.path / "bin" / "ejkernel"
    program.parent.mkdir()
    program.write_text("import sys\nfrom ejkernel_launcher import main\nsys.exit(main())\n")
    code = """
        import subprocess, sys
        for command, status in (("doctor", 1), ("list", 2)):
            done = subprocess.run([sys.executable, "-W", "ignore", "bin/ejkernel", command], capture_output=True, text=True)
            assert done.returncode == status, done
            print(done.stdout, done.stderr)
    """
    output = python(code, EJKERNEL_STRICT="1", COLUMNS="200")
    assert "plugin old (ejk-old 1.0) is incompatible" in output
    assert "\n ejkernel: ejkernel plugin 'old' (ejk-old 1.0) cannot be used, incompatible" in output
    assert "Traceback" not in output


def test_third_party_plugin_is_visible_but_opt_in(site, python):
    site.plugin(
        "acme",
        code="def forward(call, inputs, config):\n    raise RuntimeError('acme was called')",
        implementations="(Implementation(operation='rms_norm', target='acme_light:forward', priority=10**9),)",
    )
    output = python(
        """
        import jax.numpy as jnp
        import ejkernel
        x = jnp.ones((2, 8))
        explanation = ejkernel.explain("rms_norm", x)
        verdicts = {v.candidate.id: v.verdict for v in explanation.forward.verdicts}
        assert verdicts == {"xla": "chosen", "acme": "opt-in"}, verdicts
        assert float(ejkernel.rms_norm(x)[0, 0]) > 0.99
        try:
            ejkernel.rms_norm(x, platform="acme")
        except RuntimeError as error:
            print(error)
        """,
        EJKERNEL_PLUGINS="xla,acme",
    )
    assert output.strip() == "acme was called"


def test_a_first_program_is_traced_once(python):
    """Nothing that JAX keys compiled programs by comes into being while the first one is traced."""
    output = python(
        """
        import jax, jax.numpy as jnp
        import ejkernel
        traced = []
        def step(x):
            traced.append(x.shape)
            hidden = ejkernel.rms_norm(x)
            return ejkernel.flash_attention(hidden, hidden, hidden, causal=True).sum()
        for function in (jax.jit(step), jax.jit(jax.grad(step))):
            for _ in range(3):
                function(jnp.ones((1, 8, 2, 16)))
        print(len(traced))
        """,
        JAX_PLATFORMS="cpu",
    )
    assert output.split()[-1] == "2"
