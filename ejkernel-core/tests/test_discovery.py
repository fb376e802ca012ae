"""Every state in which a plugin can end, and that none of them disturbs another plugin."""

from __future__ import annotations

import os
import signal
import sys
import warnings

import importlib_metadata
import jax
import pytest

from ejkernel._plugins.discovery import discover
from ejkernel.cli._commands import found_commands
from ejkernel.errors import PluginError, PluginWarning


def discovered():
    """The records by (platform, distribution), and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = discover()
    messages = [str(warning.message) for warning in caught if warning.category is PluginWarning]
    assert len(messages) == len(caught)
    return {(record.name, record.distribution): record for record in records}, messages


def only(state: str):
    """The single record and its single warning, which must name everything a user needs."""
    records, messages = discovered()
    ((_, record),) = records.items()
    (message,) = messages
    assert record.state == state
    for part in (repr(record.name), record.distribution, record.version, state, record.reason, "ejkernel doctor"):
        assert part in message
    return record


IMPLEMENTATION = "Implementation(operation='rms_norm', target='acme.norm:forward'{})"


def with_implementation(extra: str) -> str:
    return f"({IMPLEMENTATION.format(extra)},)"


def test_ok(sealed):
    sealed.plugin("acme", implementations=with_implementation(", backends=('cpu', 'gpu')"))
    records, messages = discovered()
    record = records["acme", "ejk-acme"]
    assert (record.state, record.version, record.value, record.reason) == ("ok", "1.0", "acme_light", "")
    assert record.plugin.implementations[0].target == "acme.norm:forward"
    assert messages == []
    assert not record.first_party
    assert record.to_dict()["state"] == "ok"
    assert 0 < record.seconds < 1


def test_nothing_installed(sealed):
    assert discovered() == ({}, [])


def test_module_gone(sealed):
    sealed.add("ejk-stale", "stale = stale_package._plugin", {})
    record = only("broken")
    assert "'stale_package', which its entry point names, does not exist" in record.reason
    assert "ModuleNotFoundError" in record.traceback


def test_missing_dependency_is_not_taken_for_a_stale_entry_point(sealed):
    sealed.add("ejk-needy", "needy = needy_light", {"needy_light": "import no_such_module_anywhere"})
    assert "No module named 'no_such_module_anywhere'" in only("broken").reason


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('half written')", "RuntimeError: half written"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError"),
        ("class Odd(BaseException): pass\nraise Odd('x')", "Odd: x"),
    ],
)
def test_import_raises(sealed, code, said):
    sealed.add("ejk-bad", "bad = bad_light", {"bad_light": code})
    record = only("broken")
    assert said in record.reason
    assert "bad_light" in record.traceback


def test_keyboard_interrupt_passes(sealed):
    sealed.add("ejk-bad", "bad = bad_light", {"bad_light": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        discover()


def test_two_raising_hooks_do_not_affect_others(sealed):
    raising = """
        from ejkernel.plugin import hookimpl
        @hookimpl
        def ejkernel_plugin():
            raise {}
        """
    sealed.add("ejk-one", "one = one_light", {"one_light": raising.format("ValueError('first')")})
    sealed.plugin("middle")
    sealed.add("ejk-two", "two = two_light", {"two_light": raising.format("SystemExit('second')")})
    records, messages = discovered()
    assert {name: record.state for (name, _), record in records.items()} == {"one": "broken", "middle": "ok", "two": "broken"}
    assert "ejkernel_plugin() raised ValueError: first" in records["one", "ejk-one"].reason
    assert "ejkernel_plugin() raised SystemExit: second" in records["two", "ejk-two"].reason
    assert len(messages) == 2


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", "does not answer the hook ejkernel_plugin"),
        ("@hookimpl\ndef ejkernel_plugin():\n    return {'name': 'odd'}", "returned dict, expected ejkernel.plugin.Plugin"),
        ("@hookimpl\ndef ejkernel_plugin(argument):\n    return None", "its hooks do not fit"),
        ("@hookimpl\ndef ejkernel_plugins():\n    return None", "its hooks do not fit: unknown hook 'ejkernel_plugins'"),
    ],
)
def test_hooks_that_do_not_fit(sealed, code, said):
    sealed.add("ejk-odd", "odd = odd_light", {"odd_light": "from ejkernel.plugin import hookimpl\n" + code})
    assert said in only("broken").reason


def test_name_differs_from_entry_point(sealed):
    sealed.plugin("acme", name="'other'")
    assert only("broken").reason == "it calls itself 'other', and its entry point says 'acme'"


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("9", "plugin API level 9, this ejkernel accepts 1 to 3; pip install --upgrade ejkernel-core"),
        ("0", "plugin API level 0, this ejkernel accepts 1 to 3; pip install --upgrade ejk-acme"),
    ],
)
def test_api_level(sealed, level, said):
    sealed.plugin("acme", api_level=level)
    assert said in only("incompatible").reason


def test_api_level_of_another_type(sealed):
    sealed.plugin("acme", api_level="'1'")
    assert "api_level: got '1', expected an int" in only("broken").reason


def test_requirement_missing(sealed):
    sealed.plugin("acme", requires="('acme_runtime', 'json')", versions="{'acme-runtime': '>=2,<3'}")
    record = only("missing requirement")
    assert record.reason == "module 'acme_runtime' is not installed; pip install 'acme-runtime>=2,<3'"
    assert record.plugin.name == "acme"


def test_distribution_missing(sealed):
    sealed.plugin("acme", versions="{'acme-runtime': '>=2'}")
    assert only("missing requirement").reason == "distribution 'acme-runtime' is not installed; pip install 'acme-runtime>=2'"


def test_requirements_are_found_without_being_imported(sealed):
    sealed.add("runtime", "", {"runtime.__init__": "raise AssertionError('imported')", "runtime.inner": "raise AssertionError"})
    sealed.plugin("acme", requires="('runtime', 'runtime.inner')")
    records, messages = discovered()
    assert (records["acme", "ejk-acme"].state, messages) == ("ok", [])


def test_part_of_a_requirement_missing(sealed):
    sealed.add("runtime", "", {"runtime.__init__": ""})
    sealed.plugin("acme", requires="('runtime.inner', 'xml.dom')")
    assert "module 'runtime.inner' is not installed" in only("missing requirement").reason


def test_version_does_not_fit(sealed):
    sealed.add("runtime", "", {"runtime": ""}, version="3.5.1")
    sealed.plugin("acme", requires="('runtime',)", versions="{'runtime': '>=3.6,<4'}")
    assert only("incompatible").reason == ("runtime 3.5.1 is installed, >=3.6,<4 is needed; pip install 'runtime>=3.6,<4'")


def test_version_fits(sealed):
    sealed.add("runtime", "", {"runtime": ""}, version="3.6.0+local")
    sealed.plugin("acme", versions="{'runtime': '>=3.6,<4'}")
    assert discovered()[0]["acme", "ejk-acme"].state == "ok"


def test_malformed_specifier(sealed):
    sealed.add("runtime", "", {"runtime": ""})
    sealed.plugin("acme", versions="{'runtime': 'newest'}")
    assert "its requirements cannot be read" in only("broken").reason


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (", phase='sideways'", "phase: got 'sideways', expected one of forward, backward"),
        (", backends='gpu'", "backends: got 'gpu'"),
        (", backends=('rocket',)", "backends: got ('rocket',)"),
        (", supports='acme.norm.supports'", "supports: got 'acme.norm.supports', expected 'package.module:attribute'"),
        (", supports=3", "supports: got int"),
        (", configs=dict", "configs: got type"),
        (", variant='A b'", "variant: got 'A b'"),
        (", priority='high'", "priority: got 'high', expected an int"),
        (", partitioning='mine'", "partitioning: got 'mine', expected one of native, opaque"),
    ],
)
def test_malformed_implementation(sealed, extra, said):
    sealed.plugin("acme", implementations=with_implementation(extra))
    assert f"implementations[0] ('rms_norm'): {said}" in only("broken").reason


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"implementations": "('rms_norm',)"}, "implementations[0]: got str, expected ejkernel.plugin.Implementation"),
        ({"implementations": "[]"}, "implementations: got list, expected a tuple"),
        ({"requires": "'triton'"}, "requires: got 'triton', expected a tuple of import names"),
        ({"versions": "('triton',)"}, "versions: got ('triton',), expected a mapping"),
        ({"implementations": "(Implementation(operation='rms_norm', target=None),)"}, "target: got NoneType"),
    ],
)
def test_malformed_plugin(sealed, fields, said):
    sealed.plugin("acme", **fields)
    assert said in only("broken").reason


def test_duplicate_implementations(sealed):
    one, other = IMPLEMENTATION.format(", backends=('gpu',)"), IMPLEMENTATION.format("")
    sealed.plugin("acme", implementations=f"({one}, {other})")
    assert "two implementations of rms_norm (forward) on any with no variant" in only("broken").reason


def test_one_implementation_per_backend_is_no_duplicate(sealed):
    one, other = IMPLEMENTATION.format(", backends=('gpu',)"), IMPLEMENTATION.format(", backends=('tpu',)")
    sealed.plugin("acme", implementations=f"({one}, {other}, {IMPLEMENTATION.format(', variant=chr(98)')})")
    assert len(discovered()[0]["acme", "ejk-acme"].plugin.implementations) == 3


TABLES = """
@hookimpl
def ejkernel_tuned_configs():
    return {}
"""


@pytest.mark.parametrize(
    ("answer", "said"),
    [("'a.json'", "returned str"), ("[3]", "returned [3], expected a list of paths"), ("1 / 0", "raised ZeroDivisionError")],
)
def test_malformed_tables(sealed, answer, said):
    sealed.plugin("acme", code=TABLES.format(answer))
    assert said in only("broken").reason


def test_tables(sealed):
    sealed.plugin("acme", code="import pathlib\n" + TABLES.format("['h100.json', pathlib.Path('dir') / 'a.json']"))
    assert discovered()[0]["acme", "ejk-acme"].tables == ("h100.json", "dir/a.json")


QUARANTINE = """
from ejkernel.plugin import Quarantine

@hookimpl
def ejkernel_quarantined_configs():
    return {}
"""
MISCOMPILED = "Quarantine('rms_norm', 'miscompiled', {'rows': '>=8'}, versions={'triton': '>=3.6,<3.7'}, capability='==9.0')"


def test_quarantine(sealed):
    sealed.plugin("acme", implementations=f"({IMPLEMENTATION.format('')},)", code=QUARANTINE.format(f"[{MISCOMPILED}]"))
    (record,) = discovered()[0]["acme", "ejk-acme"].quarantine
    assert (record.operation, record.reason, record.config, record.phase) == ("rms_norm", "miscompiled", {"rows": ">=8"}, None)
    assert (record.versions, record.capability) == ({"triton": ">=3.6,<3.7"}, "==9.0")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("'all'", "returned str, expected a list of Quarantine"),
        ("[3]", "[0]: got int, expected ejkernel.plugin.Quarantine"),
        ("[Quarantine('softmax', 'x')]", "'softmax' with variant '' is not an implementation of this plugin"),
        ("[Quarantine('rms_norm', '')]", "reason: got ''"),
        ("[Quarantine('rms_norm', 'x', ['rows'])]", "config: got list, expected a mapping"),
        ("[Quarantine('rms_norm', 'x', phase='both')]", "phase: got 'both'"),
        ("[Quarantine('rms_norm', 'x', capability='sm90')]", "got the specifier 'sm90'"),
        ("[Quarantine('rms_norm', 'x', versions={'triton': 3})]", "got the specifier 3"),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_malformed_quarantine(sealed, answer, said):
    sealed.plugin("acme", implementations=f"({IMPLEMENTATION.format('')},)", code=QUARANTINE.format(answer))
    assert said in only("broken").reason


def test_two_distributions_claim_one_name(sealed):
    sealed.plugin("acme", "one-acme")
    sealed.plugin("acme", "two-acme")
    sealed.plugin("other")
    records, messages = discovered()
    assert {key: record.state for key, record in records.items()} == {
        ("acme", "one-acme"): "conflict",
        ("acme", "two-acme"): "conflict",
        ("other", "ejk-other"): "ok",
    }
    assert "two-acme 1.0 claims the platform name 'acme' too" in records["acme", "one-acme"].reason
    assert "pip uninstall one-acme or pip uninstall two-acme" in records["acme", "one-acme"].reason
    assert len(messages) == 2


def test_first_party_name_stays_with_its_owner(sealed):
    """The package that would be imported is the installed one, beside core."""
    sealed.add("ejkernel-xla", "xla = ejkernel_xla._plugin", {})
    sealed.plugin("xla", "impostor")
    records, messages = discovered()
    assert records["xla", "impostor"].state == "conflict"
    assert records["xla", "ejkernel-xla"].state != "conflict"
    assert records["xla", "ejkernel-xla"].first_party
    assert not records["xla", "impostor"].first_party
    assert "the platform name 'xla' belongs to ejkernel-xla" in messages[-1]


def test_first_party_name_without_its_owner(sealed):
    sealed.plugin("triton", "impostor")
    assert "belongs to ejkernel-triton" in only("conflict").reason


def test_one_distribution_claims_a_name_twice(sealed):
    sealed.add("ejk-twice", "twice = a_light\ntwice = b_light", {})
    records, messages = discovered()
    assert [record.state for record in records.values()] == ["conflict"]
    assert all("more than once" in message for message in messages)


@pytest.mark.parametrize("name", ["auto", "Acme", "9lives", "a.b"])
def test_unusable_platform_names(sealed, name):
    sealed.add("ejk-odd", f"{name} = odd_light", {"odd_light": "raise AssertionError('imported')"})
    assert "the entry point's name" in only("broken").reason


def test_malformed_entry_point(sealed):
    sealed.add("ejk-odd", "odd = not a module", {})
    assert "its entry point names 'not a module'" in only("broken").reason


HEAD = "[ejkernel.plugins]\nacme = acme_light\n"
DAMAGED = {
    "cut head": HEAD.replace("]", ""),
    "head cut in the middle": "[console_scripts]\nacme = acme:main\n[ejkernel.plu",
    "signs before the head": "\ufeff" + HEAD,
    "blanks in the head": HEAD.replace("]", " ]"),
    "another case": HEAD.replace("ejkernel", "EJKernel"),
    "a letter missing": HEAD.replace("plugins", "plugin"),
    "an underscore": HEAD.replace(".", "_"),
    "no entry points": "[ejkernel.plugins]\n",
    "no name": "[ejkernel.plugins]\n = acme_light\n",
    "not UTF-8": HEAD.encode() + b"# \xff\xfe\n",
    "Latin-1 before it": b"[console_scripts]\n# caf\xe9\n" + HEAD.encode(),
    "UTF-16": HEAD.encode("utf-16"),
    "UTF-16 without a mark": HEAD.encode("utf-16-le"),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_plugin_whose_entry_points_are_damaged_is_reported(sealed, text):
    info = sealed.plugin("acme")
    sealed.plugin("other")
    (info / "entry_points.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    records, messages = discovered()
    assert records.pop(("other", "ejk-other")).state == "ok"
    ((key, record),) = records.items()
    assert (key[1], record.state, len(messages)) == ("ejk-acme", "broken", 1)
    assert "ejk-acme 1.0" in messages[0] and "ejkernel doctor" in messages[0]


@pytest.mark.parametrize(
    "damage", [lambda text: text.replace("]", ""), lambda text: text.encode("utf-16"), lambda text: "[ejkernel.com"]
)
def test_commands_whose_entry_points_are_damaged_are_reported(sealed, damage):
    info = sealed.add("acme-tools", "greet = acme_tools:greet", {}, group="ejkernel.commands")
    text = damage((info / "entry_points.txt").read_text())
    (info / "entry_points.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    ((name, state),) = [(command.name, command.state) for command in found_commands(())]
    assert (name, state) == ("acme-tools", "broken")
    assert discovered() == ({}, [])


@pytest.mark.parametrize(
    "text",
    [
        "[console_scripts]\nacme = ejkernel.plugins:main\n",
        "[ejkernel.plugins.extra]\nacme = acme\n",
        "[ejkernel.commands]\nacme = acme\n",
        "[ejkernel.others]\nacme = acme\n",
        "[acme.plugins]\nacme = acme\n",
        "[console_scripts\nacme = acme\n",
        b"[console_scripts]\n# caf\xe9\n",
    ],
)
def test_entry_points_of_other_groups_are_no_plugins(sealed, text):
    info = sealed.add("acme-other", "", {})
    (info / "entry_points.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert discovered() == ({}, [])


def test_metadata_in_another_encoding_still_names_the_distribution(sealed):
    info = sealed.plugin("acme")
    (info / "METADATA").write_bytes((info / "METADATA").read_bytes() + b"Author: Caf\xe9\n")
    assert discovered()[0]["acme", "ejk-acme"].state == "ok"


def test_an_implementation_of_a_misspelt_operation_is_warned_of(sealed):
    sealed.plugin("acme", implementations="(Implementation(operation='rms_nrom', target='acme.norm:forward'),)")
    records, (message,) = discovered()
    assert records["acme", "ejk-acme"].state == "ok"
    assert "'acme' (ejk-acme 1.0) implements 'rms_nrom', which is no operation; did you mean 'rms_norm'?" in message


CHANGES = {
    "XLA_FLAGS": "os.environ['XLA_FLAGS'] = '--xla_nonsense'",
    "a variable": "os.environ['ACME_HOME'] = 'x'",
    "a variable gone": "os.environ.pop('KEPT')",
    "x64": "jax.config.update('jax_enable_x64', True)",
    "precision": "jax.config.update('jax_default_matmul_precision', 'highest')",
    "any setting of JAX": "jax.config.update('jax_log_compiles', True)",
    "working directory": "os.chdir('/')",
    "warnings": "warnings.simplefilter('ignore')",
    "a signal": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
}
ENDS = {"raises": "raise RuntimeError('gone')", "exits": "raise SystemExit(3)", "is no Plugin": "return 3"}


def surroundings():
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return (environment, dict(jax.config.values), os.getcwd(), [*warnings.filters], signal.getsignal(signal.SIGTERM))


@pytest.fixture
def restored(sealed, monkeypatch):
    """Fails if anything that the program shares with plugins is another afterwards."""
    monkeypatch.setenv("KEPT", "1")
    before = surroundings()
    yield
    names = ("environment", "JAX", "directory", "warnings", "signals")
    assert [name for name, one, other in zip(names, before, surroundings(), strict=True) if one != other] == []


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_nothing_that_a_rejected_plugin_changed_stays(sealed, change, end):
    code = f"import os, signal, warnings, jax\n{change}\n@hookimpl\ndef ejkernel_plugin():\n    {{}}\n    {end}\n"
    sealed.add("ejk-import", "import = in_import", {"in_import": f"from ejkernel.plugin import *\n{code.format('')}"})
    late = f"from ejkernel.plugin import *\n{code.replace(change, '').format(change)}"
    sealed.add("ejk-hook", "hook = in_hook", {"in_hook": late})
    records, _ = discovered()
    assert [record.state for record in records.values()] == ["broken", "broken"]


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("name", ["XLA_FLAGS", "x64", "any setting of JAX", "working directory", "a signal"])
def test_a_plugin_that_changes_a_setting_is_rejected(sealed, name):
    sealed.plugin("acme", code=f"import os, signal, warnings, jax\n{CHANGES[name]}")
    assert "which is the user's; it was restored" in only("broken").reason


def test_a_variable_of_its_own_stays_with_a_plugin_that_is_accepted(sealed, monkeypatch):
    monkeypatch.setenv("ACME_HOME", "")
    sealed.plugin("acme", code="import os\nos.environ['ACME_HOME'] = 'x'")
    assert discovered()[0]["acme", "ejk-acme"].state == "ok"
    assert os.environ["ACME_HOME"] == "x"


def test_whatever_runs_while_answers_are_checked_is_contained(sealed):
    odd = "class Odd(str):\n    def __ne__(self, other):\n        raise SystemExit(3)"
    module = (
        f"from ejkernel.plugin import *\n{odd}\n@hookimpl\ndef ejkernel_plugin():\n    return Plugin(Odd('acme'), 2, 'x')\n"
    )
    sealed.add("ejk-acme", "acme = acme_light", {"acme_light": module})
    assert "SystemExit: 3" in only("broken").reason


def test_unreadable_entry_points_hurt_only_their_distribution(sealed):
    sealed.add("ejk-odd", "odd", {})
    sealed.plugin("acme")
    records, messages = discovered()
    assert records["acme", "ejk-acme"].state == "ok"
    assert records["ejk-odd", "ejk-odd"].state == "broken"
    assert len(messages) == 1


def test_shadowed_copy_does_not_count(sealed, tmp_path, monkeypatch):
    sealed.plugin("acme", version="2.0")
    hidden = type(sealed)(tmp_path / "later")
    hidden.plugin("acme", version="1.0")
    hidden.add("ejk-plain", "plain = plain_light", {"plain_light": "raise AssertionError"})
    sealed.add("ejk-plain", "", {}, version="2.0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(hidden.path)])
    records, messages = discovered()
    assert {key: record.version for key, record in records.items()} == {("acme", "ejk-acme"): "2.0"}
    assert messages == []


def test_remains_of_an_uninstallation_hide_nothing(sealed):
    sealed.add("ejk-acme", "", {}, version="0.9", metadata=False)
    sealed.plugin("acme")
    assert discovered()[0]["acme", "ejk-acme"].state == "ok"


@pytest.mark.parametrize("metadata", ["", "Metadata-Version: 2.1\nVersion: 1.0\n", None])
def test_metadata_without_a_name_is_reported(sealed, metadata):
    info = sealed.plugin("acme")
    sealed.plugin("other")
    if metadata is None:
        (info / "METADATA").unlink()
    else:
        (info / "METADATA").write_text(metadata)
    records, messages = discovered()
    assert records["other", "ejk-other"].state == "ok"
    record = records["ejk_acme-1.0.dist-info", "ejk_acme-1.0.dist-info"]
    assert record.state == "broken"
    assert "its METADATA is missing or names no distribution" in messages[0]


def test_two_versions_in_one_folder_are_reported(sealed):
    sealed.plugin("acme", version="2.0")
    sealed.add("ejk-acme", "acme = acme_light", {}, version="1.0")
    records = discover_twice_in_one_folder(sealed)
    assert sorted(record.state for record in records) == ["conflict", "ok"]


def test_a_version_that_another_one_hides_in_its_folder_is_reported(sealed):
    """Which of the two is found first is up to the file system."""
    sealed.plugin("acme", version="2.0")
    sealed.add("ejk-acme", "", {}, version="1.0")
    first = next(iter(importlib_metadata.distributions(name="ejk-acme"))).version
    if first == "2.0":
        assert [record.state for record in discovered()[0].values()] == ["ok"]
    else:
        assert [record.state for record in discover_twice_in_one_folder(sealed)] == ["conflict"]


def discover_twice_in_one_folder(sealed):
    """The records, of which one is in conflict and warned of."""
    with pytest.warns(PluginWarning) as caught:
        records = discover()
    (message,) = [str(warning.message) for warning in caught]
    assert f"lies in the same folder, {sealed.path}, and files of both are mixed" in message
    assert "pip install --force-reinstall ejk-acme" in message
    return records


def test_warnings_of_others_survive_a_plugin_that_silences_them(sealed):
    sealed.plugin("aaa", code="import warnings; warnings.simplefilter('ignore'); warnings.showwarning = print")
    sealed.plugin("future", api_level="99")
    assert len(discovered()[1]) == 1


def test_slow_import_is_warned_of(sealed):
    sealed.plugin("slow", code="import time; time.sleep(1.05)")
    (message,) = discovered()[1]
    assert "ejkernel plugin 'slow' (ejk-slow 1.0) takes 1." in message


@pytest.mark.parametrize("calls", ["None", "'call'", "(1,)", "['call']"])
def test_malformed_custom_calls(sealed, calls):
    sealed.plugin("acme", custom_calls=calls)
    assert "custom_calls: got" in only("broken").reason


def test_allow_list(sealed, monkeypatch):
    sealed.plugin("acme")
    sealed.add("ejk-bad", "bad = bad_light", {"bad_light": "raise AssertionError('imported')"})
    monkeypatch.setenv("EJKERNEL_PLUGINS", " ACME ,")
    records, messages = discovered()
    assert (records["acme", "ejk-acme"].state, records["bad", "ejk-bad"].state, messages) == ("ok", "disabled", [])
    assert records["bad", "ejk-bad"].reason == "EJKERNEL_PLUGINS does not name it"


def test_empty_allow_list_disables_all(sealed, monkeypatch):
    sealed.plugin("acme")
    monkeypatch.setenv("EJKERNEL_PLUGINS", "")
    records, messages = discovered()
    assert ([record.state for record in records.values()], messages) == (["disabled"], [])


def test_unknown_names_in_the_allow_list(sealed, monkeypatch):
    sealed.plugin("acme")
    monkeypatch.setenv("EJKERNEL_PLUGINS", "acm,triton")
    _, messages = discovered()
    assert messages == [
        "EJKERNEL_PLUGINS: got 'acm', expected the name of an installed plugin; did you mean 'acme'?",
        "EJKERNEL_PLUGINS: got 'triton', expected the name of an installed plugin; pip install ejkernel-triton",
    ]


@pytest.mark.parametrize(("value", "raises"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_strict(sealed, monkeypatch, value, raises):
    sealed.plugin("one", api_level="0")
    sealed.plugin("two", api_level="9")
    monkeypatch.setenv("EJKERNEL_STRICT", value)
    if not raises:
        assert len(discovered()[1]) == 2
        return
    with pytest.raises(PluginError, match=r"ejk-one 1\.0(.|\n)*ejk-two 1\.0"):
        discover()


def test_heavy_light_module_is_remarked(sealed):
    sealed.add("helper", "", {"weighty.__init__": ""})
    sealed.plugin("heavy", code="import weighty, json.tool")
    record = discovered()[0]["heavy", "ejk-heavy"]
    assert (record.state, record.heavy, record.slow) == ("ok", ("weighty",), True)


def test_slow_light_module_is_remarked(sealed):
    sealed.plugin("slow", code="import time; time.sleep(0.02)")
    record = discovered()[0]["slow", "ejk-slow"]
    assert (record.state, record.heavy, record.slow) == ("ok", (), True)
    assert record.seconds >= 0.02
