"""Candidates of a sweep, as the command line has them: an optimizer, its options, its rates."""

from __future__ import annotations

from typing import Any, cast

from mirrorhead_lab.training.settings import OPTIMIZERS, OPTIONS, OptimizerName, OptimizerSettings


def parse_candidate(text: str) -> tuple[str, tuple[OptimizerSettings, ...]]:
    """Read a candidate from the command line: the optimizer, its options, its learning rates.

    Its name is all but the rates.

    >>> name, rules = parse_candidate("mirror-descent lr=0.1,0.3 p=1.1")
    >>> name, [rule.lr for rule in rules]
    ('mirror-descent p=1.1', [0.1, 0.3])
    """
    try:
        rules = _parsed(text)
    except ValueError as error:
        raise ValueError(f"candidate {text!r}: {error}") from None
    return candidate_name(rules[0]), rules


def _parsed(text: str) -> tuple[OptimizerSettings, ...]:
    first, *words = text.split() or [""]
    if first not in OPTIMIZERS:
        raise ValueError(f"it must begin with one of {', '.join(OPTIMIZERS)}")
    name = cast("OptimizerName", first)
    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in ("lr", *OPTIONS[name]):
            allowed = ", ".join(f"{option}=..." for option in ("lr", *OPTIONS[name]))
            raise ValueError(f"{name} takes {allowed}, got {word!r}")
        if key in given:
            raise ValueError(f"{key} is given twice")
        if key == "lr":
            given[key] = [_number(key, rate) for rate in value.split(",")]
        else:
            given[key] = value if key == "normalize" else _number(key, value)
    if "lr" not in given:
        raise ValueError("lr is missing, such as lr=0.03,0.1,0.3,1")
    given.setdefault("knee", usual_knee(name, given.get("p")))
    rates = given.pop("lr")
    return tuple(OptimizerSettings(name, lr=lr, **given) for lr in rates)


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


def usual_knee(name: str, p: float | None) -> float:
    """Return the default of MirrorAdam; 0 for other optimizers, and for p >= 2, which has no knee.

    >>> usual_knee("mirror-adam", 1.1), usual_knee("mirror-adam", 3.0), usual_knee("adamw", None)
    (1.0, 0.0, 0.0)
    """
    return 1.0 if name == "mirror-adam" and p is not None and p < 2 else 0.0
