"""The documentation: code in it runs, commands in it exist, and the site works in a browser."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser

import mirrorhead
from browser_pages import opened, served, violations
from data_slices import make_bert, make_cad, make_eraser, make_imdb
from mirrorhead_lab import datasets
from mirrorhead_lab.cli.main import COMMANDS, main, parse
from mirrorhead_lab.studies import sweep

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]

# What a reader has at hand when a page says `model` or `X`.
MODEL = "import torch\nmodel = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)\n"
ARRAYS = """
import torch
X, z, v = torch.randn(6, 8, 10), torch.randn(6, 10), torch.randn(10)
y = torch.randn(6).sign()
"""
CLASSIFIER = """
import torch
from mirrorhead_lab.models import TextClassifier, TextSettings
model = TextClassifier(TextSettings.laptop())
ids = torch.randint(1, 20, (2, 12))
"""
RESULTS = """
from mirrorhead_lab.cli.main import main
assert main(["reproduce", "--only", "example-1", "--out", "out", "--jobs", "1"]) == 0
"""
TUNED = """
from dataclasses import replace
from pathlib import Path
import mirrorhead as mh
import torch
from mirrorhead.patches.model_config import classifier_config
from safetensors.torch import load_file
from tiny_bert import tiny_bert
start = load_file(tiny_bert(Path("BASE")) / "model.safetensors")
head = {"head.weight": torch.randn(2, 16), "head.bias": torch.zeros(2)}
patch = mh.Patch.between(start, start | head, whole="head.*")
replace(patch, config=classifier_config(("no", "yes"), 32)).apply("BASE", "TUNED")
"""
SETUP = {
    "patches.md": TUNED,
    "optimizer.md": MODEL,
    "own-data.md": ARRAYS,
    "models.md": CLASSIFIER.replace("laptop()", "paper(3)"),
    "evaluation.md": CLASSIFIER,
    "reproduce.md": RESULTS,
}
LOADERS = ("imdb_protocol", "load_cad", "load_eraser", "load_tokenizer")


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in one of these languages."""
    found = re.findall(r"^( *)```(\w*).*?\n(.*?)^\1```", page.read_text(), flags=re.S | re.M)
    return [body for _, language, body in found if language in languages]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to work in, and small data sets in the published layout."""
    data = tmp_path / "data"
    make_imdb(data, per_folder=30)
    make_cad(data, [("altogether dull", "altogether grand")])
    make_eraser(data)
    make_bert(data)
    monkeypatch.setenv("MIRRORHEAD_DATA", str(data))
    monkeypatch.setenv("MIRRORHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in LOADERS:
        loader = functools.partial(getattr(datasets, name), partial=True)
        monkeypatch.setattr(datasets, name, loader)
    smaller = {"seeds": range(1), "epochs": 1, "partial": True}
    own = sweep.sweep
    monkeypatch.setattr(sweep, "sweep", lambda *a, **k: own(*a, **{**k, **smaller}))


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
#: Pages on which every printed line is said in a comment, `# prints ...`.
TOLD = ("README.md", "tutorial.md")


def agrees(said: str, printed: str) -> bool:
    """Whether a line is what the page says: the same words, and numbers within 10 %.

    Processors round differently. "..." at the end stands for any text.

    >>> agrees("0.87, 80 weights", "0.86, 79 weights"), agrees("0.87", "0.67"), agrees("a", "b")
    (True, False, False)
    >>> agrees("gap up to ...", "gap up to 1.9e-11")
    True
    """
    if said.endswith("..."):
        said, printed = said[:-3], printed[: len(said) - 3]
    numbers = ([float(n) for n in NUMBER.findall(text)] for text in (said, printed))
    words = {NUMBER.sub("#", text) for text in (said, printed)}
    return len(words) == 1 and next(numbers) == pytest.approx(next(numbers), rel=0.1)


WITH_CODE = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_python_on_the_page_runs(page: Path, slices: None) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP.get(page.name, ""), names)
    for number, block in enumerate(blocks(page, "python"), 1):
        printed = run_block(block, f"{page.name}, block {number}", names)
        said = re.findall(r"# prints (.*)$", block, flags=re.M)
        if said or page.name in TOLD:
            assert len(said) == len(printed), printed
            for line, one in zip(said, printed, strict=True):
                assert agrees(line, one), f"the page says {line}, it prints {one}"


def run_block(block: str, name: str, names: dict[str, Any]) -> list[str]:
    """Run a block of a page with these names, and return the lines that it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(block, name, "exec"), names)
    return out.getvalue().splitlines()


@pytest.mark.slow
def test_the_tutorial_shows_its_effect_whatever_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer weights and a higher accuracy with p = 1.1, within the ranges that the page says."""
    page = DOCS / "tutorial.md"
    text = " ".join(page.read_text().split())
    said = re.search(r"for every seed that we tried \(0 to 11\): (.*?)\. Not every", text)
    assert said is not None
    ranges = [float(number) for number in NUMBER.findall(re.sub(r"p = \S+", "", said[1]))]
    assert len(ranges) == 8
    seeded = torch.manual_seed
    for seed in range(12):
        monkeypatch.setattr(torch, "manual_seed", lambda _, seed=seed: seeded(seed))
        names: dict[str, Any] = {}
        lines = [run_block(block, "training", names) for block in blocks(page, "python")[:3]][-1]
        found = [[float(number) for number in NUMBER.findall(line)] for line in lines]
        for (share, count), (low, high, few, many) in zip(
            found, (ranges[:4], ranges[4:]), strict=True
        ):
            assert low - 1 <= 100 * share <= high + 1 and few - 1 <= count <= many + 1, seed


@pytest.mark.slow
def test_the_study_on_its_page_comes_to_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = DOCS / "lab" / "studies.md"
    (code,) = (block for block in blocks(page, "python") if "STUDY = Study(" in block)
    (tmp_path / "study_of_mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["study", "study_of_mine", "--jobs", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Shrinking helps" in printed and "mirrorhead report --study study_of_mine" in printed
    assert main(["report", "--study", "study_of_mine"]) == 0
    assert 'id="shrinking-helps"' in (tmp_path / "out" / "report.html").read_text()


def command_lines(page: Path) -> list[list[str]]:
    """Return every shell command of a page, split; lines that end in a backslash are joined."""
    text = page.read_text().replace("\\\n", " ")
    fenced = "".join(re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, flags=re.S | re.M))
    indented = "\n".join(re.findall(r"^    (\S.*)$", text, flags=re.M))
    starts = r"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:mirrorhead|python|make|torchrun|pip) .*)$"
    lines = re.findall(starts, fenced + "\n" + indented, flags=re.M)
    lines += re.findall(r"`((?:mirrorhead|python|make) [^`]+)`", text)
    return [shlex.split(line, comments=True) for line in lines]


def exit_code(arguments: list[str]) -> Any:
    """Parse a command line of `mirrorhead` without running it; 0 if it can be parsed."""
    try:
        parse(COMMANDS, "mirrorhead", None, arguments)
    except SystemExit as end:
        return end.code
    return 0


TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_on_the_page_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in command_lines(page):
        while "=" in words[0] and not words[0].startswith("-"):
            words = words[1:]  # settings of the environment
        if words[0] == "torchrun" and "-m" in words:
            words = words[words.index("-m") + 1 :]
        program, *rest = words
        line = shlex.join(words)
        if program == "make":
            assert rest[0] in TARGETS, line
        elif program == "mirrorhead" and rest[0] not in ("COMMAND", "<command>", "..."):
            if "..." in rest or rest in ([name] for name in COMMANDS):
                assert rest[0] in COMMANDS, line
                continue
            code = exit_code(rest)
            assert code == 0, f"{line}\n{capsys.readouterr().err}"
        elif program == "python" and rest[0].endswith(".py") and "/" in rest[0]:
            source = (ROOT / rest[0]).read_text()
            for option in re.findall(r"--[a-z][a-z-]*", line):
                assert f'"{option}"' in source or option[2:].replace("-", "_") in source, line
        elif program == "pip" and "mirrorhead-lab[" in line:
            declared = (ROOT / "lab" / "pyproject.toml").read_text()
            for extra in re.findall(r"mirrorhead-lab\[([\w,]+)\]", line)[0].split(","):
                assert f"\n{extra} = [" in declared, line


@functools.cache
def known_options() -> set[str]:
    """Return all options of the command, of examples and of benchmarks."""
    helped = io.StringIO()
    for name in COMMANDS:
        with contextlib.redirect_stdout(helped):
            exit_code([name, "--help"])
    scripts = [*(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    text = helped.getvalue() + "".join(path.read_text() for path in scripts)
    return {*re.findall(r"--[a-z][a-z0-9-]*", text), "--help", "--version"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_in_the_text_exist(page: Path) -> None:
    inline = re.findall(r"`(--[a-z][a-z0-9-]*)[^`]*`", page.read_text())
    assert set(inline) <= known_options()


def by_hand(page: Path) -> int:
    """Count the words of a page, without the tables and figures that `mirrorhead report` fills in.

    The signs of a table are not words.
    """
    generated = r"^<!-- begin [\w-]+ -->$.*?^<!-- end -->$"
    text = re.sub(generated, "", page.read_text(), flags=re.S | re.M)
    return len(re.findall(r"\S*\w\S*", text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_read_in_one_sitting(page: Path) -> None:
    assert by_hand(page) <= 2000


def test_only_what_a_machine_wrote_may_be_longer(tmp_path: Path) -> None:
    page, table = tmp_path / "page.md", "| word | 1 |\n" * 2000
    page.write_text(f"two words\n<!-- begin x -->\n{table}<!-- end -->\nthird <!-- begin y -->\n")
    assert by_hand(page) == 5  # the mark in the text is no mark: begin and y count
    page.write_text(table)
    assert by_hand(page) == 4000


def test_the_readme_is_one_screen_of_text() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 120 and max(map(len, lines)) <= 130


def test_the_readme_points_to_files() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert link.startswith("https://") or (ROOT / link).exists(), link


def test_files_named_for_contributors_exist() -> None:
    named = re.findall(r"[\w/]+\.(?:py|c)\b", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 30
    for file in named:
        places = (ROOT, ROOT / "src" / "mirrorhead", ROOT / "lab" / "src")
        assert any((place / file).exists() for place in places), file


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("a :math:`p > 1` b", "a $p > 1$ b"),
        ("a\n\n.. math:: x^2\n\nb", "a\n\n$$\nx^2\n$$\n\nb"),
        (".. math::\n    x,\n    y\n\nb", "$$\nx,\ny\n$$\n\nb"),
        (
            ".. math::\n    u &= 1, \\\\\n    w &= 2\n",
            "$$\n\\begin{aligned}u &= 1, \\\\\nw &= 2\\end{aligned}\n$$\n\n",
        ),
        ("Args:\n    a, b: both.\n", "Args:\n    a: both.\n    b: both.\n"),
        ("text\n\n>>> 1\n1", "text\n\n```pycon\n>>> 1\n1\n```\n"),
        (">>> 1\n1\n\nmore\n", "```pycon\n>>> 1\n1\n```\n\nmore\n"),
    ],
)
def test_docstrings_become_markdown(docstring: str, expected: str) -> None:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    assert spec and spec.loader
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    assert hooks.markdown(docstring) == expected


def test_every_public_name_has_its_place_in_the_reference() -> None:
    reference = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = re.findall(r"^::: mirrorhead\.(\w+)$", reference, flags=re.M)
    assert sorted([*documented, "__version__"]) == sorted(mirrorhead.__all__)


def test_the_changelog_knows_the_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {mirrorhead.__version__}" in changes


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the built documentation. A warning of the build is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

    with served(folder) as address:
        yield address


@pytest.mark.slow
def test_the_site_works_in_a_browser(site: str, browser: Browser) -> None:
    with opened(browser, f"{site}/index.html", home=site) as page:
        assert page.locator("h1").inner_text().startswith("mirrorhead")
        assert page.locator("math").count() > 3
        page.get_by_label("Search").first.click()
        page.keyboard.type("attention_svm", delay=20)
        results = page.locator(".md-search-result__item a")
        results.first.wait_for(timeout=20_000)
        assert any("api/margin" in (link.get_attribute("href") or "") for link in results.all())
        page.goto(f"{site}/api/optim.html")
        text = page.locator("article").inner_text()
        assert "MirrorDescent" in text and "which stands for the p-norm" in text
        for sign in (":math:", ".. math::", "$$", "\\leftarrow"):
            assert sign not in text
        assert page.locator("article math").count() >= 4


@pytest.mark.slow
def test_every_page_fits_a_phone(site: str, browser: Browser) -> None:
    with opened(browser, f"{site}/index.html", 360, home=site) as page:
        for source in sorted(DOCS.rglob("*.md")):
            page.goto(f"{site}/{source.relative_to(DOCS).with_suffix('.html')}")
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= 360, f"{source.name} is {width} pixels wide"
            assert page.locator("article h1").count() == 1, source.name
            broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).length"
            assert page.evaluate(broken) == 0, source.name


@pytest.mark.slow
@pytest.mark.parametrize("colors", ["light", "dark"])
def test_screen_readers_and_keyboards_can_use_the_site(
    site: str, browser: Browser, colors: str
) -> None:
    """axe-core finds nothing serious on pages with all kinds of content."""
    with opened(browser, f"{site}/index.html", colours=colors, home=site) as page:
        for name in ("index", "optimizer", "patches", "evidence/imdb", "api/index", "api/margin"):
            page.goto(f"{site}/{name}.html")
            assert violations(page, "serious", "critical") == [], name
