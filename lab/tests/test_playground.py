"""The playground: its mathematics against the library, and the page as a person uses it."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page
from torch import Tensor

import mirrorhead as mh
from browser_pages import opened, served, unfold, violations
from mirrorhead.paths.descent import direction_divergence
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.playground import playground_page

EXPONENTS = (1.05, 1.25, 1.75, 2.0, 5.0, 20.0)
SHAPES = ((1, 3), (2, 2), (2, 3), (2, 5), (3, 3), (3, 4), (4, 2), (5, 3), (6, 2), (6, 4))
PER_SHAPE = 20  # problems: 200 in all
STEPS = 200


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page on a local server: browsers give no clipboard to plain files."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "index.html").write_text(playground_page(), encoding="utf-8")
    with served(folder) as address:
        yield f"{address}/index.html"


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with opened(browser, address) as page:
        yield page


def random_problems(shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """X, z, y, v and tokens of PER_SHAPE problems, about half of them feasible."""
    n, T = shape
    generator = torch.Generator().manual_seed(100 * n + T)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    X, z, v = draw(PER_SHAPE, n, T, 2), draw(PER_SHAPE, n, 2), draw(PER_SHAPE, 2)
    y = draw(PER_SHAPE, n).sign()
    planted = torch.einsum("bntd,bde,bne->bnt", X, draw(PER_SHAPE, 2, 2), z).argmax(-1)
    best = (y.unsqueeze(-1) * torch.einsum("bntd,bd->bnt", X, v)).argmax(-1)
    feasible = torch.arange(PER_SHAPE).unsqueeze(-1) % 2 == 0
    return X, z, y, v, torch.where(feasible, planted, best)


def as_states(X: Tensor, z: Tensor, y: Tensor, v: Tensor) -> list[dict[str, Any]]:
    """The same problems as the page writes them."""
    return [
        {
            "samples": [
                {"tokens": tokens, "z": query, "y": label}
                for tokens, query, label in zip(a, b, c, strict=True)
            ],
            "heads": [head],
        }
        for a, b, c, head in zip(X.tolist(), z.tolist(), y.tolist(), v.tolist(), strict=True)
    ]


SOLVE = """([problems, tokens, p]) => problems.map((problem, k) => {
    const { status, W, norm, gap, dual } = Mirror.attentionSvm(problem, tokens[k], p);
    const rows = Mirror.constraints(problem, tokens[k]).map((c) => c.row);
    return { status, W, norm, gap, dual, rows };
})"""


@pytest.mark.slow
@pytest.mark.parametrize("p", EXPONENTS)
def test_solutions_are_the_librarys(page: Page, p: float) -> None:
    for shape in SHAPES:
        X, z, y, v, tokens = random_problems(shape)
        solution = mh.attention_svm(X, z, tokens, p, tol=1e-13)
        rough = mh.attention_svm(X, z, tokens, p)  # where 1e-13 cannot be certified
        found = page.evaluate(SOLVE, [as_states(X, z, y, v), tokens.tolist(), p])
        for k, ours in enumerate(found):
            best = rough if solution.status[k] == "unfinished" else solution
            assert ours["status"] == best.status[k], (shape, k)
            if ours["status"] == "infeasible":
                rows, dual = (
                    torch.tensor(ours[name], dtype=torch.float64) for name in ("rows", "dual")
                )
                assert (dual >= 0).all()
                assert dual.sum() == pytest.approx(1)
                assert (dual @ rows).abs().max() <= 1e-9 * rows.abs().max()
                continue
            assert ours["norm"] == pytest.approx(float(best.norm[k]), rel=1e-8)
            W = torch.tensor(ours["W"], dtype=torch.float64).reshape(2, 2)
            if (W - best.W[k]).abs().max() <= 1e-6 * best.W[k].abs().max():
                continue
            # Small entries hardly enter the norm for large p: a gap this small allows them all.
            slack = 10 * (float(best.gap[k]) + ours["gap"] + 1e-15)
            assert float(direction_divergence(p, best.W[k], W, 2)) <= slack, (shape, k)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.0, float("inf")])
def test_the_ends_are_the_librarys(page: Page, p: float) -> None:
    for shape in SHAPES:
        X, z, y, v, tokens = random_problems(shape)
        solution = mh.attention_svm(X, z, tokens, p)
        script = (
            SOLVE if p == 1 else SOLVE.replace("p]) =>", "_]) =>").replace(", p)", ", Infinity)")
        )
        for k, ours in enumerate(
            page.evaluate(script, [as_states(X, z, y, v), tokens.tolist(), 1])
        ):
            assert ours["status"] == solution.status[k]
            if ours["status"] == "optimal":  # W need not be unique: the norm is
                assert ours["norm"] == pytest.approx(float(solution.norm[k]), rel=1e-8)
                assert ours["gap"] <= 1e-9


DESCEND = """([problems, p, steps]) => problems.map((problem) =>
    Mirror.descend(problem, p, steps).map((weights) => weights[0]))"""


@pytest.mark.slow
@pytest.mark.parametrize("p", EXPONENTS)
def test_paths_are_the_librarys(page: Page, p: float) -> None:
    """Every step is the library's, and so is the path wherever rounding does not decide it.

    A normalised step of constant length goes to and fro across the valley, and for some problems
    that multiplies rounding errors by ten every ten steps. Those are found with the library
    alone, by a change of the data in the thirteenth digit.
    """
    psi = mh.PNorm(p)
    stable = 0
    for shape in SHAPES[::2]:
        X, z, y, v, _ = random_problems(shape)
        problem = mh.AttentionProblem(X, z, y, v)
        record = list(range(STEPS + 1))
        path = mh.descend(problem, p, STEPS, record=record, progress=False)
        other = mh.AttentionProblem(X * (1 + 1e-13), z, y, v)
        shaken = mh.descend(other, p, STEPS, record=record, progress=False)
        found = page.evaluate(DESCEND, [as_states(X, z, y, v), p, STEPS])
        ours = torch.tensor(found, dtype=torch.float64).movedim(0, 1).reshape(path.W.shape)
        scale = path.W.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
        steady = ((shaken.W - path.W).abs() / scale).amax((0, -2, -1)) < 1e-8
        stable += int(steady.sum())
        assert ((ours - path.W).abs() / scale).amax((0, -2, -1))[steady].max() < 1e-6
        for k in range(0, STEPS, 7):
            u = psi.mirror(ours[k]) - 0.1 * problem.gradient(ours[k]).normalized(psi.q)
            assert ((psi.mirror(ours[k + 1]) - u).abs() <= 1e-9 * u.abs().max()).all(), (shape, k)
    assert stable >= 20  # of 100


@pytest.mark.slow
def test_two_heads_descend_as_the_library(page: Page) -> None:
    X, z, y, v, _ = random_problems((3, 4))
    heads = torch.stack([v, v.flip(-1)], 1)
    problem = mh.AttentionProblem(X, z, y, heads, heads=2)
    path = mh.descend(problem, 2.0, 40, record=[40], progress=False)
    states = as_states(X, z, y, v)
    for state, pair in zip(states, heads.tolist(), strict=True):
        state["heads"] = pair
    script = DESCEND.replace("weights[0]", "weights")
    found = torch.tensor(page.evaluate(script, [states, 2.0, 40]), dtype=torch.float64)[:, -1]
    assert (found.reshape(path.W[-1].shape) - path.W[-1]).abs().max() < 1e-6


# -- as a person ----------------------------------------------------------------------------------


def choose(page: Page, preset: str) -> None:
    label = page.locator("#preset option", has_text=preset).first.text_content()
    page.select_option("#preset", label=label)


def selected(page: Page) -> list[int]:
    return page.evaluate("Playground.result.tokens")


def drag(page: Page, handle: str, to: tuple[float, float]) -> None:
    """Drag with the mouse, to a point in the units of the plane."""
    start, end = page.evaluate(
        """([name, to]) => {
            const plane = document.getElementById("plane");
            const at = (handle) => handle.transform.baseVal[0].matrix;
            const known = at(document.querySelector('[data-handle="token-0-0"]'));
            const unit = (known.e - 300) / Playground.state.samples[0].tokens[0][0];
            const { e, f } = at(document.querySelector(`[data-handle="${name}"]`));
            const seen = (x, y) => new DOMPoint(x, y).matrixTransform(plane.getScreenCTM());
            const ends = [seen(e, f), seen(300 + unit * to[0], 300 - unit * to[1])];
            return ends.map((end) => [end.x, end.y]);
        }""",
        [handle, to],
    )
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*end, steps=5)
    page.mouse.up()


def test_dragging_a_token_across_the_separator_changes_the_choice(page: Page) -> None:
    choose(page, "Figure 2")
    before = selected(page)
    assert before == [0, 0]
    assert "Optimal." in page.inner_text("#certificate")
    drag(page, "token-0-0", (-3.0, 0.5))
    assert page.evaluate("Playground.state.samples[0].tokens[0][0]") == pytest.approx(-3, abs=0.05)
    assert selected(page)[0] == 1
    assert page.locator('[data-handle="token-0-1"] .ring').count() == 1
    assert page.locator('[data-handle="token-0-0"] .ring').count() == 0


def test_moving_p_changes_the_selected_token(page: Page) -> None:
    choose(page, "p changes")
    first = selected(page)
    page.locator("#p").fill(str(page.evaluate("Number(document.getElementById('p').max)")))
    assert page.inner_text("#p-value") == "20"
    assert selected(page) != first
    page.click("#p-one")
    assert page.inner_text("#p-value") == "1"
    assert "Optimal." in page.inner_text("#certificate")
    page.click("#p-infinity")
    assert page.inner_text("#p-value") == "∞"
    assert "needs 1 < p < ∞" in page.inner_text("#path-note")


def test_the_path_plays_pauses_and_steps(page: Page) -> None:
    choose(page, "Example 2")
    page.click("#restart")
    assert page.inner_text("#time-value") == "0"
    assert "uniform" in page.inner_text("#path-note")
    page.click("#step")
    assert page.inner_text("#time-value") == "1"
    page.click("#play")
    page.wait_for_function("Number(document.getElementById('time-value').textContent) > 20")
    page.click("#play")
    at = page.inner_text("#time-value")
    page.wait_for_timeout(150)
    assert page.inner_text("#time-value") == at
    assert page.inner_text("#play") == "Play"


def test_an_infeasible_choice_comes_with_its_proof(page: Page) -> None:
    choose(page, "Infeasible")
    words = page.inner_text("#certificate")
    assert words.startswith("No W selects these tokens.")
    weights = [float(x) for x in re.findall(r"([\d.]+) ×", words)]
    assert sum(weights) == pytest.approx(1, abs=0.01)


def test_keys_move_a_token(page: Page) -> None:
    choose(page, "Example 1")
    handle = page.locator('[data-handle="token-0-2"]')
    handle.focus()
    before = page.evaluate("Playground.state.samples[0].tokens[2]")
    page.keyboard.press("Shift+ArrowUp")
    after = page.evaluate("Playground.state.samples[0].tokens[2]")
    assert after[1] > before[1]
    assert after[0] == before[0]
    assert page.evaluate("document.activeElement.dataset.handle") == "token-0-2"


def test_a_link_and_a_file_keep_the_state(page: Page, tmp_path: Path) -> None:
    choose(page, "Two heads")
    page.select_option("#head", "1")
    drag(page, "token-1-2", (0.5, -2.0))
    page.click("#copy-link")
    kept = page.evaluate("Playground.state")
    assert kept["samples"][1]["tokens"][2] == pytest.approx([0.5, -2.0], abs=0.05)
    link = page.evaluate("navigator.clipboard.readText()")
    page.goto("about:blank")
    page.goto(link)
    assert page.evaluate("Playground.state") == kept
    with page.expect_download() as download:
        page.click("#save")
    file = tmp_path / "state.json"
    download.value.save_as(file)
    assert json.loads(file.read_text()) == kept
    choose(page, "Example 1")
    page.set_input_files("#open", str(file))
    page.wait_for_function("Playground.state.heads.length === 2")
    assert page.evaluate("Playground.state") == kept


@pytest.mark.parametrize(
    "broken",
    [
        "[]",
        "{",
        '{"p": 0.5}',
        '{"p": 2, "samples": [], "heads": [[1, 0]]}',
        '{"p": 2, "samples": [{"y": 3}]}',
    ],
)
def test_a_broken_file_is_refused_and_changes_nothing(
    page: Page, tmp_path: Path, broken: str
) -> None:
    before = page.evaluate("Playground.state")
    file = tmp_path / "broken.json"
    file.write_text(broken)
    page.set_input_files("#open", str(file))
    page.wait_for_function("document.getElementById('message').textContent !== ''")
    assert "broken.json is not a state of this page" in page.inner_text("#message")
    assert page.evaluate("Playground.state") == before


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["Example 1", "p changes", "Two heads", "Infeasible"])
def test_the_python_lines_print_the_same_numbers(page: Page, preset: str) -> None:
    choose(page, preset)
    page.get_by_label("Add a token to sample 1").click()  # samples of different lengths
    page.click("#copy-python")
    lines = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=True
    )  # fmt: skip
    printed = dict(re.findall(r"(\w+): (.*)", done.stdout))
    result = page.evaluate(
        """(() => {
            const { tokens, solution: { status, norm, W } } = Playground.result;
            return { tokens, status, norm: String(norm), W };
        })()"""
    )
    assert json.loads(printed["tokens"]) == result["tokens"]
    assert printed["status"] == result["status"]
    if result["status"] == "optimal":
        assert float(printed["norm"]) == pytest.approx(float(result["norm"]), rel=1e-6)
        assert json.loads(printed["W"]) == pytest.approx(result["W"], abs=1e-5)


def test_every_preset_shows_and_fits_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for name in page.locator("#preset option").all_text_contents()[1:]:
        page.select_option("#preset", label=name)
        assert page.inner_text("#certificate")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("preset", ["Two heads", "Infeasible"])
def test_the_page_is_accessible(page: Page, scheme: Any, preset: str) -> None:
    """axe-core finds nothing, with everything unfolded."""
    page.emulate_media(color_scheme=scheme)
    choose(page, preset)
    unfold(page)
    assert violations(page) == []


def test_the_command_saves_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "playground.html"
    assert main(["playground", "--save", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == playground_page()
    assert main(["playground", "--save", str(file)]) == 0  # its own page may be replaced
    mine = tmp_path / "mine.html"
    mine.write_text("precious")
    assert main(["playground", "--save", str(mine)]) == 2
    assert mine.read_text() == "precious"
    assert "not a playground page" in capsys.readouterr().err
