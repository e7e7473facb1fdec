"""What a fine-tuned classifier needs beside its weights: labels, pooling, where its head is.

A patch carries these few entries of config.json, and writes them when it is applied to a folder.
Any other entry is refused: some make a loader run code that comes with the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mirrorhead.patches.checkpoints import FileCheckpoint, PatchError

Config = Mapping[str, Any]
Files = dict[str, bytes | None]  # name in the folder -> its new content, None for no such file

#: Entry of a safetensors file's metadata that has the config of the model in it.
KEY = "mirrorhead.config"
#: Entry of config.json that describes a head which is not one of `transformers`' own.
HEAD = "mirrorhead"
FILE = "config.json"
#: A list with the text of config.json before each patch that changed it, oldest first.
HISTORY = "config.history.json"
_PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")


def classifier_config(labels: tuple[str, ...], max_length: int) -> dict[str, Any]:
    """The config of an encoder whose mean over the tokens goes into a linear layer `head`.

    >>> classifier_config(("no", "yes"), 32)["id2label"]
    {'0': 'no', '1': 'yes'}
    """
    head = {"pooling": "mean", "weight": "head.weight", "bias": "head.bias"}
    return checked(
        {
            "id2label": {str(i): label for i, label in enumerate(labels)},
            "label2id": {label: i for i, label in enumerate(labels)},
            HEAD: {**head, "max_length": max_length},
        }
    )


def checked(config: Any) -> dict[str, Any]:
    """The config, or ValueError if it has anything but the entries that a patch may write."""
    if not isinstance(config, Mapping):
        raise ValueError(f"the config is a {type(config).__name__}, not an object")
    for key, value in config.items():
        if key not in _CHECKS:
            raise ValueError(f"a patch may not write the entry {key!r} of config.json")
        if not _CHECKS[key](value):
            raise ValueError(f"the entry {key!r} of the config is not valid: {value!r}"[:300])
    return dict(config)


def found(base: Any, tuned: Any) -> dict[str, Any]:
    """What the config of `tuned`, a folder or a file that `tune` wrote, has other than `base`."""
    before, after = _own(base), _own(tuned)
    config = {k: v for k, v in after.items() if k in _CHECKS and before.get(k) != v}
    try:
        return checked(config)
    except ValueError:  # such as labels that two classes share; the weights are what counts
        return {}


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json."""
    file = folder / FILE
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise PatchError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PatchError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise PatchError(f"{file} holds no JSON object")
    return content


def applied(target: Any, config: Config) -> Files:
    """The files that change where a patch with this config is applied to a folder."""
    path = _folder(target)
    if not config or path is None:
        return {}
    content = read_config(path)
    history = [*_history(path), (path / FILE).read_bytes().decode()]
    return {FILE: _as_json({**content, **config}), HISTORY: _as_json(history)}


def reverted(target: Any, config: Config) -> Files:
    """The files that change where the patch is reverted: config.json is as before, to the byte."""
    path = _folder(target)
    if not config or path is None:
        return {}
    now, history = read_config(path), _history(path)
    if not history and any(now.get(key) != value for key, value in config.items()):
        return {}  # the entries are gone already
    if not history:
        raise PatchError(
            f"{path / HISTORY} is missing, which has the base's config.json: revert the weights'"
            " file instead of the folder"
        )
    text = history.pop()
    before = json.loads(text)
    restored = text.encode()
    if now != {**before, **config}:  # somebody changed other entries since: these stay
        kept = {key: value for key, value in now.items() if key not in config}
        restored = _as_json({**kept, **{k: before[k] for k in config if k in before}})
    return {FILE: restored, HISTORY: _as_json(history) if history else None}


def _own(source: Any) -> dict[str, Any]:
    """The config of a folder or of a file that has one in its metadata; {} of anything else."""
    if not isinstance(source, str | Path):
        return {}
    path, folder = Path(source), _folder(source)
    try:
        if folder is not None:
            return read_config(folder)
        content = json.loads(FileCheckpoint([path], str(path)).metadata[path].get(KEY, "{}"))
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _folder(source: Any) -> Path | None:
    return Path(source) if isinstance(source, str | Path) and Path(source).is_dir() else None


def _history(folder: Path) -> list[str]:
    file = folder / HISTORY
    if not file.exists():
        return []
    with suppress(OSError, AttributeError, TypeError, ValueError, RecursionError):
        texts = json.loads(file.read_text("utf-8"))
        if texts and all(isinstance(json.loads(text.encode()), dict) for text in texts):
            return list(texts)
    raise PatchError(f"{file} is damaged: it should hold texts of config.json")


def _as_json(content: Any) -> bytes:
    text = json.dumps(content, indent=2, sort_keys=True)  # as transformers writes it
    return (text + "\n").encode()


def _is_word(value: Any) -> bool:
    # Labels are printed: one with an escape sequence could write anything to a terminal.
    return isinstance(value, str) and value.isprintable() and value != ""


def _names_labels(value: Any) -> bool:
    """Whether this is {"0": label, "1": label, ...}, without a label that is there twice."""
    return (
        isinstance(value, dict)
        and value.keys() == {str(i) for i in range(len(value))}
        and all(map(_is_word, value.values()))
        and len(set(value.values())) == len(value) > 0
    )


def _numbers_labels(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(type(n) is int for n in value.values())
        and _names_labels({str(n): label for label, n in value.items()})
    )


def _describes_head(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"pooling", "weight", "bias", "max_length"}
        and value["pooling"] == "mean"
        and _is_word(value["weight"])
        and _is_word(value["bias"])
        and type(value["max_length"]) is int
        and value["max_length"] > 0
    )


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "id2label": _names_labels,
    "label2id": _numbers_labels,
    "problem_type": lambda value: value in _PROBLEMS,
    HEAD: _describes_head,
}
