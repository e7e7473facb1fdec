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
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page
from rich.console import Console

from mirrorhead_lab.evaluation.results import load_comparisons
from mirrorhead_lab.experiments import NAMES, load
from mirrorhead_lab.findings.figures import plotted_values
from mirrorhead_lab.findings.finding import Finding
from mirrorhead_lab.findings.formulas import equation, plain_text, with_formulas
from mirrorhead_lab.plots import panels
from mirrorhead_lab.report.findings import judged, unfinished
from mirrorhead_lab.report.page import print_findings, render, write_report
from mirrorhead_lab.report.real_data import part
from mirrorhead_lab.studies.claims import claims_of, judge_claim
from mirrorhead_lab.verdicts import Verdict
from results_cases import Level, made_up, write

TOY = load("toy_experiment")
ROOT = Path(__file__).parents[2]
# Without a sandbox, since tests may run as root; the others keep the browser off the network.


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


# Of an element against what is behind it.
CONTRAST = """element => {
  const rgb = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let behind = element;
  while (rgb(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const [one, two] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor]
    .map((colour) => light(rgb(colour))).sort((a, b) => b - a);
  return (one + 0.05) / (two + 0.05);
}"""


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
    assert render([]) and "Verdicts" in render([])


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
    assert "docs/paper.md, section example-1" in page.read_text()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "paper.html").write_text("")
    write_report(page, findings)
    assert 'href="docs/paper.html#example-1"' in page.read_text()


def test_the_docs_have_every_section() -> None:
    sections = {
        name: {
            re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
            for heading in re.findall(
                r"^#+ (.*)$", (ROOT / "docs" / f"{name}.md").read_text(), re.M
            )
        }
        for name in ("paper", "results")
    }
    assert set(NAMES) <= sections["paper"]
    for study in load_comparisons(ROOT / "results"):
        for claim in claims_of(study):
            page, section = judge_claim(study, claim).docs
            assert section in sections[page]


@pytest.mark.slow
def test_the_table_of_verdicts_fits_80_columns(
    findings: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    long = replace(findings[0], name="token-selection-others", title="Words " * 12)
    print_findings(
        [*findings, long], Console(width=80, color_system="standard", force_terminal=True)
    )
    printed = capsys.readouterr().out
    assert "\x1b[32m" in printed and "\x1b[31m" in printed  # green holds, red does not
    lines = re.sub(r"\x1b\[[\d;]*m", "", printed).splitlines()
    assert max(map(len, lines)) <= 80
    words = {word for line in lines for word in line.split()}
    assert words <= {*["Words", "token-selection-others"], *" ".join(
        f"{f.name} {f.word} {f.title}" for f in findings
    ).split(), *["holds:", "holds", "remark:", "hold:", "finished:", "1,", "2,", "1"]}  # fmt: skip


SCREENS = [(1200, "light"), (390, "light"), (390, "dark")]


@pytest.fixture(params=SCREENS, ids=str)
def page(request: Any, browser: Browser, page_file: Path) -> Iterator[Page]:
    """The report, opened; whatever the browser complains of fails the test."""
    yield from opened(browser, page_file, *request.param)


def opened(browser: Browser, page_file: Path, width: int, colours: Any) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=colours)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: complaints.append(asked.url))
    page.goto(page_file.as_uri())
    yield page
    page.close()
    assert complaints == [page_file.as_uri()]  # it was asked for the page, and nothing else


def verdicts(page: Page) -> list[str]:
    return page.locator("table.sortable tbody .verdict").all_inner_texts()


@pytest.mark.slow
def test_a_browser_shows_it(page: Page) -> None:
    # Every figure is visible, as wide as its box, and has a name.
    figures = page.locator("article svg[role=img]")
    assert figures.count() == 3
    for figure in figures.all():
        figure.scroll_into_view_if_needed()
        assert figure.is_visible()
        box = figure.bounding_box()
        assert box is not None and box["width"] > 300 and box["height"] > 100
        drawn = figure.locator("path, use").first.bounding_box()
        assert drawn is not None
    assert page.get_by_role("img", name="Example 1").count() == 1
    # Nothing makes the page itself scroll sideways, opened settings included.
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.get_by_text("steps").first.is_visible()
    # A link of the table leads to its article.
    page.get_by_role("link", name="Other").click()
    assert page.url.endswith("#other")


@pytest.mark.slow
def test_screen_readers_and_keyboards_can_use_it(page: Page) -> None:
    """axe-core finds nothing serious, with everything unfolded."""
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    found = Axe().run(page).response["violations"]
    assert not [(one["id"], one["nodes"][0]["html"]) for one in found]


@pytest.mark.slow
def test_the_table_sorts(page: Page) -> None:
    start = verdicts(page)
    assert start == ["does not hold", "holds", "holds with a remark", "not finished"]
    heading = page.locator("th", has=page.get_by_role("button", name="Verdict"))
    button = page.get_by_role("button", name="Verdict")
    assert heading.get_attribute("aria-sort") == "none"
    button.click()
    worst = ["not finished", "does not hold", "holds with a remark", "holds"]
    assert verdicts(page) == worst
    assert heading.get_attribute("aria-sort") == "ascending"
    button.focus()
    page.keyboard.press("Enter")
    assert verdicts(page) == worst[::-1]
    assert heading.get_attribute("aria-sort") == "descending"
    assert page.locator("th[aria-sort=ascending]").count() == 0
    page.get_by_role("button", name="#").click()
    assert verdicts(page) == start
    if page.viewport_size and page.viewport_size["width"] > 1000:
        page.get_by_role("button", name="Time").click()
        times = page.locator("table.verdicts td:last-child").all_inner_texts()
        assert times[-1] == "1 min 40 s"


@pytest.mark.slow
def test_a_verdict_is_a_word_and_a_colour_that_can_be_read(page: Page) -> None:
    """Contrast of every verdict against what is behind it, as WCAG asks of text: 4.5."""
    found = page.locator(".verdict:visible, .kicker, .about p, dd, td:visible, footer p").all()
    assert len(found) > 20
    for element in found:
        assert element.evaluate(CONTRAST) >= 4.5, element.inner_text()


@pytest.fixture(scope="module")
def real_file(findings: list[Finding], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with both studies, their numbers made up; it must stay small."""
    folder = tmp_path_factory.mktemp("real")
    write(folder, made_up("imdb", {"MD p=1.1": Level(accuracy=0.9), "AdamW": Level(falls=0)}))
    write(folder, made_up("cifar10"))
    path = folder / "report.html"
    parts = [part(study) for study in load_comparisons(folder)]
    write_report(path, findings[:2], parts, [("Figure 4 <is> not there.", "mirrorhead reproduce")])
    assert path.stat().st_size < 2_000_000
    return path


@pytest.fixture(params=SCREENS, ids=str)
def real_page(request: Any, browser: Browser, real_file: Path) -> Iterator[Page]:
    yield from opened(browser, real_file, *request.param)


@pytest.mark.slow
def test_a_browser_shows_real_data(real_page: Page) -> None:
    page = real_page
    for heading in ("IMDb: is a review positive?", "CIFAR-10: what does an image show?"):
        assert page.get_by_role("heading", name=heading).is_visible()
    # Claims stand in the list of verdicts with all others, and lead to their place.
    assert page.locator("table.verdicts tbody tr").count() == 2 + 6 + 2
    page.get_by_role("link", name="Figure 8: p = 1.1 has sparser weights").click()
    assert page.url.endswith("#figure-8")
    assert page.locator("#figure-8 .verdict").inner_text() in ("holds", "not seen at this scale")
    assert page.locator("#figure-8 table.numbers tbody tr").count() == 9
    # Figures are drawn, described and explained.
    figures = page.locator("section.study figure")
    assert figures.count() == 4 + 3
    for figure in figures.all():
        figure.scroll_into_view_if_needed()
        box = figure.locator("svg[role=img]").bounding_box()
        assert box is not None and box["width"] > 300 and box["height"] > 100
        assert len(figure.locator("figcaption").inner_text()) > 40
    # Wide tables scroll by themselves, under a first column that stays; the page does not.
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    name = page.locator("#imdb > .data table.numbers").nth(3).locator("tbody th").first
    name.scroll_into_view_if_needed()
    before = name.bounding_box()
    region = page.get_by_role("region", name="Sparsity of attention: IMDb").first
    region.evaluate("element => element.scrollTo(10000, 0)")
    assert region.evaluate("element => element.scrollLeft") > 0
    after = name.bounding_box()
    assert before and after and abs(before["x"] - after["x"]) < 2
    assert page.get_by_text("Figure 4 <is> not there.").is_visible()
    # The numbers of a figure are in a fold that the keyboard opens.
    fold = page.locator("#imdb .about details").first
    assert not fold.locator("table").is_visible()
    fold.locator("summary").focus()
    page.keyboard.press("Enter")
    assert fold.locator("tbody tr").first.is_visible()
    for word in (
        "p.note",
        "figcaption",
        "#imdb > .data td.number",
        "#figure-8 .about p",
        "#missing p",
    ):
        assert page.locator(word).first.evaluate(CONTRAST) >= 4.5, word


@pytest.mark.slow
def test_numbers_sort_as_numbers(real_page: Page) -> None:
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
