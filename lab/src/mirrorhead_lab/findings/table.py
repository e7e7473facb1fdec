"""A table, for the page and for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """What is read, and what it is sorted by."""

    text: str
    key: str | float

    @property
    def is_number(self) -> bool:
        """Whether the key is one: such cells stand to the right."""
        return not isinstance(self.key, str)


NOTHING = Cell("–", -1e300)  # below all numbers


@dataclass(frozen=True)
class Table:
    """name: an id; the first cell of each row is its heading; note: what a reader must know."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.name}: {len(row)} cells for {len(self.columns)} columns")

    @staticmethod
    def of(
        name: str, title: str, columns: Mapping[str, Callable[[T], Cell]], things: Iterable[T],
        note: str = "",
    ) -> Table:  # fmt: skip
        """A row for each thing; a column is a heading and a function of the thing.

        >>> Table.of("t", "T", {"a": word, "b": lambda text: number(len(text))}, ["x"]).rows
        ((Cell(text='x', key='x'), Cell(text='1.000', key=1)),)
        """
        rows = tuple(tuple(cell(thing) for cell in columns.values()) for thing in things)
        return Table(name, title, tuple(columns), rows, note)


def word(text: str) -> Cell:
    """A cell of words."""
    return Cell(text, text)


def number(value: float, digits: int = 3) -> Cell:
    """A cell of one number.

    >>> number(0.12345).text, number(12345, 0).text
    ('0.123', '12,345')
    """
    return Cell(f"{value:,.{digits}f}", value)


def mean(values: Sequence[float], digits: int = 3, scale: float = 1.0) -> Cell:
    """Mean and sample standard deviation; a single value stands alone.

    >>> mean([0.5, 0.52, 0.54], digits=1, scale=100).text
    '52.0 ± 2.0'
    """
    if not values:
        return NOTHING
    middle = scale * fmean(values)
    text = f"{middle:,.{digits}f}"
    if len(values) > 1:
        text += f" ± {scale * stdev(values):,.{digits}f}"
    return Cell(text, middle)


def between(values: Sequence[float], digits: int = 3, scale: float = 1.0) -> Cell:
    """The smallest and the largest.

    >>> between([0.5, 0.54], digits=1, scale=100).text
    '50.0 to 54.0'
    """
    if not values:
        return NOTHING
    low, high = scale * min(values), scale * max(values)
    return Cell(f"{low:,.{digits}f} to {high:,.{digits}f}", low)


def markdown(table: Table) -> str:
    """The table in Markdown.

    >>> print(markdown(Table("t", "T", ("a", "b"), ((word("x|y"), number(1)),))))
    | a | b |
    | --- | ---: |
    | x\\|y | 1.000 |
    """
    numeric = [
        bool(table.rows) and all(row[k].is_number for row in table.rows)
        for k in range(len(table.columns))
    ]
    rules = ["---:" if right else "---" for right in numeric]
    rows = [[cell.text.replace("|", "\\|") for cell in row] for row in table.rows]
    lines = [list(table.columns), rules, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
