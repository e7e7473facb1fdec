"""`mirrorhead bias`, with optimizers written by people who never saw this code."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from mirrorhead_lab.cli.main import main
from mirrorhead_lab.experiments.bias_runs import limit_of, tendency

#: A class of one's own, a function with a learning rate, and one without.
OWN = """
import torch

class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99)):
        super().__init__(params, dict(lr=lr, betas=betas))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"]
                p.add_(torch.sign(b1 * m + (1 - b1) * p.grad), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - b2)
        return loss

class Lars(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad * (p.detach().norm() + 0.1) / (p.grad.norm() + 1e-9)
        return super().step(closure)

def trust(params, learning_rate):
    return Lars(params, lr=learning_rate, momentum=0.9)

def fixed(parameters):
    return torch.optim.Adam([{"params": list(parameters)}], lr=0.05, weight_decay=1e-4)

def lbfgs(params):
    return torch.optim.LBFGS(params)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "their_optimizers.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "their_optimizers", raising=False)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["attention", "network"])
def test_strangers_optimizers_go_through_at_first_try(
    problem: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bias", "--problem", problem, "--trials", "3", "--steps", "40", "--jobs", "1"]
    for name in ("Lion", "trust", "fixed"):
        words += ["--optimizer", f"their_optimizers:{name}"]
    assert main([*words, "--alone", "--out", "out"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("Lion", "trust", "fixed", "linf"))
    assert (here / "out" / "report.html").exists()
    assert (here / "out" / f"bias-{problem}.svg").read_text().startswith("<?xml")
    # The same command again computes nothing.
    assert main([*words, "--alone", "--out", "out"]) == 0
    # Other code under the same name is another run.
    (here / "their_optimizers.py").write_text(OWN + "\n# changed\n")
    assert main([*words, "--alone", "--out", "out"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer", "their_optimizers"], "there is no optimizer 'their_optimizers'"),
        (["--optimizer", "their_optimizers:none"], "has no 'none'"),
        (["--optimizer", "no_such_module:f"], "No module named 'no_such_module'"),
        (["--alone"], "--alone needs --optimizer"),
        (["--trials", "0"], "--trials must be at least 1"),
    ],
)
def test_wrong_calls_are_told_in_one_line(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bias", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
def test_an_optimizer_that_cannot_be_followed_is_a_finding_without_a_result(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bias", "--optimizer", "their_optimizers:lbfgs", "--alone", "--trials", "2"]
    assert main([*words, "--steps", "5", "--jobs", "1"]) == 1
    assert "LBFGS needs a closure" in capsys.readouterr().err


def test_limits_of_curves_are_told_from_slowness() -> None:
    steps = np.unique(np.geomspace(10, 1e4, 30).round())
    assert tendency(1 - 0.5 / steps, steps) == "reached"  # pyright: ignore[reportArgumentType]
    assert tendency(1 - 1.2 * steps**-0.3, steps) == "slow"  # pyright: ignore[reportArgumentType]
    assert tendency(0.7 - steps**-0.5, steps) == "another limit"  # pyright: ignore[reportArgumentType]
    assert tendency(0.1 * np.log10(steps), steps) == "not decided"  # pyright: ignore[reportArgumentType]
    assert np.isnan(limit_of(0.05 * np.log10(steps), steps))  # pyright: ignore[reportArgumentType]
