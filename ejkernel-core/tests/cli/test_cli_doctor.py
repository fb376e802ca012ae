"""`ejkernel doctor`: what it says of healthy and of broken installations, and that nothing native takes it down."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from typing import Any

import pytest

from ejkernel import kernel_registry
from ejkernel._plugins.catalog import OPERATIONS
from ejkernel.cli import _probes, main
from ejkernel.cli._diagnosis import _PROBLEMS, known_combinations, missing_plugins
from ejkernel.cli._examination import _faster, _usual_request
from ejkernel.targets import Target

DIAGNOSE = "@hookimpl\ndef ejkernel_diagnose(report):\n    report('driver', '550.54')\n"


def problems(report: dict[str, Any]) -> str:
    return "\n".join(f"{row['problem']} -> {row['remedy']}" for row in report["problems"])


def test_healthy(site, fresh_cli):
    answer = fresh_cli("doctor", "--json")
    report = answer.json
    assert (answer.status, report["ok"], report["problems"]) == (0, True, [])
    assert set(report) == {
        *(
            "versions",
            "packs",
            "plugins",
            "registered",
            "commands",
            "settings",
            "unknown_settings",
            "foreign_distributions",
            "cache",
            "devices",
        ),
        *("references", "unknown_operations", "dispatch", "advice"),
        *("diagnoses", "known_combinations", "problems", "ok", "tested_jax"),
    }
    assert {"python", "ejkernel-core", "jax", "jaxlib", "numpy", "ejkernel-xla"} <= set(report["versions"])
    assert [p["state"] for p in report["plugins"] if p["name"] == "xla"] == ["ok"]
    assert report["devices"]["devices"][0]["platform"] == "cpu"
    assert report["devices"]["error"] is None
    assert report["cache"]["entries"] == 0


def test_it_prints_what_it_knows_while_probes_run(monkeypatch):
    """A slow device keeps nobody from reading versions and settings."""
    shown, waited = threading.Event(), []

    class Screen(io.StringIO):
        def flush(self) -> None:
            if "Settings" in self.getvalue():
                shown.set()

    def ask(questions: Any, timeout: float) -> list[Any]:
        waited.append(shown.wait(60))
        return [_probes.Answer([], None) for _ in questions]

    monkeypatch.setattr(_probes, "ask", ask)
    with contextlib.redirect_stdout(Screen()) as screen:
        main(["doctor"])
    assert waited == [True, True]
    assert screen.getvalue().index("Versions") < screen.getvalue().index("Settings") < screen.getvalue().index("Devices")


def test_what_runs_here(site, fresh_cli):
    served = {row["operation"]: row["chosen"] for row in fresh_cli("doctor", "--json").json["dispatch"]["operations"]}
    assert served == dict.fromkeys(OPERATIONS, "xla")


def test_misspelt_operations_and_code_that_is_not_there_are_problems(site, fresh_cli):
    """What `Healthy` was said of, although no call would reach it."""
    wrong = (
        "Implementation('rms_nrom', 'acme_light:forward'), Implementation('softmax', 'acme_light:absent', supports='gone:by')"
    )
    site.plugin("acme", implementations=f"({wrong},)", code="def forward(call, inputs, config): ...")
    answer = fresh_cli("doctor", "--json", EJKERNEL_PLUGINS="xla,acme")
    said = problems(answer.json)
    assert (answer.status, len(answer.json["problems"])) == (1, 3)
    assert "plugin acme (ejk-acme) implements 'rms_nrom', which is no operation; did you mean 'rms_norm'?" in said
    assert (
        "target 'acme_light:absent' of softmax (forward) cannot be imported: AttributeError: module 'acme_light' has no" in said
    )
    assert "supports 'gone:by' of softmax (forward) cannot be imported: ModuleNotFoundError: No module named 'gone'" in said


def test_nothing_that_can_run_is_a_problem(fresh_cli):
    answer = fresh_cli("doctor", "--json", EJKERNEL_PLUGINS="cuda")
    assert answer.status == 1
    assert problems(answer.json).startswith("no operation can run here: no usable plugin serves this device -> pip install")


def test_advice_names_what_is_missing_for_the_device():
    operations = [
        {"operation": "rms_norm", "chosen": "xla", "error": None, "faster": ["triton", "xla"], "backend": "gpu"},
        {"operation": "softmax", "chosen": "xla", "error": None, "faster": [], "backend": "gpu"},
    ]
    report = {"dispatch": {"operations": operations, "error": None}}
    records = [record for record in kernel_registry.records if record.name != "triton"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_registry, "_records", tuple(records))
        assert missing_plugins(report) == ["pip install ejkernel-triton: on this gpu it is faster for rms_norm"]


def test_the_default_order_says_who_is_faster():
    gpu = Target("gpu", "NVIDIA H200", "9.0")
    assert _faster(_usual_request("rms_norm", gpu), "xla") == ["cuda", "triton"]
    assert _faster(_usual_request("rms_norm", Target("cpu")), "xla") == []


def test_screen(site, fresh_cli):
    site.add("ejk-sick", "sick = sick_light", {"sick_light": "raise RuntimeError('no driver')"})
    answer = fresh_cli("doctor", "--verbose", EJKERNEL_PLATFROM="xla")
    assert answer.status == 1
    for expected in ("2 problems:", "RuntimeError: no driver", "Traceback", "did you mean 'EJKERNEL_PLATFORM'?"):
        assert expected in answer.out


def test_states_and_remedies(site, fresh_cli):
    site.add("ejk-sick", "sick = sick_light", {"sick_light": "raise RuntimeError('no driver')"})
    site.plugin("needy", requires="('no_such_module',)")
    site.plugin("future", api_level="99")
    answer = fresh_cli("doctor", "--json")
    states = {plugin["name"]: plugin["state"] for plugin in answer.json["plugins"]}
    expected = {"sick": "broken", "needy": "missing requirement", "future": "incompatible", "xla": "ok"}
    assert {name: states[name] for name in expected} == expected
    said = problems(answer.json)
    assert answer.status == 1
    assert len(answer.json["problems"]) == 3
    assert "no driver -> see `ejkernel doctor --verbose`" in said
    assert "pip install --upgrade ejk-future ejkernel-core" in said
    assert "no_such_module" in said
    (sick,) = (plugin for plugin in answer.json["plugins"] if plugin["name"] == "sick")
    assert "RuntimeError: no driver" in sick["traceback"]


def test_plugins_that_print_leave_json_alone(site, fresh_cli):
    hook = "@hookimpl\ndef ejkernel_tuned_configs():\n    print('louder')\n    return []"
    site.plugin("acme", code=f"print('loud')\n{hook}\ndef supports(call, target):\n    print('loudest')\n")
    site.add(
        "ejk-extra", "extra = extra_command:run", {"extra_command": "print('loud')\ndef run(): ..."}, group="ejkernel.commands"
    )
    answer = fresh_cli("doctor", "--json")
    assert answer.json["ok"]
    assert "louder" in answer.err


def test_a_slow_plugin_is_remarked(site, fresh_cli):
    site.plugin("slow", code="import time; time.sleep(0.1)")
    site.plugin("slower", code="import time; time.sleep(1.1)")
    answer = fresh_cli("doctor")
    assert "its plugin module takes 1" in answer.out
    assert "1 problem:" in answer.out
    assert "plugin slower takes 1." in answer.out


def test_what_is_registered_in_every_program_is_a_problem(site, fresh_cli):
    (site.path / "usual.py").write_text("def forward(call, inputs, config): ...")
    (site.path / "sitecustomize.py").write_text(
        "import ejkernel, usual\nejkernel.kernel_registry.register('rms_norm', 'usual', priority=9)(usual.forward)"
    )
    answer = fresh_cli("doctor", "--json")
    assert [row["code"] for row in answer.json["registered"]] == ["usual.forward"]
    assert "usual of rms_norm (forward) was registered at run time by usual.forward, in every program" in problems(answer.json)


def test_disabled_plugins_are_no_problem(site, fresh_cli):
    site.add("ejk-sick", "sick = sick_light", {"sick_light": "raise RuntimeError('no driver')"})
    answer = fresh_cli("doctor", "--json", EJKERNEL_PLUGINS="xla")
    assert (answer.status, problems(answer.json)) == (0, "")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"EJKERNEL_PLATFORM": "tritn"}, "EJKERNEL_PLATFORM: got 'tritn'"),
        ({"EJKERNEL_PLATFORM": "rms_norm=sick"}, "EJKERNEL_PLATFORM asks for sick, which cannot be used here"),
        ({"EJKERNEL_PLATFORM": "xla", "EJKERNEL_FORBID": "xla"}, "at least one platform that is not forbidden"),
        ({"EJKERNEL_PLUGINS": "xla,xlaa"}, "EJKERNEL_PLUGINS names 'xlaa', which is not installed; did you mean 'xla'?"),
        ({"EJKERNEL_CACHE_DIR": "/dev/null/nowhere"}, "tuning cache: /dev/null is not a folder"),
        ({"JAX_PLATFORMS": "nonsense"}, "jax.devices(): "),
    ],
)
def test_settings_that_cannot_work(site, fresh_cli, environment: dict[str, str], expected: str):
    site.add("ejk-sick", "sick = sick_light", {"sick_light": "raise RuntimeError('no driver')"})
    answer = fresh_cli("doctor", "--json", **environment)
    assert answer.status == 1
    assert expected in problems(answer.json)


@pytest.mark.skipif(os.name != "posix", reason="needs modes of files")
def test_a_cache_that_others_can_write_is_a_problem(fresh_cli, tmp_path):
    (place := tmp_path / "cache" / "kernels-triton").mkdir(parents=True)
    place.chmod(0o777)
    answer = fresh_cli("doctor", "--json", EJKERNEL_CACHE_DIR=str(place.parent))
    assert answer.status == 1
    assert f"cache: {place}: not used, as others than its owner can write to it (mode 0777)" in problems(answer.json)


def test_what_plugins_report(site, fresh_cli):
    site.plugin("acme", code=DIAGNOSE)
    site.plugin("crash", code=DIAGNOSE + "    import os, signal\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    site.plugin("raises", code=DIAGNOSE + "    raise RuntimeError('no licence')\n")
    answer = fresh_cli("doctor", "--json")
    driver = [{"name": "driver", "finding": "550.54"}]
    assert answer.status == 1
    expected = {
        "acme": {"findings": driver, "error": None},
        "crash": {"findings": driver, "error": "the probe was killed by SIGSEGV"},
        "raises": {"findings": driver, "error": "RuntimeError: no licence"},
    }
    assert {name: answer.json["diagnoses"][name] for name in expected} == expected


def test_foreign_distribution(site, fresh_cli):
    info = site.add("ejkernel", "", {}, version="0.0.78")
    (info / "RECORD").write_text("ejkernel/modules/__init__.py,,\n")
    answer = fresh_cli("doctor", "--json")
    assert answer.status == 1
    assert answer.json["foreign_distributions"] == [{"distribution": "ejkernel", "version": "0.0.78"}]
    assert "pip uninstall ejkernel && pip install" in problems(answer.json)


@pytest.mark.parametrize("broken", ["import no_such_module", "from ejkernel.errors import no_such_name"])
def test_a_foreign_distribution_that_replaced_our_files(site, python, broken):
    """Where not even the commands of ours can be imported any more."""
    info = site.add("ejkernel", "", {"ejkernel.__init__": broken, "ejkernel.errors": ""}, version="0.0.80")
    (info / "RECORD").write_text("ejkernel/__init__.py,,\nejkernel/errors.py,,\n")
    said = python(
        "import sys, ejkernel_launcher; sys.argv = ['ejkernel', 'doctor']; sys.exit(ejkernel_launcher.main())", fails=True
    )
    assert said.startswith("ejkernel: ejkernel replaced files of ejkernel-core (")
    assert "run: pip uninstall ejkernel, then install ejkernel-core again" in said
    assert said.count("\n") == 1


def test_foreign_distribution_of_another_name(site, fresh_cli):
    info = site.add("some-fork", "", {}, version="2.0")
    (info / "RECORD").write_text("other/__init__.py,,\nejkernel/kernels/a.py,,\n")
    harmless = site.add("ejkernel-extras", "", {}, version="1.0")
    (harmless / "RECORD").write_text("ejkernel_extras/__init__.py,,\n")
    report = fresh_cli("doctor", "--json").json
    assert report["foreign_distributions"] == [{"distribution": "some-fork", "version": "2.0"}]


def test_bad_combination_is_a_problem():
    versions = {"jax": "0.12.0.1", "jax-triton": "0.4.1"}
    report = {"versions": versions, "known_combinations": known_combinations(versions)}
    (find,) = (find for find in _PROBLEMS if find.__name__ == "_version_problems")
    (problem,) = find(report)
    assert problem["problem"].startswith("jax-triton 0.4.1 with jax 0.12.0.1: ")
    assert "jax-triton==0.3.1" in problem["remedy"]


PROCESS = "import os\ntell({'process': os.getpid(), 'argument': argument})\n"


def test_one_subprocess_answers_all_questions():
    answers = _probes.ask([_probes.Question(PROCESS, "a"), _probes.Question(PROCESS, "b"), _probes.Question("", "")])
    first, second, third = answers
    assert [answer.error for answer in answers] == [None] * 3
    assert (first.told[0]["argument"], second.told[0]["argument"], third.told) == ("a", "b", [])
    assert first.told[0]["process"] == second.told[0]["process"]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("import time\ntime.sleep(60)", "no answer within 2 s"),
        ("os.kill(os.getpid(), 11)", "the probe was killed by SIGSEGV"),
        ("raise OSError('no device')", "OSError: no device"),
        ("os._exit(0)", "the probe ended with status 0"),
        ("raise SystemExit", "the probe ended with status 0"),
    ],
    ids=["hang", "crash", "error", "end", "exit"],
)
@pytest.mark.unsampled
def test_a_probe_that_ends_keeps_what_it_told_and_spoils_no_other(end, expected):
    """What fails was asked first in its subprocess, and what comes after it is asked in another one."""
    start = time.monotonic()
    before, fatal, after = _probes.ask(
        [_probes.Question(PROCESS), _probes.Question(PROCESS + end), _probes.Question(PROCESS)], 2
    )
    assert (before.error, fatal.error, after.error) == (None, expected, None)
    assert len({answer.told[0]["process"] for answer in (before, fatal, after)}) == 3
    assert time.monotonic() - start < 20
