"""A model's attention against people: ERASER's rationales and counterfactual edits.

What is scored is fixed here, before any test set is looked at: attention of [CLS] in the last
layer, mean over heads. Baselines are scored by the same code: random scores, and gradient
times input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mirrorhead.analysis.selection import (
    average_precision,
    iou_f1,
    mass,
    token_f1,
    top,
    word_scores,
)
from mirrorhead.data.cad import Pairs, edited
from mirrorhead.data.eraser import Rationales
from mirrorhead.models.maps import attention_maps

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: From token numbers of one text, (1, T), to a score of at least 0 for each, (T,).
Scorer = Callable[[Tensor], np.ndarray]


@dataclass(frozen=True)
class RationaleScores:
    """Means over documents; `chance` is the share marked, a little below what `at_random` gets."""

    documents: int
    auprc: float
    token_f1: float
    iou_f1: float
    comprehensiveness: float
    sufficiency: float
    chance: float


@dataclass(frozen=True)
class EditScores:
    """Means over pairs, for originals; `chance` is the share edited, a little below `at_random`."""

    pairs: int
    auprc: float
    mass: float
    chance: float


def cls_attention(model: nn.Module) -> Scorer:
    """What [CLS] looks at in the last layer, mean over heads."""

    def score(ids: Tensor) -> np.ndarray:
        maps = attention_maps(model, ids)
        return maps[-1][0, :, 0].mean(dim=0).double().numpy()

    return score


def gradient_times_input(model: nn.Module, embedding: nn.Module) -> Scorer:
    """|gradient of the predicted class's logit . embedding|, by token.

    Args:
        model: from token numbers to logits.
        embedding: the module of the model that embeds tokens, such as `model.tokens`.
    """

    def score(ids: Tensor) -> np.ndarray:
        kept: list[Any] = []
        handle = embedding.register_forward_hook(lambda _, __, out: kept.append(out))
        was_training = model.training
        model.eval()
        try:
            logits = model(ids)[0]
        finally:
            handle.remove()
            model.train(was_training)
        (gradient,) = torch.autograd.grad(logits.max(), kept[0])
        return (gradient * kept[0]).sum(dim=-1)[0].detach().abs().double().numpy()

    return score


def at_random(seed: int = 0) -> Scorer:
    """Scores that know nothing."""
    rng = np.random.default_rng(seed)
    return lambda ids: rng.random(ids.shape[1])


def score_rationales(
    model: nn.Module, scorer: Scorer, rationales: Rationales, tokenizer: Tokenizer, share: float
) -> RationaleScores:
    """How well the scorer finds the words that people marked.

    A word has the scores of its pieces, added up; words beyond the tokenizer's max_length have 0.
    For the measures that need a choice, the `share` of words with the highest scores is chosen:
    take the share marked in training. Comprehensiveness is how much the probability of the
    predicted class falls without the chosen words, sufficiency how much it falls with them alone.
    Documents with nothing marked are left out.
    """
    rows = []
    for words, marked in zip(rationales.words, rationales.marked, strict=True):
        if not marked.any():
            continue
        found = tokenizer.encode(list(words), is_pretokenized=True)
        ids = torch.tensor([found.ids])
        scores = word_scores(scorer(ids), found.word_ids, len(words))
        chosen = top(scores, share)
        inside = np.array([w is not None and bool(chosen[w]) for w in found.word_ids])
        special = np.array([w is None for w in found.word_ids])
        rows.append(
            (
                average_precision(scores, marked),
                token_f1(chosen, marked),
                iou_f1(chosen, marked),
                _fall(model, ids, ~inside),
                _fall(model, ids, inside | special),
                float(marked.mean()),
            )
        )
    if not rows:
        raise ValueError("rationales has no document with anything marked")
    return RationaleScores(len(rows), *np.mean(rows, axis=0).tolist())


def score_edits(scorer: Scorer, pairs: Pairs, tokenizer: Tokenizer) -> EditScores:
    """How well the scorer finds the tokens of originals that had to change to flip the label.

    [CLS] and [SEP] are not candidates. Pairs in which nothing was changed before the texts are
    cut off are left out.
    """
    rows = []
    for one, two in zip(pairs.original.texts, pairs.revision.texts, strict=True):
        original, revision = tokenizer.encode(one).ids, tokenizer.encode(two).ids
        changed = edited(original[1:-1], revision[1:-1])[0]
        if not changed.any():
            continue
        scores = scorer(torch.tensor([original]))[1:-1]
        rows.append(
            (average_precision(scores, changed), mass(scores, changed), float(changed.mean()))
        )
    if not rows:
        raise ValueError("pairs has no pair with an edit")
    return EditScores(len(rows), *np.mean(rows, axis=0).tolist())


@torch.no_grad()
def _fall(model: nn.Module, ids: Tensor, kept: np.ndarray) -> float:
    """How much the probability of the predicted class falls if only some tokens are kept."""
    was_training = model.training
    model.eval()
    before = model(ids)[0].softmax(dim=0)
    after = model(ids[:, torch.from_numpy(kept)])[0].softmax(dim=0)
    model.train(was_training)
    best = int(before.argmax())
    return float(before[best] - after[best])
