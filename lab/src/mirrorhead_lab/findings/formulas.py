r"""Formulas in prose: LaTeX between dollars, and the symbols of verdicts, as MathML.

Browsers show MathML without a script, and screen readers read it. In text for a terminal or for
an attribute the same formulas are written in plain characters.

>>> plain_text(r"at $p = 2$, $\lVert W_{\mathrm{mm}} \rVert$")
'at p = 2, ‖W_mm‖'
"""

from __future__ import annotations

import re
from functools import cache

from markupsafe import Markup, escape

#: What verdicts write in plain characters, and the same in LaTeX.
SYMBOLS = (
    (r"\|\|([Wuv])_mm\|\|", r"\\lVert \1_{\\mathrm{mm}} \\rVert"),
    (r"\|\|([Wuv])\|\|", r"\\lVert \1 \\rVert"),
    (r"\b([Wv])_mm\b", r"\1_{\\mathrm{mm}}"),
    (r"\bW_([KQV])\b", r"W_\1"),
    (r"\bmu_0\b", r"\\mu_0"),
    (r"\bX([12])([1-9])\b", r"x_{\1\2}"),
    (r"\bl([pq])(?=-(?:AttSVM|SVM|AttGD|JointGD)\b)", r"\\ell_\1"),
    (r"\bW\(0\)", r"W(0)"),
    (r"\bp = (\d+(?:\.\d+)?)\b", r"p = \1"),
    (r"\bD\b(?! of)", r"D"),
)
COMMANDS = {
    r"\lVert ": "‖",
    r" \rVert": "‖",
    r"\mathrm": "",
    r"\mu": "μ",
    r"\ell": "ℓ",
    r"\to": "→",
    r"\infty": "∞",
}
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SYMBOL = re.compile("|".join(f"({pattern})" for pattern, _ in SYMBOLS))


def with_formulas(text: str) -> Markup:
    """Return the text as HTML, with its formulas and symbols as MathML.

    >>> with_formulas("A < B, $p$")
    Markup('A &lt; B, <math><mrow><mi>p</mi></mrow></math>')
    """
    parts = text.split("$")
    if len(parts) % 2 == 0:  # a dollar without a partner is a dollar
        return Markup(_symbols(text))
    return Markup(
        "".join(_mathml(part) if k % 2 else _symbols(part) for k, part in enumerate(parts))
    )


def equation(latex: str) -> Markup:
    """Return a formula on a line of its own, as MathML."""
    return Markup(_mathml(latex).replace("<math>", '<math display="block">', 1))


def plain_text(text: str) -> str:
    """Return the text with its formulas in plain characters."""
    parts = text.split("$")
    if len(parts) % 2 == 0:
        return text
    for k in range(1, len(parts), 2):
        for command, character in COMMANDS.items():
            parts[k] = parts[k].replace(command, character)
        parts[k] = re.sub(r"[{}]", "", parts[k])
    return powers("".join(parts))


def powers(text: str) -> str:
    """Write powers of ten as one reads them.

    >>> powers("D = 3.0e-04 of 1e+12 at p = 1.5, not in hide-1")
    'D = 3.0·10⁻⁴ of 10¹² at p = 1.5, not in hide-1'
    """

    def written(match: re.Match[str]) -> str:
        mantissa, exponent = match[1], str(int(match[2]))
        power = "10" + exponent.translate(SUPERSCRIPTS)
        return power if mantissa == "1" else f"{mantissa}·{power}"

    return re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)e([+-]?\d+)\b", written, text)


def _symbols(text: str) -> str:
    found, last = [], 0
    for symbol in _SYMBOL.finditer(text):
        matches = ((re.compile(p).match(text, symbol.start()), latex) for p, latex in SYMBOLS)
        formula = next(m.expand(latex) for m, latex in matches if m and m[0] == symbol[0])
        found += [str(escape(powers(text[last : symbol.start()]))), _mathml(formula)]
        last = symbol.end()
    return "".join([*found, str(escape(powers(text[last:])))])


@cache
def _mathml(latex: str) -> str:
    from latex2mathml.converter import convert

    return re.sub(r"^<math[^>]*>", "<math>", convert(latex))
