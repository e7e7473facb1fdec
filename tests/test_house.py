"""The plan of the house: who may import whom, and that examples and the package itself run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "mirrorhead"

# A module imports only from those above it, within a folder too.
ORDER = [
    "version",
    "files",
    "backends",
    "compiled",
    "potential",
    "losses",
    "attention",
    "data.errors",
    "data.transfer",
    "data.sources",
    "data.texts",
    "data.imdb",
    "data.cad",
    "data.eraser",
    "data.cifar10",
    "data.splits",
    "data.protocol",
    "data.tokenizer",
    "data.encoded",
    "data.batches",
    "data",
    "margin.operator",
    "margin.arithmetic",
    "margin.link",
    "margin.constraints",
    "margin.systems",
    "margin.certificate",
    "margin.step",
    "margin.form",
    "margin.compiled",
    "margin.interior_point",
    "margin.limits",
    "margin.nuclear",
    "margin.solution",
    "margin.problems",
    "margin",
    "tokens",
    "paths.rules",
    "paths.acceleration",
    "paths.checkpoint",
    "paths.compiled",
    "paths.progress",
    "paths.stepsize",
    "paths.descent",
    "paths.lbfgs",
    "paths.excess",
    "paths.spheres",
    "paths.regularization",
    "paths.joint_regularization",
    "paths.label_margin",
    "paths.diagnostics",
    "paths",
    "optim.fast_power",
    "optim.kernels",
    "optim.leaf",
    "optim.foreach",
    "optim.fused",
    "optim.engine",
    "optim.sharded",
    "optim.base",
    "optim.mirror_descent",
    "optim.mirror_adam",
    "optim.param_groups",
    "optim",
    "models.dropout",
    "models.dropped_attention",
    "models.attention",
    "models.text",
    "models.vit",
    "models.huggingface",
    "models.maps",
    "models",
    "training.settings",
    "training.studies",
    "training.optimizers",
    "training.team",
    "training.checkpoints",
    "training.loggers",
    "training.loop",
    "training.presets",
    "training.runs",
    "training.trials",
    "training.sweeps",
    "training",
    "analysis.weights",
    "analysis.selection",
    "analysis.entropy",
    "analysis.rollout",
    "analysis.looks",
    "analysis.people",
    "analysis.measures",
    "analysis.results",
    "analysis",
    "experiments.source",
    "experiments.base",
    "experiments.drawing",
    "experiments.lines",
    "experiments.starts",
    "experiments",
    "experiments.storage",
    "experiments.tasks",
    "experiments.progress",
    "experiments.runner",
    "report.figure",
    "report.templates",
    "report.attention",
    "report.tables",
    "report.entry",
    "report.real_data.results",
    "report.real_data.statistics",
    "report.real_data.claims",
    "report.real_data.tables",
    "report.real_data.figures",
    "report.real_data",
    "report.markdown",
    "report",
    "commands.errors",
    "commands.places",
    "commands.entries",
    "commands",
    "cli",
    "__main__",
]


def place(module: str) -> int:
    """The position in ORDER of the longest entry that the module's name starts with."""
    matches = [entry for entry in ORDER if module == entry or module.startswith(entry + ".")]
    assert matches, f"{module} has no place in the plan: add it to ORDER"
    return ORDER.index(max(matches, key=len))


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_up_the_plan(path: Path) -> None:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mirrorhead"):
            other = (node.module or "").removeprefix("mirrorhead").removeprefix(".")
            assert other, f"{name} imports from the package's own front door"
            for alias in node.names:
                inner = f"{other}.{alias.name}"
                target = inner if inner in ORDER else other
                assert place(target) < place(name), f"{name} imports {target}"


def test_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)


def test_files_can_be_held_in_the_head() -> None:
    for path in modules():
        assert len(path.read_text().splitlines()) <= 500, path


@pytest.mark.slow
def test_demo_draws_its_figure(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "histograms.py")]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "new"), "--steps", "5"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    figure = tmp_path / "new" / "histograms.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert done.stdout.strip().endswith(f"figure: {figure}")
    assert [path.name for path in figure.parent.iterdir()] == ["histograms.png"]
    bad = subprocess.run([*command, "--steps", "0"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "--steps must be at least 1" in bad.stderr
