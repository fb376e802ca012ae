"""What is accepted does not depend on what was called before: 1 == True == 1.0 as keys of programs, not as arguments."""

from __future__ import annotations

import pytest

PAIRS = {
    "bool": ("flash_attention", "q, q, q", "causal", "True", "1"),
    "float for bool": ("flash_attention", "q, q, q", "causal", "False", "0.0"),
    "in a tuple": ("flash_attention", "q, q, q", "sliding_window", "(1, 1)", "(True, 1)"),
    "float for int": ("flash_attention", "q, q, q", "chunk_size", "2", "2.0"),
    "axis": ("softmax", "q", "axis", "1", "True"),
}


@pytest.mark.parametrize(("function", "arrays", "option", "good", "bad"), PAIRS.values(), ids=PAIRS)
def test_a_refusal_does_not_depend_on_history(python, function, arrays, option, good, bad):
    said = python(f"""
        import ejkernel, jax.numpy as jnp
        q = jnp.ones((1, 4, 2, 8))
        def call(value):
            try:
                ejkernel.{function}({arrays}, {option}=value)
            except (TypeError, ValueError) as error:
                return type(error).__name__
        print([call({bad}), call({good}), call({bad})])
        """)
    first, second, third = said.strip().strip("[]").replace("'", "").split(", ")
    assert second == "None"
    assert first == third != "None"


def test_a_config_is_refused_whatever_was_called_before(python):
    said = python("""
        import dataclasses, ejkernel, jax.numpy as jnp
        from ejkernel.plugin import ConfigSpace
        from ejkernel.operations.rms_norm.interface import RmsNormOutputs
        @dataclasses.dataclass(frozen=True)
        class Knobs:
            rows: int = 1
        space = ConfigSpace(Knobs, lambda call, target: Knobs(), lambda call, target: [Knobs()])
        @ejkernel.kernel_registry.register("rms_norm", "mine", configs=space)
        def forward(call, inputs, config):
            return RmsNormOutputs(inputs.x, None)
        x = jnp.ones((2, 8))
        ejkernel.rms_norm(x, platform="mine", cfg={"rows": 1})
        for rows in (1.0, True):
            try:
                ejkernel.rms_norm(x, platform="mine", cfg={"rows": rows})
            except TypeError as error:
                print(error)
        """)
    assert said.count("expected int there") == 2
