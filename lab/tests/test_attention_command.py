"""`mirrorhead attention`: the terminal, the page, and the page in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page

from browser_pages import opened, violations
from data_slices import VOCABULARY, make_bert
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.datasets.encoded import wordpiece
from mirrorhead_lab.evaluation.attention_reading import read_attention
from mirrorhead_lab.models import attention_maps
from mirrorhead_lab.report.page import render_attention
from mirrorhead_lab.training import load_run
from run_cases import make_text_run
from test_report import Elements

TEXTS = ("The plot was dull .", "superb actors ! a grand film and a very grand scene")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_bert(tmp_path / "data")
    make_text_run(tmp_path / "run", layers=2, max_length=8)
    monkeypatch.setenv("MIRRORHEAD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_look_is_what_the_model_computes(here: Path) -> None:
    model: Any = load_run("run").model
    tokenizer = wordpiece(VOCABULARY, 8)
    seen = read_attention(model, tokenizer, TEXTS[1])
    ids = torch.tensor([tokenizer.encode(TEXTS[1]).ids])
    assert seen.tokens == ("[CLS]", "superb", "actor", "##s", "!", "a", "grand", "[SEP]")
    assert seen.left_out == 6 and not model.every_row
    probabilities = model(ids)[0].softmax(dim=0).detach()
    assert seen.probability == pytest.approx(float(probabilities.max()), abs=1e-6)
    assert seen.predicted == ("negative", "positive")[int(probabilities.argmax())]
    first, last = attention_maps(model, ids)
    torch.testing.assert_close(seen.maps[0], first[0])
    torch.testing.assert_close(seen.maps[1][:, :1], last[0])
    torch.testing.assert_close(seen.weights(0), first[0].mean(dim=0))
    torch.testing.assert_close(seen.weights(0, 1), first[0, 1])
    torch.testing.assert_close(seen.rollout.sum(dim=1), torch.ones(8))


def test_the_terminal_shows_heads_and_what_is_most(here: Path, capsys: Any) -> None:
    assert main(["attention", "run", *TEXTS, "--partial"]) == 0
    told = capsys.readouterr().out
    seen = [read_attention(load_run("run").model, wordpiece(VOCABULARY, 8), text) for text in TEXTS]
    for one in seen:
        assert f"{one.predicted} {one.probability:.1%}" in told
        for head in (None, 0, 1):
            weights = one.weights(-1, head)[0]
            best = int(weights.argmax())
            assert f"most: {one.tokens[best]} {float(weights[best]):.3f}, " in told
    assert told.count("head 0") == told.count("mean ") == 2
    assert told.count("the model does not see the last 6 tokens") == 1
    assert main(["attention", "run", TEXTS[0], "--layer", "0", "--head", "1", "--partial"]) == 0
    told = capsys.readouterr().out
    weights = seen[0].weights(0, 1)[0]
    assert "head 1" in told and "mean" not in told and "head 0" not in told
    assert f"most: {seen[0].tokens[int(weights.argmax())]} {float(weights.max()):.3f}" in told
    assert main(["attention", "run", TEXTS[0], "--rollout", "--partial"]) == 0
    assert f"[CLS] {float(seen[0].rollout[0, 0]):.3f}" in capsys.readouterr().out


def test_the_page_needs_nothing_else_and_is_escaped(here: Path) -> None:
    words = [{"very": "<", "not": "/"}.get(word, word) for word in VOCABULARY]
    seen = read_attention(load_run("run").model, wordpiece(words, 8), "a </")
    assert seen.tokens[2:4] == ("<", "/")
    html = render_attention([seen], "</title><b>run</b>")
    elements = Elements(html)
    for tag, attributes in elements.tags:
        assert tag not in ("iframe", "object", "embed", "img", "b")
        for name in ("src", "href", "action"):
            assert attributes.get(name, "data:,") == "data:,"
    assert "url(" not in html and "@import" not in html and "default-src 'none'" in html
    assert "<" in [text.strip() for text in elements.texts]
    content = re.search(r'id="content">(.*?)</script>', html, re.DOTALL)
    assert content is not None and "<" not in content[1]
    found = json.loads(content[1])
    stored = torch.tensor(found["texts"][0]["maps"]) * found["unit"]
    torch.testing.assert_close(stored, seen.maps, atol=6e-5, rtol=0)


# --- in a browser ---------------------------------------------------------------------------


@pytest.fixture(params=[(1200, "light"), (390, "dark")], ids=str)
def page(request: Any, browser: Browser, here: Path) -> Iterator[Page]:
    assert main(["attention", "run", *TEXTS, "--html", "page.html", "--partial"]) == 0
    with opened(browser, (here / "page.html").as_uri(), *request.param) as page:
        yield page


def shown(article: Locator) -> torch.Tensor:
    """The weights that the tokens of an article have in their titles."""
    titles = [token.get_attribute("title") for token in article.locator(".token").all()]
    return torch.tensor([float(title or "nan") for title in titles])


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1.1e-4, rtol=0)


@pytest.mark.slow
def test_one_can_point_choose_and_use_keys(page: Page) -> None:
    model, tokenizer = load_run("run").model, wordpiece(VOCABULARY, 8)
    one, two = (read_attention(model, tokenizer, text) for text in TEXTS)
    first, second = page.locator("article").all()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert first.locator("h2").inner_text().startswith(one.predicted)
    assert second.get_by_text("the last 6 tokens").is_visible()
    near(shown(first), one.weights()[0])
    near(shown(second), two.weights()[0])
    # Point at a token: its row, in its own text alone.
    first.locator(".token").nth(3).hover()
    near(shown(first), one.weights()[3])
    near(shown(second), two.weights()[0])
    told = first.locator(".told").inner_text()
    assert told.startswith("was looks at ")
    assert f"[CLS] gives it {float(one.weights()[0, 3]):.3f}" in told
    page.mouse.move(0, 0)
    near(shown(first), one.weights()[0])
    # Layers, heads, rollout.
    page.get_by_label("Layer").select_option("0")
    page.get_by_label("Head").select_option("1")
    near(shown(second), two.weights(0, 1)[0])
    page.get_by_label("Layer").select_option("rollout")
    assert page.get_by_label("Head").is_disabled()
    near(shown(second), two.rollout[0])
    page.get_by_label("Layer").select_option("1")
    page.get_by_label("Head").select_option("mean")
    # Keys: one stop for each text, arrows within it, Escape back to [CLS].
    page.get_by_label("Head").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "plot"
    near(shown(first), one.weights()[2])
    page.keyboard.press("Escape")
    near(shown(first), one.weights()[0])
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.textContent") == "[SEP]"
    near(shown(second), two.weights()[7])
    near(shown(first), one.weights()[0])


@pytest.mark.slow
def test_every_shade_can_be_read(page: Page) -> None:
    """axe-core finds nothing, and so no shade on which the ink has too little contrast."""
    assert violations(page) == []
    tokens = page.locator("article").first.locator(".token")
    shades = "tokens => tokens.map((token) => getComputedStyle(token).backgroundColor)"
    assert len(set(tokens.evaluate_all(shades))) > 3
