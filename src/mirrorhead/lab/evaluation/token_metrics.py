"""Metrics that compare a score per token with the tokens that people marked or edited.

The mask is what people marked (ERASER's rationales) or edited to flip the label (counterfactual
pairs). Every document has the same weight; test and validation of ERASER are marked in different
ways and are never pooled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def average_precision(scores: np.ndarray, marked: np.ndarray) -> float:
    """Area under the precision-recall curve of one document, in steps (AP).

    Sum over thresholds of (R_k - R_(k-1)) P_k. Equal scores are one threshold, so that the
    order of tied tokens does not matter. A random order scores a little above the share marked.

    >>> average_precision(np.array([0.9, 0.1, 0.5]), np.array([True, False, True]))
    1.0
    """
    scores, marked = _checked(scores, marked)
    if not marked.any():
        raise ValueError("marked must have at least one token")
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(marked[order])
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    precision, recall = hits[ends] / (ends + 1), hits[ends] / marked.sum()
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def mass(scores: np.ndarray, marked: np.ndarray) -> float:
    """The share of all score that sits on marked tokens; scores must not be negative."""
    scores, marked = _checked(scores, marked)
    if (scores < 0).any() or scores.sum() <= 0:
        raise ValueError("scores must not be negative, nor all zero")
    return float(scores[marked].sum() / scores.sum())


def top(scores: np.ndarray, share: float) -> np.ndarray:
    """The mask of the `share` of tokens with the highest scores, at least one of them.

    >>> top(np.array([0.1, 0.4, 0.2, 0.3]), 0.5)
    array([False,  True, False,  True])
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    chosen = np.zeros(len(scores), dtype=bool)
    count = max(1, round(share * len(scores)))
    chosen[np.argsort(-np.asarray(scores), kind="stable")[:count]] = True
    return chosen


def token_f1(chosen: np.ndarray, marked: np.ndarray) -> float:
    """2 P R / (P + R) of the chosen tokens; 0 if none is right."""
    both = int(np.sum(chosen & marked))
    return 2 * both / (int(chosen.sum()) + int(marked.sum())) if both else 0.0


def iou_f1(chosen: np.ndarray, marked: np.ndarray, overlap: float = 0.5) -> float:
    """F1 of spans: one is right if it overlaps one of the others by `overlap` of their union.

    As in ERASER (DeYoung et al. 2020): spans are runs of tokens; intersection over union of
    at least .5 counts.

    >>> marked = np.array([0, 1, 1, 1, 0, 0, 1, 1], dtype=bool)
    >>> iou_f1(np.array([0, 1, 1, 0, 0, 0, 0, 0], dtype=bool), marked)  # 1 of 1, 1 of 2
    0.6666666666666666
    """
    ours, theirs = _spans(chosen), _spans(marked)
    right = sum(any(_iou(a, b) >= overlap for b in theirs) for a in ours)
    found = sum(any(_iou(a, b) >= overlap for a in ours) for b in theirs)
    if not right or not found:
        return 0.0
    precision, recall = right / len(ours), found / len(theirs)
    return 2 * precision * recall / (precision + recall)


def word_scores(scores: np.ndarray, words: Sequence[int | None], count: int) -> np.ndarray:
    """Scores of words from those of their pieces, added up; 0 for words that were cut off.

    Args:
        scores: one for each token.
        words: the word that each token is a piece of, or None ([CLS], [SEP]).
        count: number of words.

    >>> word_scores(np.array([0.5, 0.25, 0.125, 0.125]), [None, 0, 0, 1], 3)
    array([0.375, 0.125, 0.   ])
    """
    if len(scores) != len(words):
        raise ValueError(f"{len(scores)} scores for {len(words)} tokens")
    total = np.zeros(count)
    for score, word in zip(scores, words, strict=True):
        if word is not None:
            total[word] += score
    return total


def _checked(scores: np.ndarray, marked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scores, marked = np.asarray(scores, dtype=np.float64), np.asarray(marked, dtype=bool)
    if scores.ndim != 1 or scores.shape != marked.shape:
        raise ValueError(f"scores and marked must be alike, got {scores.shape}, {marked.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite")
    return scores, marked


def _spans(mask: np.ndarray) -> list[tuple[int, int]]:
    """Runs of True: (start, end), end exclusive."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _iou(a: tuple[int, int], b: tuple[int, int]) -> float:
    common = max(0, min(a[1], b[1]) - max(a[0], b[0]))
    return common / (a[1] - a[0] + b[1] - b[0] - common)
