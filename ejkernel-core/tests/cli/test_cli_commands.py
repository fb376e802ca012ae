"""Commands of other distributions: found, listed without being imported, called, refused."""

from __future__ import annotations

import pytest

GREET = """
    import sys
    print("imported", file=sys.stderr)
    def greet(name: str, loud: bool = False) -> None:
        "Say hello."
        print("HELLO" if loud else "hello", name)
    """
APP = """
    import typer
    app = typer.Typer(help="Two commands.")
    @app.command()
    def first() -> None:
        print("first")
    @app.command()
    def second() -> None:
        raise typer.Exit(3)
    """
BROKEN = "raise RuntimeError('half written')"
NOTHING = "greet = 3"


@pytest.fixture
def command(site):
    """Add a distribution with one command."""

    def add(name: str, code: str = GREET, *, distribution: str = "", attribute: str = "greet") -> None:
        distribution = distribution or f"acme-{name}"
        module = f"{distribution.replace('-', '_')}_commands"
        site.add(distribution, f"{name} = {module}:{attribute}", {module: code}, group="ejkernel.commands")

    return add


def problems(answer) -> list[str]:
    return [row["problem"] for row in answer.json["problems"]]


def test_a_function_is_a_command(command, fresh_cli):
    command("greet")
    answer = fresh_cli("greet", "world", "--loud")
    assert (answer.status, answer.out) == (0, "HELLO world\n")
    assert "Say hello." in fresh_cli("greet", "--help").out
    mistake = fresh_cli("greet")
    assert mistake.status == 2 and "Missing argument" in mistake.err


def test_an_application_is_a_command(command, fresh_cli):
    command("pair", APP, attribute="app")
    assert fresh_cli("pair", "first").out == "first\n"
    assert fresh_cli("pair", "second").status == 3


def test_help_lists_commands_without_importing_them(command, fresh_cli):
    command("greet")
    command("sick", BROKEN)
    answer = fresh_cli("--help")
    assert answer.status == 0 and "imported" not in answer.err
    rows = [line.split(maxsplit=1) for line in answer.out.splitlines()]
    assert ["greet", "(from acme-greet 1.0)"] in rows and ["sick", "(from acme-sick 1.0)"] in rows


def test_doctor_examines_commands(command, fresh_cli):
    command("greet")
    answer = fresh_cli("doctor", "--json")
    found = {row["name"]: row for row in answer.json["commands"]}
    assert (found["greet"]["state"], found["greet"]["distribution"], found["greet"]["version"]) == ("ok", "acme-greet", "1.0")
    assert (answer.status, problems(answer)) == (0, [])


@pytest.mark.parametrize(
    ("code", "attribute", "reason"),
    [
        (BROKEN, "greet", "RuntimeError: half written"),
        ("raise SystemExit(0)", "greet", "SystemExit: 0"),
        (NOTHING, "absent", "AttributeError: module 'acme_sick_commands' has no attribute 'absent'"),
        (NOTHING, "greet", "TypeError: got int, expected a function or a typer.Typer"),
        ("def greet(what: int | str) -> None: ...", "greet", "AssertionError: Typer currently doesn't support Union types"),
    ],
)
def test_a_broken_command_is_reported(command, fresh_cli, code, attribute, reason):
    command("sick", code, attribute=attribute)
    called = fresh_cli("sick")
    expected = f"loading 'acme_sick_commands:{attribute}' raised {reason}"
    assert called.mistake == f"the command 'sick' of acme-sick 1.0 cannot be used, broken: {expected}"
    examined = fresh_cli("doctor", "--json")
    assert (examined.status, problems(examined)) == (1, [f"command sick (acme-sick 1.0) is broken: {expected}"])
    (sick,) = (row for row in examined.json["commands"] if row["name"] == "sick")
    assert "Traceback" in sick["traceback"]


def test_a_broken_command_harms_no_other(command, fresh_cli):
    command("sick", BROKEN)
    command("greet")
    assert fresh_cli("greet", "world").out == "hello world\n"
    assert fresh_cli("list", "--operation", "rms_norm").status == 0
    assert "RuntimeError: half written" in fresh_cli("doctor", "--verbose").out


def test_two_distributions_with_one_command(command, fresh_cli):
    for distribution in ("first-claimant", "second-claimant"):
        command("greet", distribution=distribution)
    called = fresh_cli("greet", "world")
    assert called.mistake == (
        "the command 'greet' of first-claimant 1.0 cannot be used, conflict: "
        "second-claimant 1.0 claims 'greet' too; uninstall all but one"
    )
    examined = fresh_cli("doctor", "--json")
    assert examined.status == 1
    assert len(problems(examined)) == 2 and all("is conflict: " in problem for problem in problems(examined))
    assert fresh_cli("--help").out.count("greet ") == 1


def test_core_keeps_its_commands(command, fresh_cli):
    command("list", distribution="impostor")
    listed = fresh_cli("list", "--operation", "rms_norm", "--json")
    assert listed.status == 0 and listed.json["operations"][0]["operation"] == "rms_norm"
    assert problems(fresh_cli("doctor", "--json")) == [
        "command list (impostor 1.0) is conflict: 'list' is a command of ejkernel-core"
    ]


def test_a_sibling_keeps_its_command(command, fresh_cli):
    command("bench", distribution="impostor")
    examined = fresh_cli("doctor", "--json")
    assert problems(examined) == ["command bench (impostor 1.0) is conflict: the name 'bench' belongs to ejkernel-bench"]
    assert "ejkernel-bench" in {row["distribution"] for row in examined.json["commands"] if row["state"] == "ok"}
    assert "Time our kernels" in fresh_cli("bench", "--help").out


def test_names_that_nobody_can_type(command, fresh_cli):
    command("Greet")
    (problem,) = problems(fresh_cli("doctor", "--json"))
    assert "got the name 'Greet', expected lower-case letters, digits and hyphens" in problem


@pytest.mark.parametrize(("name", "owner"), [("bench", "bench"), ("compile", "triton"), ("demo", "demo")])
def test_commands_that_are_not_installed_say_where_they_are(name, owner, cli, monkeypatch):
    monkeypatch.setattr("ejkernel.cli._commands.claims_of", lambda group: iter(()))
    expected = f"the command {name!r} comes with ejkernel-{owner}; install it with: pip install ejkernel-{owner}"
    assert cli(name, "--help").mistake == expected
    assert f"  {name} " not in cli("--help").out
