"""What holds for the repository as a whole."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lightning_dist

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_dist"
BELOW_THE_STRATEGIES = (
    "parallel",
    "checkpoint",
    "telemetry",
    "advisor",
    "record",
    "rules",
    "plan",
    "layout.py",
    "_compat.py",
)


def tracked_files() -> list[Path]:
    """The files under version control, without links."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout: nothing says which files belong to it")
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_imports_point_one_way():
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout


def mentions_of_the_trainer(source: str) -> list[int]:
    """The lines that import Lightning's Trainer, or reach for it through a module."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {alias.name for alias in node.names}
            of_lightning = module.split(".")[0] in ("lightning", "pytorch_lightning")
            if of_lightning and ("Trainer" in names or module.endswith(".trainer.trainer")):
                lines.append(node.lineno)
        elif isinstance(node, ast.Attribute) and node.attr == "Trainer":
            lines.append(node.lineno)
    return lines


def test_nothing_below_the_strategies_needs_lightnings_trainer():
    found = []
    for name in BELOW_THE_STRATEGIES:
        path = PACKAGE / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found += [f"{file.relative_to(ROOT)}:{line}" for line in mentions_of_the_trainer(file.read_text())]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "from lightning import Trainer",
        "from lightning.pytorch import LightningModule, Trainer as T",
        "from lightning.pytorch.trainer.trainer import Trainer",
        "import lightning as L\ndef f():\n    return L.Trainer()",
    ],
)
def test_the_search_for_the_trainer_finds_it(source):
    assert mentions_of_the_trainer(source)


@pytest.mark.parametrize("name", ["strategies", "callbacks"])
def test_the_doors_at_the_root_are_links_into_the_package(name):
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("lightning_dist") / name
    assert (link / "__init__.py").samefile(PACKAGE / name / "__init__.py")


def test_the_version_stands_in_one_place():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in settings["project"] and "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lightning_dist.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", lightning_dist.__version__)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] in (lightning_dist.__version__, "Unreleased")


def test_every_requirement_has_a_tested_version():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [settings["dependencies"], *settings["optional-dependencies"].values()]
    required = {re.split(r"[\[<>=!~;]", requirement)[0].strip().lower() for group in groups for requirement in group}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    assert all(re.fullmatch(r"[a-z0-9-]+==[^+=]+", line) for line in lines if line and not line.startswith("#"))
    assert required - {"lightning-dist"} <= tested


@pytest.mark.slow
def test_importing_the_package_adds_little_to_lightning():
    """At most 0.3 s (on a slow machine: a tenth) beyond Lightning itself, in the best of five: noise only adds."""
    code = (
        "import time; a = time.perf_counter(); import lightning; b = time.perf_counter(); import lightning_dist;"
        "print(b - a, time.perf_counter() - b)"
    )
    measured = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        lightning_seconds, own_seconds = map(float, done.stdout.split())
        measured.append((own_seconds, lightning_seconds))
        if own_seconds <= max(0.3, 0.1 * lightning_seconds):
            return
    pytest.fail(f"import lightning_dist took too long; (its seconds, Lightning's seconds): {measured}")


@pytest.mark.slow
def test_importing_the_package_starts_and_loads_nothing_heavy():
    """fairscale, transformers, TensorBoard and the command line's packages come when they are used."""
    code = "import sys, lightning; before = set(sys.modules); import lightning_dist; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    added = {name.split(".")[0] for name in done.stdout.split()}
    assert not added & {"fairscale", "transformers", "tensorboard", "typer", "pandas", "tensorflow"}


def test_no_file_names_a_machine_or_a_registry():
    """Folders of somebody's machine and hosts of package registries have no place in what everybody reads."""
    forbidden = re.compile(
        r"(?<![\w.\-/])/(?:root|home|work|Users)/\w|(?:pypi|pythonhosted|download\.pytorch)\.org|--(?:extra-)?index-url"
    )
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}" for number, line in enumerate(lines, 1) if forbidden.search(line)
        ]
    assert not found
