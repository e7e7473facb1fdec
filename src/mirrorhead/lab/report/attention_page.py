"""A page of attention maps on sentences that one can point at: the paper's Figure 9."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup
from torch import Tensor

from mirrorhead._version import __version__
from mirrorhead.lab.evaluation.attention_reading import AttentionReading
from mirrorhead.lab.report.page import read, templates

#: Weights are whole numbers of this size in the page.
UNIT = 1e-4


def render_attention(
    looks: Sequence[AttentionReading],
    title: str,
    *,
    layer: int | None = None,
    head: int | None = None,
    rolled: bool = False,
) -> str:
    """The page as HTML; it loads nothing from elsewhere.

    Args:
        looks: one for each sentence.
        title: what the model is.
        layer, head, rolled: what to show first: a layer (the last), a head (their mean), or
            attention rollout.
    """
    environment = templates()
    layers, heads = looks[0].maps.shape[:2]
    layer = layers - 1 if layer is None else layer
    shown = [look.rollout if rolled else look.weights(layer, head) for look in looks]
    return environment.get_template("attention.html.j2").render(
        looks=looks,
        title=title,
        layers=layers,
        heads=heads,
        layer="rollout" if rolled else layer,
        head="mean" if head is None or rolled else head,
        shades=[(rows[0] / rows[0].max()).tolist() for rows in shown],
        weights=[rows[0].tolist() for rows in shown],
        content=[
            {
                "tokens": look.tokens,
                "maps": [[_whole(head) for head in layer] for layer in look.maps],
                "rollout": _whole(look.rollout),
            }
            for look in looks
        ],
        unit=UNIT,
        version=__version__,
        css=Markup(read("report.css") + read("attention.css")),
        js=Markup(read("attention.js")),
    )


def _whole(weights: Tensor) -> list[list[int]]:
    return (weights / UNIT).round().int().tolist()
