"""No plugin takes over a call that nobody asked it for, ends the program or changes it, whenever its code runs."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from conftest import plain_forward

import ejkernel
from ejkernel import EjkernelError, PluginError, explain, kernel_registry, tuning
from ejkernel._dispatch import lowered as _lowered
from ejkernel._plugins.containment import EndedError, contained
from ejkernel._plugins.records import PluginRecord
from ejkernel.errors import CacheWarning, FallbackWarning, NoConfigError
from ejkernel.plugin import ConfigSpace, Implementation, Plugin

X = jnp.ones((2, 8))

EVIL = """
import ejkernel
from ejkernel import kernel_registry

def evil(call, inputs, config):
    raise AssertionError("evil ran")
"""
ATTEMPTS = {
    "another platform": "kernel_registry.register('rms_norm', 'quiet', 'cpu', priority=10**9)(evil)",
    "a reserved name": "kernel_registry.register('rms_norm', 'xla', 'cpu', priority=10**9)(evil)",
    "unregister": "kernel_registry.unregister('rms_norm', 'mine')",
    "records": "kernel_registry.load(())",
    "caught": "import contextlib\nwith contextlib.suppress(Exception):\n    kernel_registry.register('rms_norm', 'quiet')(evil)",
    "a tuner": "ejkernel.tuning.install_tuner(object())",
    "entries": "ejkernel.tuning.remember()",
    "environment": "import os\nos.environ['EJKERNEL_PLATFORM'] = 'acme'",
}
CALL = """
import warnings
warnings.simplefilter("ignore")
import jax.numpy as jnp, ejkernel
found = ejkernel.explain("rms_norm", jnp.ones((2, 8)))
print(found.chosen, found.forward.setting)
for record in ejkernel.kernel_registry.records:
    if record.name == "acme":
        print(record.state, record.reason)
print(sorted({c.platform for c in ejkernel.kernel_registry.list_implementations("rms_norm") if c.origin == "registered"}))
"""


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
@pytest.mark.parametrize("where", ["import", "hook"])
def test_a_plugin_that_changes_what_others_dispatch_to_is_broken(site, python, where, attempt):
    indented = attempt.replace("\n", "\n    ")
    code = (
        f"{EVIL}\n{attempt}\n" if where == "import" else f"{EVIL}\n@hookimpl\ndef ejkernel_tuned_configs():\n    {indented}\n"
    )
    site.plugin("acme", code=code)
    said = python(CALL)
    assert said.startswith("xla priority\nbroken ")
    assert "PluginError" in said
    assert said.rstrip().endswith("[]")


def test_a_setting_that_a_plugin_enters_at_import_is_left_with_it(site, python):
    site.plugin("acme", code="import ejkernel\nejkernel.use(custom_gradients=False).__enter__()")
    said = python("import ejkernel\nfrom ejkernel.call.policy import current_policy\nprint(current_policy().custom_gradients)")
    assert said == "True\n"


THREADS = {
    "its function": "threading.Thread(target=later)",
    "no frame of its own": "threading.Thread(target=lambda f=kernel_registry.register: f('rms_norm', 'quiet')(evil))",
    "a timer": "threading.Timer(0.5, lambda: later())",
}


@pytest.mark.parametrize("thread", THREADS.values(), ids=THREADS)
def test_a_thread_of_a_plugin_registers_nothing(site, python, thread):
    code = f"""
import threading, time

def later():
    time.sleep(0.5)
    kernel_registry.register('rms_norm', 'quiet', priority=10**9)(evil)

threading.excepthook = lambda failed: print(failed.exc_type.__name__, flush=True)
{thread}.start()
"""
    site.plugin("acme", code=EVIL + code)
    said = python(CALL.replace("found =", "import time; time.sleep(1)\nfound ="))
    assert "PluginError" in said
    assert "[]" in said


def test_a_program_calls_a_plugins_package_that_registers(site, python):
    site.plugin("acme", code=EVIL + "def enable():\n    kernel_registry.register('rms_norm', 'quiet')(evil)")
    said = python("import ejkernel, acme_light\nacme_light.enable()", fails=True)
    assert (
        "PluginError: kernel_registry.register: refused, as it is for the user's program and ejk-acme brings a plugin" in said
    )


@pytest.mark.parametrize("platform", ["xla", "triton", "pallas", "cuda"])
def test_a_registration_never_bears_a_first_party_name(platform):
    with pytest.raises(ValueError, match=f"^platform: got '{platform}', expected a name of your own.*platform='mine'"):
        kernel_registry.register("rms_norm", platform, priority=10**9)
    kernel_registry.register("my_kernel", platform)(print)
    kernel_registry.unregister("my_kernel", platform)


@pytest.mark.parametrize("platform", ["xla.mine", "xla]", "auto", "XLA", ""])
def test_a_registration_has_the_name_of_a_platform(platform):
    with pytest.raises(ValueError, match=r"^platform: got .*, expected lower-case letters"):
        kernel_registry.register("rms_norm", platform)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"accepts": "scale"}, "accepts: got 'scale', expected a tuple"),
        ({"accepts": 3}, "accepts: got 3"),
        ({"supports": 3}, "supports: got int"),
        ({"variant": "A b"}, "variant: got 'A b'"),
        ({"priority": "high"}, "priority: got 'high'"),
        ({"plain_jax": "yes"}, "plain_jax: got 'yes', expected True or False"),
    ],
)
def test_a_malformed_registration_is_refused(record, said):
    with pytest.raises(ValueError, match=said):
        kernel_registry.register("rms_norm", "mine", **record)(print)


def test_a_registration_is_shown(registered):
    registered("mine", priority=3)
    assert "mine" in str(explain("rms_norm", X))
    assert "(this process)" in str(explain("rms_norm", X))


# supports()


@pytest.fixture
def third_party():
    """Adds a third party's implementation of rms_norm to what was discovered."""
    records = kernel_registry.records

    def add(**fields):
        fields.setdefault("target", lambda call, inputs, config: None)
        implementation = Implementation(operation="rms_norm", accepts=("scale",), **fields)
        plugin = Plugin("stranger", 2, "made up", implementations=(implementation,))
        kernel_registry.load([*records, PluginRecord("stranger", "ejk-stranger", "1.0", "stranger", "ok", plugin=plugin)])

    yield add
    kernel_registry.load(records)


def test_a_third_party_is_not_asked_before_it_is_wanted(third_party):
    asked = []
    third_party(supports=lambda call, target: asked.append(call))
    for options in ({}, {"platform": "xla"}):
        verdict = next(v for v in explain("rms_norm", X, **options).forward.verdicts if v.candidate.platform == "stranger")
        assert verdict.verdict == ("not asked for" if options else "opt-in")
    ejkernel.rms_norm(X)
    with ejkernel.use(forbid={"stranger"}):
        assert explain("rms_norm", X).chosen == "xla"
    assert asked == []
    assert explain("rms_norm", X, platform="stranger").chosen == "stranger"
    assert len(asked) == 1


class Odd(BaseException):
    """What plugins may raise too."""


class Unprintable(str):
    """A reason that cannot be shown."""

    def __repr__(self):
        raise SystemExit(3)


@pytest.mark.parametrize("error", [SystemExit(3), Odd("x"), GeneratorExit(), RecursionError("deep"), ImportError("gone")])
def test_whatever_supports_raises_is_contained(registered, error):
    def supports(call, target):
        raise error

    registered("faulty", supports=supports, priority=10)
    verdicts = {v.candidate.id: v for v in explain("rms_norm", X).forward.verdicts}
    assert (verdicts["faulty"].verdict, verdicts["xla"].verdict) == ("broken", "chosen")
    assert type(error).__name__ in verdicts["faulty"].reasons[0]


def test_keyboard_interrupt_in_supports_reaches_the_user(registered):
    def supports(call, target):
        raise KeyboardInterrupt

    registered("faulty", supports=supports)
    with pytest.raises(KeyboardInterrupt):
        explain("rms_norm", X)


@pytest.mark.parametrize("answer", [True, 0, {}, Unprintable, type("Mute", (), {"__repr__": lambda self: sys.exit(3)})()])
def test_supports_that_returns_something_else_is_broken(registered, answer):
    registered("faulty", supports=lambda call, target: answer, priority=10)
    verdict = next(v for v in explain("rms_norm", X).forward.verdicts if v.candidate.id == "faulty")
    assert verdict.verdict == "broken"
    assert f"supports() returned {type(answer).__name__}, expected None or a reason" in verdict.reasons


def test_supports_registers_nothing(registered):
    def supports(call, target):
        kernel_registry.register("softmax", "quiet")(print)

    registered("faulty", supports=supports, priority=10)
    with pytest.warns(FallbackWarning, match="PluginError: kernel_registry.register: refused"):
        ejkernel.rms_norm(X)
    assert "quiet" not in kernel_registry.list_platforms("softmax")


def test_settings_of_supports_and_kernels_end_with_them(registered, monkeypatch):
    def leak(*arguments):
        ejkernel.use("xla", custom_gradients=False).__enter__()

    registered("leaky", supports=leak, priority=10)
    assert explain("rms_norm", X).chosen == "leaky"
    assert explain("softmax", X).forward.setting == "priority"


# What kernels and configs do


def raising(error):
    def forward(call, inputs, config):
        raise error

    return forward


@pytest.fixture
def platform():
    """Registers a forward phase of rms_norm as `acme`."""

    def register(function, **record):
        kernel_registry.register("rms_norm", "acme", **record)(function)

    yield register
    kernel_registry.unregister("rms_norm", "acme")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, r"returned NoneType, contract says RmsNormOutputs\(out, rstd\)"),
        ({"out": X}, "returned dict, contract says RmsNormOutputs"),
        (X, "returned ArrayImpl, contract says RmsNormOutputs"),
        ((X, None), "returned tuple, contract says RmsNormOutputs"),
    ],
)
def test_a_kernel_that_returns_something_else_is_named(platform, answer, said):
    platform(lambda call, inputs, config: answer)
    with pytest.raises(TypeError, match=rf"acme \(forward\) breaks the contract of rms_norm: {said}"):
        ejkernel.rms_norm(X, platform="acme")


def test_a_kernel_that_returns_something_else_in_a_field_is_named(platform):
    from ejkernel.operations.rms_norm.interface import RmsNormOutputs

    platform(lambda call, inputs, config: RmsNormOutputs([1.0], None))
    with pytest.raises(TypeError, match="breaks the contract of rms_norm: out: returned list, contract says an array"):
        ejkernel.rms_norm(X, platform="acme")


def test_a_kernel_that_ends_the_process_ends_its_call(platform):
    platform(raising(SystemExit(3)))
    with pytest.raises(
        PluginError, match=r"acme \(rms_norm forward\) of 'acme', which this program registered raised SystemExit: 3"
    ):
        ejkernel.rms_norm(X, platform="acme")


def ends(*arguments):
    raise SystemExit(3)


@dataclasses.dataclass(frozen=True)
class Ends:
    """A config that ends the program where its knob is not the heuristic's."""

    rows: int = 1

    def __post_init__(self):
        if self.rows != 1:
            raise SystemExit(3)


def test_a_heuristic_that_ends_the_process_ends_its_call(platform):
    platform(print, configs=ConfigSpace(PluginRecord, ends, lambda call, target: []))
    with pytest.raises(NoConfigError, match="its heuristic raised SystemExit: 3"):
        ejkernel.rms_norm(X, platform="acme")


def test_a_search_space_that_ends_the_process_ends_its_tuning(platform):
    def lazy(call, target):
        yield Ends()
        raise SystemExit(3)

    platform(plain_forward, configs=ConfigSpace(Ends, lambda call, target: Ends(), lazy))
    with pytest.raises(NoConfigError, match="its search space raised SystemExit: 3"):
        ejkernel.autotune(lambda x: ejkernel.rms_norm(x, platform="acme"), X)


def test_a_config_that_ends_the_process_is_an_illegal_value(platform):
    platform(plain_forward, configs=ConfigSpace(Ends, lambda call, target: Ends(), lambda call, target: [Ends()]))
    with pytest.raises(ValueError, match=r"^cfg: got rows=2, expected legal values for Ends\(rows\); .*SystemExit: 3"):
        ejkernel.rms_norm(X, platform="acme", cfg={"rows": 2})
    entry = tuning.autotune(lambda x: ejkernel.rms_norm(x, platform="acme"), X).entries[0]
    result = tuning.AutotuningResult((dataclasses.replace(entry, config={"rows": 2}),))
    with result, pytest.warns(CacheWarning, match="stored config ignored: .*SystemExit: 3"):
        assert explain("rms_norm", X, platform="acme").forward.config == Ends()


@pytest.mark.parametrize(
    "error", ["raise SystemExit(3)", "raise KeyError('x')", "class Odd(BaseException): pass\nraise Odd('x')"]
)
@pytest.mark.parametrize("field", ["target", "supports", "configs", "lowered_from"])
def test_a_module_that_ends_the_process_is_named(tmp_path, monkeypatch, third_party, field, error):
    (tmp_path / "acme_ends.py").write_text(error)
    (tmp_path / "acme_norm.py").write_text("from conftest import plain_forward as forward\n")
    monkeypatch.syspath_prepend(tmp_path)
    third_party(**{"target": "acme_norm:forward", field: "acme_ends:anything"})
    with pytest.raises(EjkernelError) as raised:
        ejkernel.rms_norm(X, platform="stranger")
    assert "stranger" in str(raised.value) and error.split("(")[0].split()[-1].removesuffix(":") in str(raised.value)
    assert "acme_ends" not in sys.modules


@pytest.mark.parametrize("error", [SystemExit(5), GeneratorExit(), ValueError("no driver")])
def test_a_lowered_from_that_raises_is_named(tmp_path, monkeypatch, third_party, error):
    (tmp_path / "acme_norm.py").write_text("from conftest import plain_forward as forward\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_lowered, "_IMPORTED", float("inf"))  # the module is written after ejkernel was imported
    _lowered.digest.cache_clear()

    def lowered_from():
        raise error

    third_party(target="acme_norm:forward", lowered_from=lowered_from)
    with pytest.raises(PluginError, match=f"^stranger: lowered_from raised {type(error).__name__}.*choose another platform"):
        ejkernel.rms_norm(X, platform="stranger")


def test_code_of_another_operation_that_ends_the_process_is_named():
    kernel_registry.register("acme_own", "acme")(print)
    assert kernel_registry.get("acme_own") is print
    kernel_registry.unregister("acme_own", "acme")
    with pytest.raises(EndedError, match="SystemExit: 3"):
        contained("acme", ends)


def test_keyboard_interrupts_reach_the_user_from_anywhere():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        contained("acme", interrupted)


CHANGES = {
    "the environment variable XLA_FLAGS": lambda: os.environ.update(XLA_FLAGS="--xla_nonsense"),
    "the environment variable EJKERNEL_FORBID": lambda: os.environ.update(EJKERNEL_FORBID="xla"),
    "jax_enable_x64": lambda: jax.config.update("jax_enable_x64", True),
    "the working directory": lambda: os.chdir("/"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_an_answer_changes_is_restored(registered, monkeypatch, change):
    monkeypatch.delenv("EJKERNEL_FORBID", raising=False)
    before = dict(os.environ), dict(jax.config.values), os.getcwd()

    def supports(call, target):
        CHANGES[change]()

    registered("faulty", supports=supports, priority=10)
    verdict = next(v for v in explain("rms_norm", X).forward.verdicts if v.candidate.id == "faulty")
    assert (dict(os.environ), dict(jax.config.values), os.getcwd()) == before
    assert verdict.verdict == "broken"
    assert f"changed {change}, which is the user's; it was restored" in verdict.reasons[0]


def test_filters_of_warnings_that_an_answer_adds_are_dropped(registered):
    before = [*warnings.filters]
    registered("noisy", supports=lambda call, target: warnings.simplefilter("ignore"), priority=10)
    assert explain("rms_norm", X).chosen == "noisy"
    assert warnings.filters == before


# Distributions that bear our names

GENUINE = """
import ejkernel
for r in ejkernel.kernel_registry.records:
    print(r.name, r.distribution, r.version, r.state, r.reason)
"""


def test_an_impostor_with_another_module_is_refused(site, python):
    site.add("ejkernel-xla", "xla = evil_light", {"evil_light": "raise AssertionError('imported')"}, version="9.0")
    said = python("import warnings; warnings.simplefilter('ignore')\n" + GENUINE + "\n" + CALL)
    assert "xla ejkernel-xla 9.0 conflict its entry point names 'evil_light', and the plugin module of ejkernel-xla is" in said
    assert "xla priority" in said  # the genuine one, later on the path, still runs


@pytest.mark.parametrize("listed", [True, False])
def test_an_impostor_with_our_package_is_refused(site, python, listed):
    code = "from ejkernel.plugin import *\n@hookimpl\ndef ejkernel_plugin():\n    raise AssertionError('ran')\n"
    info = site.add(
        "ejkernel-xla", "xla = ejkernel_xla._plugin", {"ejkernel_xla.__init__": "", "ejkernel_xla._plugin": code}, version="9.0"
    )
    files = "ejkernel_xla/__init__.py,,\nejkernel_xla/_plugin.py,,\n" if listed else ""
    (info / "RECORD").write_text(f"{files}ejkernel_xla-9.0.dist-info/RECORD,,\n")
    said = python("import warnings; warnings.simplefilter('ignore')\n" + GENUINE)
    states = [line.split()[3] for line in said.splitlines() if line.startswith("xla ")]
    assert states
    assert {*states} == {"conflict"}
    assert str(site.path) in said
    assert "ran" not in said


# What discovery says


def test_printing_plugins_leave_the_standard_output_alone(site, python):
    site.plugin("acme", code="print('loud')\n@hookimpl\ndef ejkernel_tuned_configs():\n    print('louder')\n    return []")
    code = "import contextlib, io, sys\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    import ejkernel\n"
    said = python(code + "print(repr(out.getvalue()))")
    assert "''" in said
    assert "louder" in said


@pytest.mark.parametrize("plugins", ["", "demo"])
def test_what_is_installed_and_left_out_is_not_to_be_installed(python, plugins):
    code = "import ejkernel, jax.numpy as jnp\nejkernel.rms_norm(jnp.ones((2, 4)))"
    shown = python(code, fails=True, EJKERNEL_PLUGINS=plugins)
    assert "Add 'xla', which runs everywhere, to EJKERNEL_PLUGINS, or unset the variable" in shown
    assert "pip install" not in shown.partition("NoKernelError")[2]
