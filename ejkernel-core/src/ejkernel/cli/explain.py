"""`ejkernel explain`: which implementation a call would get, and why not the others."""

from __future__ import annotations

import ast
import contextlib
import inspect
from typing import Annotated, Any

import typer

from ejkernel.cli.completion import complete_function, complete_platform
from ejkernel.cli.output import AsJson, UserError, console, emit, own_output, say, table, user_mistakes, verdict


def explain(
    operation: Annotated[
        str, typer.Argument(help="A public function, e.g. flash_attention.", autocompletion=complete_function)
    ],
    shape: Annotated[list[str] | None, typer.Option(help="An array argument: query=1,512,8,64:float32")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Any other argument: causal=true")] = None,
    case: Annotated[str | None, typer.Option(help="A named case of the operation, in place of shapes and options.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the case: float32, bfloat16 or float16.")] = None,
    platform: Annotated[
        str | None, typer.Option(help="As platform=: one name, or several with commas.", autocompletion=complete_platform)
    ] = None,
    target: Annotated[str | None, typer.Option(help="Explain for another device: cpu, gpu, gpu:9.0, tpu.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which implementation would run a call, status 1 if none would. Nothing is computed.

    Without shapes, of a case of the size that is benchmarked on the device.
    """
    if case is not None and (shape or option):
        raise UserError("--case: brings its own arrays and options; leave out --shape and --option")
    if dtype is not None and shape:
        raise UserError("--dtype: is of a case; write --shape name=sizes:dtype")
    chosen = tuple(platform.split(",")) if platform else None
    with user_mistakes(), own_output(), _target(target):
        if shape or option:
            about, explanation = "", _explain_call(operation, shape or [], option or [], chosen)
        else:
            about, explanation = _explain_case(operation, case, dtype, chosen)
    if as_json:
        emit(explanation.to_dict())
    else:
        _show(about, explanation)
    raise typer.Exit(0 if explanation.forward.chosen else 1)


def _show(about: str, explanation: Any) -> None:
    from ejkernel.utils.kernel_store import bundled_kernels, bundles

    screen = console()
    if about:
        say(screen, about, style="dim")
    call = ", ".join(f"{name}={value}" for name, value in explanation.to_dict()["call"].items())
    say(screen, f"{explanation.forward.operation}({call})")
    for decision in (explanation.forward, explanation.backward):
        _show_decision(screen, decision)
    for folder in bundles():
        say(screen, f"\n{len(bundled_kernels(folder))} compiled kernels are in {folder}", style="dim")


def _target(target: str | None) -> Any:
    if target is None:
        return contextlib.nullcontext()
    from ejkernel.call.policy import use

    return use(target=target)


def _explain_call(operation: str, shapes: list[str], options: list[str], platform: tuple[str, ...] | None) -> Any:
    from ejkernel._dispatch.explanation import explain

    arguments: dict[str, Any] = {}
    for text in shapes:
        name, value = parse_shape(text)
        _add(arguments, name, value)
    for text in options:
        name, value = parse_option(text)
        _add(arguments, name, value)
    if not shapes:
        raise _no_arrays(operation)
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


def _no_arrays(operation: str) -> UserError:
    """What to add to a call that is described without arrays."""
    from ejkernel._plugins.catalog import public_function

    parameters = inspect.signature(public_function(operation)).parameters.values()
    wanted = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return UserError(f"{operation}: got no arrays, expected --shape name=sizes:dtype for each of {', '.join(wanted)}")


def _explain_case(operation: str, case: str | None, dtype: str | None, platform: tuple[str, ...] | None) -> tuple[str, Any]:
    """What the case is, and the explanation of it."""
    from ejkernel._dispatch import explanation
    from ejkernel._pipeline.operation import get_operation
    from ejkernel._plugins.catalog import OPERATIONS
    from ejkernel.call.policy import policy_for_call
    from ejkernel.cli import cases
    from ejkernel.targets import resolve_target

    if case is None and operation not in OPERATIONS:
        raise _no_arrays(operation)
    backend = (policy_for_call(operation, None).target or resolve_target(())).backend
    known = cases.cases_of(operation)
    found = cases.usual_case(operation, backend) if case is None else cases.matching_cases(operation, [case])[0]
    dtype = dtype or ("bfloat16" if case is None and backend != "cpu" else "float32")
    about = f"the case {found.name}, one of {len(known)}; of your own: --shape name=sizes:dtype, --option name=value"
    with explanation.capture():
        try:
            get_operation(operation).invoke(cases.shapes(found, dtype), found.options, platform=platform)
        except explanation.Captured as captured:
            return "" if case else about, captured.explanation
    raise UserError(f"{operation}: does not dispatch")


def _show_decision(screen: Any, decision: Any) -> None:
    chosen = decision.chosen.id if decision.chosen else "nothing"
    screen.print()
    title = f"{decision.phase} on {decision.target}: {chosen}" + (f", by {decision.setting}" if decision.chosen else "")
    say(screen, title, style="bold")
    if decision.config is not None:
        say(screen, f"{decision.config} from {decision.tier}")
    for line in decision.quarantined:
        say(screen, f"quarantined: {line}")
    if decision.records:
        say(screen, f"measured in {', '.join(decision.records)}")
    rows = [(_name(v.candidate), verdict(v.verdict), "; ".join(v.reasons)) for v in decision.verdicts]
    rows += [(name, verdict(state), reason) for name, state, reason in decision.absent]
    if not rows:
        rows = [("-", "", "no installed plugin implements this phase")]
    screen.print(table(("implementation", "verdict", "reasons"), rows, wrap=("implementation", "reasons")))


def _name(candidate: Any) -> str:
    """The implementation; where its name does not say who brings it, that too."""
    origin = f" ({candidate.distribution} {candidate.version}".rstrip() + ")"
    return candidate.id + ("" if candidate.origin == "first-party" else origin)
