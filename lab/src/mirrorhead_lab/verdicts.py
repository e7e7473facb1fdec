"""A verdict on a claim: what was measured, and whether the claim holds.

    holds                   what was measured is as claimed
    holds with a remark     the same, and the reader must know something besides
    not decided             neither as claimed nor the opposite: the spread is too wide to tell
    not seen at this scale  not as claimed, but the claim is about a size or a regime that was not
                            run; the remark names the difference
    does not hold           not as claimed, although it was run as claimed

Experiments and claims on real data use the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Word = Literal[
    "holds", "holds with a remark", "not decided", "not seen at this scale", "does not hold"
]
WORDS: tuple[Word, ...] = get_args(Word)


@dataclass(frozen=True)
class Verdict:
    """What was measured, the verdict in a few words, and a remark that qualifies it."""

    measured: str
    word: Word
    remark: str = ""

    def __post_init__(self) -> None:
        if self.word not in WORDS:
            raise ValueError(f"the word of a verdict must be one of {WORDS}, got {self.word!r}")
        if self.word not in ("holds", "does not hold") and not self.remark:
            raise ValueError(f'a verdict "{self.word}" needs a remark')


def judge(
    measured: str, as_claimed: bool | None, remark: str = "", *, differs: str = ""
) -> Verdict:
    """Return the verdict on what was measured.

    Args:
        measured: the numbers, in words.
        as_claimed: whether they are as claimed; None if they do not decide it.
        remark: what a reader must know besides.
        differs: how what was run differs from what the claim is about, for example "a model of
            64 dimensions instead of 384". Then numbers that are not as claimed do not refute it.

    >>> judge("distance 1e-9", True).word
    'holds'
    >>> judge("82 % and 83 %", False, differs="5 epochs instead of 60.").word
    'not seen at this scale'
    >>> judge("82 % and 83 %, each ± 2 %", None, "More seeds would decide it.").word
    'not decided'
    """
    if as_claimed:
        return Verdict(measured, "holds with a remark" if remark else "holds", remark)
    if differs:
        return Verdict(measured, "not seen at this scale", f"{differs} {remark}".strip())
    if as_claimed is None:
        return Verdict(measured, "not decided", remark)
    return Verdict(measured, "does not hold", remark)


def listed(values: Iterable[float], form: str = ".2g") -> str:
    """Write numbers in a row, for a sentence.

    >>> listed([0.38, 0.13])
    '0.38 / 0.13'
    """
    return " / ".join(format(value, form) for value in values)


def of_each(exponents: Sequence[float], words: Iterable[str]) -> str:
    """Write what is said of each exponent.

    >>> of_each([1.5, 2], ["slope -1.0", "slope -2.0"])
    'p = 1.5: slope -1.0; p = 2: slope -2.0'
    """
    return "; ".join(f"p = {p:g}: {word}" for p, word in zip(exponents, words, strict=True))
