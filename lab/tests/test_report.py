"""The report: what it says, that it needs nothing else, and that a browser shows it well."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page
from rich.console import Console

from browser_pages import opened, unfold, violations
from mirrorhead_lab import studies
from mirrorhead_lab.experiments import NAMES, load
from mirrorhead_lab.findings.figures import plotted_values
from mirrorhead_lab.findings.finding import Finding
from mirrorhead_lab.findings.formulas import equation, plain_text, with_formulas
from mirrorhead_lab.plots import panels
from mirrorhead_lab.report.findings import judged, unfinished
from mirrorhead_lab.report.page import render, write_report
from mirrorhead_lab.report.terminal import print_findings, print_summary
from mirrorhead_lab.verdicts import Verdict
from results_cases import Level, made_up, write_rows

TOY = load("toy_experiment")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    """One of each verdict, two of them with the same figure, and one that did not finish."""
    example = load("example-1")
    one = judged(example, example.compute(example.quick), "mirrorhead reproduce --only example-1")
    toy = judged(TOY, TOY.compute(TOY.quick), "mirrorhead reproduce --only 'toy <x>'")
    remark = Verdict("A = 1 < 2", "holds with a remark", 'only "here"')
    other = judged(replace(TOY, name="other"), TOY.compute(TOY.quick), "mirrorhead")
    other = replace(other, title="Other", verdict=remark, claim="A < B & C.", seconds=100.0)
    failed = unfinished(replace(TOY, name="failed"), TOY.quick, "mirrorhead", "first\n<second>")
    return [one, toy, other, failed]


@pytest.fixture(scope="module")
def page_file(findings: list[Finding], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, findings)
    return path


class Elements(HTMLParser):
    """All tags with their attributes, and the text outside style and script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] not in ("style", "script"):
            self.texts.append(data)


@pytest.mark.slow
def test_the_page_needs_nothing_else(findings: list[Finding]) -> None:
    html = render(findings)
    for tag, attributes in Elements(html).tags:
        assert tag not in ("iframe", "object", "embed", "img")
        for name in ("src", "href", "xlink:href", "action", "data"):
            target = attributes.get(name, "#")
            assert target.startswith("#") or target == "data:,", (tag, target)
    css = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in css and "@import" not in css
    assert "default-src 'none'" in html


@pytest.mark.slow
def test_every_reference_finds_one_part(findings: list[Finding]) -> None:
    """The toy is in the page twice: its clip paths and markers must not be shared."""
    html = render(findings)
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)) > 100
    used = re.findall(r'(?:href="#|url\(#|labelledby=")([^")]+)', html)
    assert len(used) > 20
    assert set(used) <= set(ids)


@pytest.mark.slow
def test_everything_is_escaped(findings: list[Finding]) -> None:
    elements = Elements(render(findings))
    text = " ".join(" ".join(elements.texts).split())
    for wanted in (TOY.title, TOY.claim, 'only "here"', "A = 1 < 2", "first <second>"):
        assert wanted in text
    assert "mirrorhead reproduce --only 'toy <x>'" in text
    assert "b" not in {tag for tag, _ in elements.tags}  # the claim's <b> is text
    alts = [attributes for tag, attributes in elements.tags if tag == "svg"]
    shown = [attributes for attributes in alts if attributes.get("aria-hidden") != "true"]
    assert len(shown) == 3 and all(attributes["role"] == "img" for attributes in shown)


@pytest.mark.slow
def test_the_same_results_give_the_same_page(findings: list[Finding]) -> None:
    again = judged(TOY, TOY.compute(TOY.quick), "mirrorhead reproduce --only 'toy <x>'")
    assert again.figure == findings[1].figure
    assert "What the paper claims" in render([])


def test_formulas_are_mathml() -> None:
    """LaTeX between dollars and the symbols of verdicts; text is escaped, a lone dollar is one."""
    html = str(with_formulas(r"$p = 1.1$ & <D> at ||W_mm||, W_K, mu_0, 3.0e-04: $\ell_p$-SVM"))
    assert html.count("<math>") == 6 and "$" not in html
    assert "<mi>&#x003BC;</mi><mn>0</mn>" in html and "&amp; &lt;" in html
    assert "3.0·10⁻⁴" in html
    assert str(with_formulas("costs $5 <")) == "costs $5 &lt;"
    assert 'display="block"' in equation(r"\frac{a}{b}") and "<mfrac>" in equation(r"\frac{a}{b}")
    assert plain_text(r"at $p = 2$, $W_{\mathrm{mm}} \to \infty$") == "at p = 2, W_mm → ∞"


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_has_words_and_an_equation(name: str) -> None:
    experiment = load(name)
    words, formula = str(with_formulas(experiment.claim)), str(equation(experiment.equation))
    assert formula.startswith('<math display="block">')
    assert "\\" not in words + formula and "$" not in words  # no command was left over
    assert "AttSVM" not in words and "lp-" not in words  # names that only the paper explains


def test_values_of_a_figure_are_in_a_table() -> None:
    figure, (one, two) = panels(2)
    one.plot(np.arange(100), np.arange(100) ** 2, label="squares", color="C0")
    one.set(xlabel="step", ylabel="size", title="left")
    two.plot([1, 2], [1.0, np.nan], color="C0")  # the colour of squares, and a gap
    table = plotted_values(figure, "f")
    rows = [[cell.text for cell in row] for row in table.rows]
    assert len(rows) == 9 + 1 and rows[0] == ["left", "squares", "step", "0", "size", "0"]
    assert rows[8][3::2] == ["99", "9801"] and rows[9][1] == "squares"


@pytest.mark.slow
def test_sections_of_the_docs_are_linked_where_they_are(
    findings: list[Finding], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    write_report(page, findings)
    assert "mirrorhead: docs/evidence/paper.md, section example-1" in page.read_text()
    # In a checkout the sources are there, wherever the page is.
    (tmp_path / "a #1" / "docs" / "evidence").mkdir(parents=True)
    (tmp_path / "a #1" / "mkdocs.yml").write_text("")
    (tmp_path / "a #1" / "docs" / "evidence" / "paper.md").write_text("")
    inner = tmp_path / "a #1" / "out" / "x" / "report.html"
    write_report(inner, findings)
    link = r'In the docs: <a href="([^"]+)">evidence/paper, section example-1</a>'
    assert re.findall(link, inner.read_text()) == ["../../docs/evidence/paper.md#example-1"]
    # The pages that are built beside it are better.
    (tmp_path / "docs" / "evidence").mkdir(parents=True)
    (tmp_path / "docs" / "evidence" / "paper.html").write_text("")
    write_report(page, findings)
    assert 'href="docs/evidence/paper.html#example-1"' in page.read_text()


def test_the_docs_have_every_section() -> None:
    def sections(page: str) -> set[str]:
        text = (ROOT / "docs" / f"{page}.md").read_text()
        headings = re.findall(r"^#+ (.*)$", text, re.M)
        return {re.sub(r"[^a-z0-9]+", "-", one.lower()).strip("-") for one in headings}

    assert set(NAMES) <= sections("evidence/paper") | sections("evidence/bias")
    for study in studies.parts(ROOT / "results"):
        for finding in study.findings:
            page, section = finding.docs
            assert section in sections(page), finding.name


@pytest.mark.slow
def test_a_verdict_is_one_line_of_the_terminal(
    findings: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    long = replace(findings[0], name="token-selection-others", title="Words " * 12)
    console = Console(width=80, color_system="standard", force_terminal=True)
    print_findings([*findings, long], console)
    printed = capsys.readouterr().out
    assert "\x1b[32m" in printed and "\x1b[31m" in printed  # green holds, red does not
    lines = re.sub(r"\x1b\[[\d;]*m", "", printed).splitlines()
    assert len(lines) == len(findings) + 1 and max(map(len, lines)) <= 80
    for finding, line in zip([*findings, long], lines, strict=True):
        assert line.startswith(finding.name) and finding.word in line
    assert len({line.index(f.word) for f, line in zip(findings, lines, strict=False)}) == 1
    print_summary([*findings, long], findings[:2], console)
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "The paper's figures", "Beyond the paper", "Stored results",
    ]  # fmt: skip
    assert lines[0].endswith("2 fails") and lines[2].endswith("1 holds, 1 fails")


SCREENS = [(1200, "light"), (390, "light"), (390, "dark")]


@pytest.fixture(params=SCREENS, ids=str)
def page(request: Any, browser: Browser, page_file: Path) -> Iterator[Page]:
    with opened(browser, page_file.as_uri(), *request.param) as page:
        yield page


@pytest.mark.slow
def test_a_browser_shows_it(page: Page) -> None:
    # Every figure is visible and has a name; unfolded, it is as wide as its box.
    figures = page.locator("article > figure svg[role=img]")
    assert figures.count() == 3
    for figure in figures.all():
        figure.scroll_into_view_if_needed()
        assert figure.is_visible()
        drawn = figure.locator("path, use").first.bounding_box()
        assert drawn is not None
    assert page.get_by_role("img", name="Example 1").count() == 1
    # Each has a place on the wall, which leads to it and unfolds it.
    wall = page.locator(".wall .thumbnail")
    assert wall.count() == 4
    assert wall.locator("svg").count() == 3
    page.get_by_role("link", name="Other: holds with a remark").click()
    assert page.url.endswith("#other")
    assert page.locator("#other > details").evaluate("one => one.open")
    box = page.locator("#other > figure svg").bounding_box()
    assert box is not None and box["width"] > 300 and box["height"] > 100
    # Nothing makes the page itself scroll sideways, opened settings included.
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.get_by_text("steps").first.is_visible()


@pytest.mark.slow
def test_screen_readers_and_keyboards_can_use_it(page: Page) -> None:
    """axe-core finds nothing, with everything unfolded: verdicts have contrast, among the rest."""
    unfold(page)
    assert violations(page) == []


@pytest.fixture(scope="module")
def real_file(findings: list[Finding], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with both studies, their numbers made up; it must stay small."""
    folder = tmp_path_factory.mktemp("real")
    write_rows(folder, made_up("imdb", {"MD p=1.1": Level(accuracy=0.9), "AdamW": Level(falls=0)}))
    write_rows(folder, made_up("cifar10"))
    path = folder / "report.html"
    parts = studies.parts(folder)
    write_report(path, findings[:2], parts, [("Figure 4 <is> not there.", "mirrorhead reproduce")])
    assert path.stat().st_size < 2_000_000
    return path


@pytest.fixture(params=SCREENS, ids=str)
def real_page(request: Any, browser: Browser, real_file: Path) -> Iterator[Page]:
    with opened(browser, real_file.as_uri(), *request.param) as page:
        yield page


@pytest.mark.slow
def test_a_browser_shows_real_data(real_page: Page) -> None:
    page = real_page
    for heading in ("IMDb: is a review positive?", "CIFAR-10: what does an image show?"):
        page.get_by_text(heading, exact=True).click()
    # What was computed here stands before what is read from stored results.
    origins = page.locator("main > div").evaluate_all("all => all.map(one => one.id)")
    assert origins == ["computed", "stored"]
    assert page.locator("#computed article").count() == 2
    assert page.locator("#stored article").count() == 6 + 2
    page.get_by_role("link", name="Figure 8: p = 1.1 has sparser weights").click()
    assert page.url.endswith("#figure-8")
    assert page.locator("#figure-8 .verdict").inner_text() in ("holds", "not seen at this scale")
    assert page.locator("#figure-8 table.numbers tbody tr").count() == 9
    assert page.locator("#figure-8 > figure .bar").count() == 6  # the first six comparisons
    # Figures are drawn, described and explained.
    figures = page.locator(".study figure")
    assert figures.count() == 4 + 3
    for figure in figures.all():
        figure.scroll_into_view_if_needed()
        box = figure.locator("svg[role=img]").bounding_box()
        assert box is not None and box["width"] > 300 and box["height"] > 100
        assert len(figure.locator("figcaption").inner_text()) > 40
    # On a phone tables scroll by themselves, beside a first column that stays; the page does not.
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.get_by_text("Figure 4 <is> not there.").is_visible()
    # The numbers of a figure are in a fold that the keyboard opens.
    fold = page.locator("#imdb .about details").first
    assert not fold.locator("table").is_visible()
    fold.locator("summary").focus()
    page.keyboard.press("Enter")
    assert fold.locator("tbody tr").first.is_visible()
    unfold(page)
    assert violations(page) == []


#: Of every table: what it is, and by how many pixels it is wider than what shows it.
CUT_OFF = """() => {
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  return [...document.querySelectorAll("table")].map((table) => {
    const right = table.getBoundingClientRect().right;
    const around = [];
    for (let box = table.parentElement; box; box = box.parentElement) around.push(box);
    const edges = around.filter((box) => getComputedStyle(box).overflowX !== "visible")
      .map((box) => box.getBoundingClientRect().left + box.clientLeft + box.clientWidth);
    const name = table.closest("[aria-label]")?.getAttribute("aria-label") ?? table.className;
    return [name, right - Math.min(document.documentElement.clientWidth, ...edges)];
  });
}"""


@pytest.fixture(scope="module")
def stored_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the results that the repository keeps."""
    path = tmp_path_factory.mktemp("stored") / "report.html"
    write_report(path, [], studies.parts(ROOT / "results"))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("width", [1024, 1280, 1600])
def test_no_table_is_cut_off_on_a_desktop(
    width: int, browser: Browser, real_file: Path, stored_file: Path
) -> None:
    for path in (real_file, stored_file):
        with opened(browser, path.as_uri(), width) as page:
            tables = page.evaluate(CUT_OFF)
            assert len(tables) > 20
            assert [(name, by) for name, by in tables if by > 1] == []


@pytest.mark.slow
def test_the_page_tells_computed_results_from_stored_ones(real_page: Page) -> None:
    """Two of its claims are experiments, eight are judged from files of results."""
    for origin, words, count in (
        ("computed", "Computed on this machine", 2),
        ("stored", "Read from stored results", 8),
    ):
        assert real_page.locator(f"#{origin} article").count() == count
        kickers = real_page.locator(f"#{origin} .kicker").all_text_contents()
        assert set(kickers) == {words}
        assert real_page.locator(f"nav[aria-label='{words}'] .thumbnail").count() == count
    header = real_page.locator("header").inner_text()
    assert "Of 2 claims computed on this machine" in header
    assert "Of 8 claims read from stored results" in header and "run again" not in header


@pytest.mark.slow
def test_numbers_sort_as_numbers(real_page: Page) -> None:
    unfold(real_page)
    table = real_page.locator("#imdb > .data table.numbers").first
    button = table.get_by_role("button", name="Test %")
    rows = table.locator("tbody tr")
    names = rows.locator("th").all_inner_texts()
    assert names[0] == "MD p=1.1"
    button.click()
    values = [
        float(text.split(" ")[0]) for text in rows.locator("td:nth-child(3)").all_inner_texts()
    ]
    assert values == sorted(values) and rows.locator("th").all_inner_texts()[-1] == "MD p=1.1"
    button.click()
    assert rows.locator("th").all_inner_texts()[0] == "MD p=1.1"
    # Rates from 0.00003 to 1, and a name has no number.
    table.get_by_role("button", name="lr").click()
    rates = [float(text) for text in rows.locator("td:nth-child(2)").all_inner_texts()]
    assert rates == sorted(rates)
    table.get_by_role("button", name="Optimizer").click()
    assert rows.locator("th").all_inner_texts() == sorted(names, key=str.lower)


@pytest.mark.slow
def test_the_folded_page_is_short(
    findings: list[Finding], browser: Browser, tmp_path: Path
) -> None:
    """With all stored studies and as many experiments as there are."""
    many = [replace(findings[0], name=name) for name in NAMES]
    path = tmp_path / "report.html"
    write_report(path, many, studies.parts(ROOT / "results"))
    for width, most in ((1280, 12_000), (1600, 10_000)):
        with opened(browser, path.as_uri(), width) as page:
            assert page.evaluate("document.documentElement.scrollHeight") <= most
            # The wall ends on the first screen.
            last = page.locator(".thumbnail").last.bounding_box()
            assert last is not None and last["y"] + last["height"] <= 900
