"""A target that fails says whose it is; `EJKERNEL_LOG=dispatch` says what runs."""

from __future__ import annotations

CALL = """
    import jax.numpy as jnp
    import ejkernel
    try:
        ejkernel.rms_norm(jnp.ones((2, 8)), platform="acme")
    except Exception as error:
        print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", []), sep="\\n")
    """
WHO = "(rms_norm forward) of plugin 'acme' (ejk-acme 1.0, entry point acme = acme_light)"


def test_code_that_cannot_be_imported_names_plugin_distribution_and_entry_point(site, python):
    site.plugin("acme", implementations="(Implementation('rms_norm', 'acme_light:absent'),)")
    output = python(CALL, EJKERNEL_PLUGINS="xla,acme").splitlines()[0]  # JAX adds notes of its own
    assert output.startswith(f"PluginError: acme_light:absent {WHO} cannot be imported: AttributeError: ")
    assert output.endswith("see `ejkernel doctor`, or choose another platform")


def test_code_that_raises_keeps_its_error_and_says_whose_it_is(site, python):
    code = "def forward(call, inputs, config):\n    raise RuntimeError('out of registers')"
    site.plugin("acme", implementations="(Implementation('rms_norm', 'acme_light:forward'),)", code=code)
    output = python(CALL, EJKERNEL_PLUGINS="xla,acme").strip()
    assert output.splitlines()[:2] == ["RuntimeError: out of registers", f"raised in acme_light:forward {WHO}"]


def test_each_new_decision_is_logged_once(python):
    code = """
        import jax, jax.numpy as jnp
        import ejkernel
        for rows in (2, 2, 4):
            jax.grad(lambda x: ejkernel.rms_norm(x).sum())(jnp.ones((rows, 8)))
        """
    logged = [line for line in python(code, EJKERNEL_LOG="dispatch").splitlines() if "ejkernel.dispatch" in line]
    assert logged == [
        f"INFO ejkernel.dispatch: rms_norm {phase}(x=float32[{rows},8]) on cpu: xla by priority"
        for rows in (2, 4)
        for phase in ("forward", "backward")
    ]


def test_an_unknown_topic_is_refused(python):
    output = python("import jax.numpy as jnp, ejkernel; ejkernel.softmax(jnp.ones(4))", fails=True, EJKERNEL_LOG="dispach")
    assert "EJKERNEL_LOG: got 'dispach', expected one of dispatch; did you mean 'dispatch'?" in output
