"""Which optimizers are compared, and with which learning rates.

The comparisons of docs/results.md try three or four rates for each optimizer, half a decade apart,
around what worked in prototypes, some of which had looked at test figures; among them, validation
data alone chooses. Everything but the optimizer is the preset's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mirrorhead.lab.training.settings import OPTIMIZERS, OPTIONS, OptimizerName, OptimizerSettings


@dataclass(frozen=True)
class Comparison:
    """A preset, candidates by name with the settings that tuning tries, and seeds of final runs."""

    preset: str
    candidates: Mapping[str, Sequence[OptimizerSettings]]
    seeds: tuple[int, ...]


def _rates(name: OptimizerName, *rates: float, **options: Any) -> tuple[OptimizerSettings, ...]:
    return tuple(OptimizerSettings(name, lr=lr, **options) for lr in rates)


def parse_candidate(text: str) -> tuple[str, tuple[OptimizerSettings, ...]]:
    """Read a candidate from the command line: the optimizer, its options, its learning rates.

    Its name is all but the rates.

    >>> name, rules = parse_candidate("mirror-descent lr=0.1,0.3 p=1.1")
    >>> name, [rule.lr for rule in rules]
    ('mirror-descent p=1.1', [0.1, 0.3])
    """
    optimizer, *words = text.split() or [""]
    found: OptimizerName | None = {name: name for name in OPTIMIZERS}.get(optimizer)  # pyright: ignore
    if found is None:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"candidate {text!r}: it must begin with one of {known}")
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in ("lr", *OPTIONS[found]):
            allowed = ", ".join(f"{option}=..." for option in ("lr", *OPTIONS[found]))
            raise ValueError(f"candidate {text!r}: {found} takes {allowed}, got {word!r}")
        if key in given:
            raise ValueError(f"candidate {text!r}: {key} is given twice")
        given[key] = value
    if "lr" not in given:
        raise ValueError(f"candidate {text!r}: lr is missing, such as lr=0.03,0.1,0.3,1")
    try:
        rates = [_number("lr", rate) for rate in given.pop("lr").split(",")]
        options: dict[str, Any] = {
            key: value if key == "normalize" else _number(key, value)
            for key, value in given.items()
        }
        rules = _rates(found, *rates, **options)
    except ValueError as error:
        raise ValueError(f"candidate {text!r}: {error}") from None
    return candidate_name(rules[0]), rules


def candidate_name(settings: OptimizerSettings) -> str:
    """Return the optimizer and its options, without the learning rate.

    >>> candidate_name(OptimizerSettings("mirror-descent", lr=0.1, p=1.1))
    'mirror-descent p=1.1'
    """
    options = {key: getattr(settings, key) for key in OPTIONS[settings.name]}
    words = [f"{key}={value}" for key, value in options.items() if value]
    return " ".join([settings.name, *words])


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None


COMPARISONS = {
    "imdb": Comparison(
        "laptop",
        {
            "MD p=1.1": _rates("mirror-descent", 0.03, 0.1, 0.3, 1.0, p=1.1),
            "MD p=1.5": _rates("mirror-descent", 0.1, 0.3, 1.0, 3.0, p=1.5),
            "MD p=2": _rates("mirror-descent", 0.1, 0.3, 1.0, 3.0, p=2.0),
            "MD p=3": _rates("mirror-descent", 1e-3, 3e-3, 0.01, 0.03, p=3.0),
            "MirrorAdam p=1.1": _rates("mirror-adam", 3e-5, 1e-4, 3e-4, 1e-3, p=1.1),
            "MirrorAdam p=1.5": _rates("mirror-adam", 3e-5, 1e-4, 3e-4, 1e-3, p=1.5),
            "AdamW": _rates("adamw", 3e-5, 1e-4, 3e-4, 1e-3, weight_decay=0.01),
            # Mirror descent at p = 2 with momentum is the same thing.
            "SGD, momentum": _rates("sgd", 0.01, 0.03, 0.1, 0.3, momentum=0.9),
            # At the start the penalty is about as large as the loss.
            "proximal l1": _rates("proximal-l1", 0.01, 0.03, 0.1, 0.3, momentum=0.9, l1=1e-4),
        },
        seeds=(0, 1, 2, 3, 4),
    ),
    # Constant rates until 99.5 % of the training reviews are right, as the paper trains.
    "imdb-to-the-end": Comparison(
        "laptop-to-the-end",
        {
            "MD p=1.1": _rates("mirror-descent", 0.03, 0.1, 0.3, p=1.1),
            "MD p=2": _rates("mirror-descent", 0.1, 0.3, 1.0, p=2.0),
            "MD p=3": _rates("mirror-descent", 3e-3, 0.01, 0.03, p=3.0),
            "AdamW": _rates("adamw", 3e-5, 1e-4, 3e-4, weight_decay=0.01),
        },
        seeds=(0, 1, 2, 3, 4),
    ),
    "cifar10": Comparison(
        "laptop-vit",
        {
            "MD p=1.1": _rates("mirror-descent", 0.03, 0.1, 0.3, 1.0, p=1.1),
            "MirrorAdam p=1.1": _rates("mirror-adam", 3e-4, 1e-3, 3e-3, 0.01, p=1.1),
            "AdamW": _rates("adamw", 3e-4, 1e-3, 3e-3, 0.01, weight_decay=0.01),
        },
        seeds=(0, 1, 2),
    ),
}
