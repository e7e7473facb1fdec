"""Everything that is measured of a run, part by part, on the real data.

`MEASURES` lists the parts. The attention that is scored is that of [CLS] in the last layer, mean
over heads. Measures are kept in the run's folder, each part with a stamp of the weights and the
data it was measured on, and are computed again only if one of them changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from mirrorhead._files import sha256_of, write_json
from mirrorhead_lab.datasets import (
    Encoded,
    Pairs,
    Pictures,
    Rationales,
    Texts,
    encode,
    even_batches,
    find,
    load_cad,
    load_eraser,
    load_tokenizer,
)
from mirrorhead_lab.datasets.sources import require
from mirrorhead_lab.evaluation import rationales, sparsity
from mirrorhead_lab.evaluation.attention_reading import normalized_entropy
from mirrorhead_lab.evaluation.results import SHARES, SPLITS, Measures
from mirrorhead_lab.models import TextClassifier, TextSettings, attention_maps
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.json_files import from_plain, read_json
from mirrorhead_lab.training.classification import evaluate
from mirrorhead_lab.training.presets import Preset
from mirrorhead_lab.training.run_folder import Run, weights_along

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Increases with every change of what a part measures; older ones are then computed again.
FORMATS = {"eraser": 2, "cad": 2}
BINS = 60
BATCH = 32  # small ones stay in a core's cache: 1.2 to 2 times faster than 128 for a narrow model
_KEPT = "measures.json"


@dataclass(frozen=True)
class _Kept:
    """measures.json: parts with the stamps of what they were measured on."""

    measures: dict[str, dict[str, Any]] = field(default_factory=dict)
    stamps: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationData:
    """The data sets that runs are measured on; each is read when it is first used.

    Args:
        name: what the runs were trained on, as `find` takes it.
        max_length: of the model's texts.
        folder, partial: as in `load_imdb`.
    """

    name: str
    max_length: int | None = None
    folder: str | Path | None = None
    partial: bool = False
    _digests: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def of(run: Run, folder: str | Path | None = None, *, partial: bool = False) -> EvaluationData:
        """Return the data for a run; runs whose models have the same max_length share them."""
        settings = run.preset.model
        length = settings.max_length if isinstance(settings, TextSettings) else None
        return EvaluationData(run.preset.data, length, folder, partial)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder, max_length=self.max_length or 512, partial=self.partial)

    @cached_property
    def test(self) -> Encoded | Pictures:
        """The test split, as published."""
        found = find(self.name).read_test(self.folder, partial=self.partial)
        return encode(found, self.tokenizer) if isinstance(found, Texts) else found

    @cached_property
    def eraser(self) -> dict[str, Rationales]:
        return {
            split: load_eraser(split, self.folder, partial=self.partial)
            for split in ("train", "val", "test")
        }

    @cached_property
    def share(self) -> float:
        """The share of words that people marked in ERASER's train split."""
        return float(np.concatenate(self.eraser["train"].marked).mean())

    @cached_property
    def cad(self) -> dict[str, Pairs]:
        return {
            split: load_cad(split, self.folder, partial=self.partial) for split in SPLITS["cad"]
        }

    def require(self, parts: Iterable[str]) -> None:
        """Refuse to begin while data sets are missing that these parts are measured on."""
        own = find(self.name)
        sets = [name for part in parts for name in SETS.get(part, (*own.sources, "bert"))]
        texts = own.kind == "text"
        wanted = [name for name in dict.fromkeys(sets) if texts or name != "bert"]
        require(*wanted, folder=self.folder)

    def digest(self, part: str) -> str:
        """Return a hash of the data that a part is measured on; an error if they are missing."""
        if part not in self._digests:
            self._digests[part] = sha256_of(self._content(part))
        return self._digests[part]

    def _content(self, part: str) -> bytes:
        if part == "weights":
            return b""
        if part == "eraser":
            sets = self.eraser.values()
            found = [(s.words, [mask.tolist() for mask in s.marked]) for s in sets]
            return repr((self.max_length, found)).encode()
        if part == "cad":
            pairs = [(p.original.texts, p.revision.texts) for p in self.cad.values()]
            return repr((self.max_length, pairs)).encode()
        test = self.test
        inputs = test.ids if isinstance(test, Encoded) else test.pixels
        return test.labels.tobytes() + inputs.tobytes()


def measure(
    run: Run,
    data: EvaluationData,
    parts: Sequence[str] | None = None,
    tell: Callable[[str], None] = lambda part: None,
) -> dict[str, Any]:
    """Return parts of `MEASURES` for a run, from its measures.json where that is up to date.

    Args:
        run: what `load_run` gave.
        data: the data to measure it on.
        parts: which; all that fit the run if None.
        tell: called with the name of each part before it is computed.
    """
    # What is missing is named before the work: data first, all at once.
    asked = check_parts(run, parts)
    data.require(asked)
    stamps = {part: stamp(run.folder, data, part) for part in asked}
    found = {}
    for part, wanted in stamps.items():
        kept = _read(run.folder)
        if part not in kept.measures or kept.stamps.get(part) != wanted:
            tell(part)
            measured = MEASURES[part](run, data)
            kept = _read(run.folder)  # another process may have written to it
            kept.measures[part], kept.stamps[part] = measured, wanted
            write_json(run.folder / _KEPT, dataclasses.asdict(kept))
        found[part] = kept.measures[part]
    return found


def check_parts(run: Run, parts: Sequence[str] | None = None) -> list[str]:
    """Return the parts asked for, if they fit the run; all parts that fit if None."""
    fitting = fitting_parts(run.preset)
    if wrong := [part for part in parts or () if part not in fitting]:
        known, data = ", ".join(fitting), run.preset.data
        raise UserError(f"parts must be of {known} for a run on {data}, got {wrong[0]}")
    return list(dict.fromkeys(parts)) if parts is not None else fitting


def fitting_parts(chosen: Preset) -> list[str]:
    """Return the parts that can be measured of the runs of a preset."""
    left_out = {*SPLITS} - {*find(chosen.data).annotated}
    left_out |= set() if chosen.training.milestones else {"milestones"}
    return [part for part in MEASURES if part not in left_out]


def stamp(folder: Path, data: EvaluationData, part: str) -> str:
    """Return a name that changes with everything that changes a part's measures."""
    about = f"mirrorhead measures {FORMATS.get(part, 1)}, {part}\n"
    weights = (folder / "best.safetensors").read_bytes()
    return sha256_of(about.encode(), weights, data.digest(part).encode())[:32]


def kept_measures(folder: Path, chosen: Preset) -> Measures | None:
    """Return what was measured of a run with a preset; None if a part is missing."""
    found = _read(folder).measures
    if not {*fitting_parts(chosen)} <= {*found}:
        return None
    return from_plain(found, Measures, str(folder / _KEPT))


def _read(folder: Path) -> _Kept:
    path = folder / _KEPT
    if not path.exists():
        return _Kept()
    return read_json(path, _Kept, "Delete it, and the run is measured again")


# --- the parts ------------------------------------------------------------------------------


def _test(run: Run, data: EvaluationData) -> dict[str, Any]:
    """Loss and accuracy of the best epoch's weights on the test split."""
    return _score(run.model, data)


def _score(model: nn.Module, data: EvaluationData) -> dict[str, Any]:
    return evaluate(model, data.test, batch_size=BATCH)


def _weights(run: Run, data: EvaluationData) -> dict[str, Any]:
    """How sparse keys, queries and values are: Figure 8."""
    return {kind: _sparsity(w) for kind, w in sparsity.attention_weights_by_kind(run.model).items()}


def _sparsity(weights: torch.Tensor) -> dict[str, Any]:
    """Counts and indices; those of weights that are all 0 are None, for 0/0."""
    limit = float(weights.abs().max())
    counts, edges = np.histogram(weights.double().numpy(), BINS, (-(limit or 1), limit or 1))
    return {
        "large": sparsity.count_large(weights),
        "gini": sparsity.gini(weights) if limit else None,
        "hoyer": sparsity.hoyer(weights) if limit else None,
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def _pruned(run: Run, data: EvaluationData) -> dict[str, Any]:
    """Accuracy on test without the smallest weights of each matrix, not trained again."""
    return {f"{s:g}": _score(sparsity.pruned(run.model, s), data)["accuracy"] for s in SHARES}


def _entropy(run: Run, data: EvaluationData) -> dict[str, Any]:
    """Normalized entropy of [CLS]'s attention in the last layer, mean over the test split."""
    model: Any = run.model
    last = len(model.blocks) - 1
    sums = torch.zeros((), dtype=torch.float64)
    lengths = getattr(data.test, "lengths", None)
    for batch in even_batches(np.arange(len(data.test)), BATCH, lengths):
        x = data.test.batch(batch)[0]
        (weights,) = attention_maps(model, x, layers=[last])  # (b, heads, 1, T)
        seen = (x != 0)[:, None, None, :] if isinstance(data.test, Encoded) else None
        sums = sums + normalized_entropy(weights.double(), seen)[:, :, 0].sum(dim=0)
    by_head = sums / len(data.test)
    return {"mean": float(by_head.mean()), "by_head": by_head.tolist()}


def _milestones(run: Run, data: EvaluationData) -> dict[str, Any]:
    """Accuracy on test after the first epoch that reached each training accuracy."""
    found: dict[str, Any] = {}
    model = run.preset.build()
    accuracies: dict[int | None, float] = {}  # by epoch: one may pass several milestones
    along = [(w, w.train_accuracy) for w in weights_along(run) if w.train_accuracy is not None]
    for share in run.preset.training.milestones:
        first = next(((weights, train) for weights, train in along if train >= share), None)
        if first is None:
            continue
        weights, train = first
        epoch = weights.epoch
        if epoch not in accuracies:
            weights.load_into(model)
            accuracies[epoch] = _score(model, data)["accuracy"]
        scores = {"train_accuracy": train, "test_accuracy": accuracies[epoch]}
        found[f"{share:g}"] = {"epoch": epoch, **scores}
    return found


def _eraser(run: Run, data: EvaluationData) -> dict[str, Any]:
    """Attention and its baselines against the words that people marked. Never pool the splits."""
    found: dict[str, Any] = {}
    for split in SPLITS["eraser"]:
        given = data.eraser[split], data.tokenizer, data.share
        scores = {n: rationales.score_rationales(run.model, s, *given) for n, s in _scorers(run)}
        found[split] = {name: dataclasses.asdict(score) for name, score in scores.items()}
    return found


def _cad(run: Run, data: EvaluationData) -> dict[str, Any]:
    """Attention and its baselines against the edits that flip the label."""
    found: dict[str, Any] = {}
    for split, pairs in data.cad.items():
        scores = {n: rationales.score_edits(s, pairs, data.tokenizer) for n, s in _scorers(run)}
        found[split] = {name: dataclasses.asdict(score) for name, score in scores.items()}
    return found


def _scorers(run: Run) -> Iterable[tuple[str, rationales.Scorer]]:
    model = run.model
    assert isinstance(model, TextClassifier)
    yield "attention", rationales.cls_attention(model)
    yield "gradient", rationales.gradient_times_input(model, model.tokens)
    yield "random", rationales.at_random()


#: What is measured, by name.
MEASURES: dict[str, Callable[[Run, EvaluationData], dict[str, Any]]] = {
    "test": _test,
    "weights": _weights,
    "pruned": _pruned,
    "entropy": _entropy,
    "eraser": _eraser,
    "cad": _cad,
    "milestones": _milestones,
}
#: The data sets of a part; those that are not here use what the run was trained on.
SETS = {"weights": (), "eraser": ("eraser", "bert"), "cad": ("cad", "bert")}
