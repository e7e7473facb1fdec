"""How tests build an optimizer from a class and options that all classes share."""

from __future__ import annotations

from typing import Any

from mirrorhead import CenteredAdam, MirrorAdam


def build(cls: Any, params: Any, **options: Any) -> Any:
    """Return `cls(params, **options)`; MirrorAdam with a center is CenteredAdam, of reach lr."""
    if cls is not MirrorAdam or options.get("center") is None:
        options = {k: v for k, v in options.items() if k != "center" or cls is not MirrorAdam}
        return cls(params, **options)
    reach, steps = options.pop("lr", 0.1), options.pop("steps", 9)
    return CenteredAdam(params, reach=reach, total_steps=steps, **options)
