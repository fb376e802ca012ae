"""`ejkernel explain`: which implementation a call would get, and why not the others."""

from __future__ import annotations

import ast
import contextlib
import importlib
from typing import Annotated, Any

import typer

from ejkernel.cli.output import AsJson, UserError, console, emit, own_output, table, user_mistakes, verdict


def explain(
    operation: Annotated[str, typer.Argument(help="A public function, e.g. flash_attention.")],
    shape: Annotated[list[str] | None, typer.Option(help="An array argument: query=1,512,8,64:float32")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Any other argument: causal=true")] = None,
    case: Annotated[str | None, typer.Option(help="A named case of the operation, in place of shapes and options.")] = None,
    platform: Annotated[str | None, typer.Option(help="As platform=: one name, or several with commas.")] = None,
    target: Annotated[str | None, typer.Option(help="Explain for another device: cpu, gpu, gpu:9.0, tpu.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which implementation would run a call. Nothing is computed."""
    if case is not None and (shape or option):
        raise UserError("--case: brings its own arrays and options; leave out --shape and --option")
    chosen = tuple(platform.split(",")) if platform else None
    with user_mistakes(), own_output(), _target(target):
        if case is not None:
            explanation = _explain_case(operation, case, chosen)
        else:
            explanation = _explain_call(operation, shape or [], option or [], chosen)
    if as_json:
        emit(explanation.to_dict())
        return
    screen = console()
    call = ", ".join(f"{name}={value}" for name, value in explanation.to_dict()["call"].items())
    screen.print(f"{explanation.forward.operation}({call})", markup=False, soft_wrap=True)
    for decision in (explanation.forward, explanation.backward):
        _show_decision(screen, decision)


def _target(target: str | None) -> Any:
    if target is None:
        return contextlib.nullcontext()
    from ejkernel.call.policy import use

    return use(target=target)


def _explain_call(operation: str, shapes: list[str], options: list[str], platform: tuple[str, ...] | None) -> Any:
    from ejkernel._dispatch.explanation import explain
    from ejkernel._plugins.catalog import public_function

    arguments: dict[str, Any] = {}
    for text in shapes:
        name, value = parse_shape(text)
        _add(arguments, name, value)
    for text in options:
        name, value = parse_option(text)
        _add(arguments, name, value)
    if not shapes:
        public_function(operation)
        raise UserError(f"{operation}: got no arrays, expected --shape name=sizes:dtype for each of them, or --case")
    return explain(operation, platform=platform, **arguments)


def _add(arguments: dict[str, Any], name: str, value: Any) -> None:
    if name in arguments:
        raise UserError(f"{name}: given twice")
    arguments[name] = value


def parse_shape(text: str) -> tuple[str, Any]:
    """`query=1,512,8,64:bfloat16` -> its name and a `ShapeDtypeStruct`; the dtype defaults to float32."""
    import jax
    import jax.numpy as jnp

    name, separator, rest = text.partition("=")
    sizes, colon, dtype = rest.partition(":")
    try:
        if not separator or not name.isidentifier():
            raise ValueError
        dims = tuple(int(size) for size in sizes.split(",")) if sizes.strip() else ()
        if any(size < 0 for size in dims):
            raise ValueError
        return name, jax.ShapeDtypeStruct(dims, jnp.dtype(dtype if colon else "float32"))
    except (ValueError, TypeError):
        raise UserError(f"--shape: got {text!r}, expected name=sizes:dtype, e.g. query=1,512,8,64:float32") from None


def parse_option(text: str) -> tuple[str, Any]:
    """`causal=true` -> its name and a Python value: true, false, none, numbers, tuples; anything else is a text."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise UserError(f"--option: got {text!r}, expected name=value, e.g. causal=true")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _explain_case(operation: str, case: str, platform: tuple[str, ...] | None) -> Any:
    import jax
    import numpy as np

    from ejkernel._dispatch import explanation
    from ejkernel.errors import invalid, suggestion
    from ejkernel.operations import get_operation

    found = get_operation(operation)
    cases = {known.name: known for known in importlib.import_module(f"ejkernel.operations.{operation}.cases").CASES}
    if case not in cases:
        raise invalid("--case", repr(case), f"one of {', '.join(cases)}" + suggestion(case, cases))
    arrays = cases[case].arrays(np.random.default_rng(0))
    specs = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), dict(arrays))
    with explanation.capture():
        try:
            found.invoke(specs, cases[case].options, platform=platform)
        except explanation.Captured as captured:
            return captured.explanation
    raise UserError(f"{operation}: does not dispatch")


def _show_decision(screen: Any, decision: Any) -> None:
    chosen = decision.chosen.id if decision.chosen else "nothing"
    title = f"{decision.phase} on {decision.target}: {chosen}" + (f", by {decision.setting}" if decision.chosen else "")
    screen.print()
    screen.print(title, style="bold", markup=False, soft_wrap=True)
    if decision.config is not None:
        screen.print(f"{decision.config} from {decision.tier}", markup=False, soft_wrap=True)
    for line in decision.quarantined:
        screen.print(f"quarantined: {line}", markup=False, soft_wrap=True)
    rows = [
        (v.candidate.id, verdict(v.verdict), f"{v.candidate.distribution} {v.candidate.version}".strip(), "; ".join(v.reasons))
        for v in decision.verdicts
    ]
    rows += [(name, verdict(state), "", reason) for name, state, reason in decision.absent]
    if not rows:
        rows = [("-", "", "", "no installed plugin implements this phase")]
    screen.print(table(("implementation", "verdict", "from", "reasons"), rows))
