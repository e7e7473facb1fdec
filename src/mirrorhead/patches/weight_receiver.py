"""`WeightReceiver`: a served model that follows a trainer by patches."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor, nn

from mirrorhead.patches import chains, in_place, overlay
from mirrorhead.patches.checkpoints import (
    MemoryCheckpoint,
    PatchError,
    bits,
    open_checkpoint,
    refuse,
)
from mirrorhead.patches.file_format import TensorPatch
from mirrorhead.patches.fingerprint import Fingerprint
from mirrorhead.patches.overlay import Edit
from mirrorhead.patches.patch import Patch


class WeightReceiver:
    """A model in memory that is brought to the trainer's version by patches of a `WeightSync`.

    The weights are hashed once, when the receiver is made. Afterwards a patch costs as much as its
    changes: its base is compared with the known hashes, and replacing the values must lead to
    the hashes that it names. Everything is checked before the first weight is written.

    Args:
        model: a model or state dict with the dtypes that the sync sends, changed in place.

    >>> from mirrorhead import WeightSync
    >>> model, served = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    >>> sync = WeightSync(model)
    >>> _ = served.load_state_dict(sync.weights())
    >>> receiver = WeightReceiver(served)
    >>> patches = []
    >>> for _ in range(3):
    ...     with torch.no_grad():
    ...         _ = model.weight[0, 1].add_(1.0)
    ...     patches.append(sync.collect())
    >>> receiver.receive(patches).count
    1
    >>> receiver.version == sync.version
    True
    """

    def __init__(self, model: nn.Module | MutableMapping[str, Tensor]) -> None:
        if not isinstance(model, nn.Module | MutableMapping):
            raise TypeError(f"model must be a model or a state dict, got {type(model).__name__}")
        self._model = model
        self._known = self._hashed(self._opened())

    @property
    def version(self) -> str:
        """Hash of all weights as they were last read or received; as `WeightSync.version`."""
        return chains.version({name: str(total) for name, total in self._known.items()})

    def receive(self, patches: chains.Patches) -> Patch:
        """Bring the model to the version of the last patch; return the one patch that did it.

        Args:
            patches: as of `Patch.chain`: patches, files, or a folder. Those that are not needed
                may be among them, and those that lead away can be walked back.

        PatchError, and the model is as it was: if no chain of patches starts at this version, if a
        patch is damaged, or if the model was changed by others. Take a full copy then.
        """
        links = chains.links(patches)
        patch = Patch.chain(patches, self._version_among(links))
        self._write(patch)
        return patch

    def verify(self) -> None:
        """Hash all weights again; PatchError if anything but this receiver changed them."""
        now = self._hashed(self._opened())
        changed = [n for n, total in now.items() if str(total) != str(self._known.get(n))]
        refuse(
            "the model was changed by others: ", [f"{name!r} has other bits" for name in changed]
        )

    def _version_among(self, links: list[chains.Link]) -> str:
        """The version, of those that the patches lead from or to, that the model has."""
        found = {link.result: link.result_hashes for link in links}
        found |= {link.base: link.base_hashes for link in links}
        known = {name: str(total) for name, total in self._known.items()}
        for version, hashes in found.items():
            # A name that the model lacks may be one of several of a tensor; _write looks closer.
            if all(known.get(name, value) == value for name, value in hashes.items()):
                return version
        raise PatchError(
            f"none of the {len(links)} patches starts from the weights that the model has: take a"
            " full copy of the weights"
        )

    def _opened(self) -> MemoryCheckpoint:
        found = open_checkpoint(self._model, "model")
        assert isinstance(found, MemoryCheckpoint)
        return found

    def _hashed(self, source: MemoryCheckpoint) -> dict[str, Fingerprint]:
        own = {
            name: Fingerprint.total(Fingerprint.of(p, k) for k, p in source.pieces(name))
            for name in source.infos
            if name not in source.aliases
        }
        return own | {name: own[first] for name, first in source.aliases.items()}

    def _write(self, patch: Patch) -> None:
        source = self._opened()
        tensors = overlay.by_target_name(source, patch.tensors)
        overlay.check_shapes(source, tensors)
        if isinstance(self._model, nn.Module):
            in_place.check_memory(self._model, source, tensors)
        known, problems = dict(self._known), []
        for name, part in tensors.items():
            total = self._known[name] + _moved(source.tensors[name], part)
            if str(self._known[name]) != part.base or str(total) != part.result:
                problems.append(f"{name!r} was changed by others since it was last received")
            known |= dict.fromkeys(source.tied(name), total)
        refuse("the patch does not apply; take a full copy of the weights: ", problems)
        values = {n: (part.index, part.values) for n, part in tensors.items() if len(part.values)}
        in_place.stage(self._model, source, Edit(values, {}, (), {})).commit()
        self._known = known


def _moved(tensor: Tensor, part: TensorPatch) -> Fingerprint:
    """How the fingerprint of a tensor changes with its values at the patch's places."""
    places = torch.arange(part.info.size) if part.index is None else part.index
    before = bits(tensor.reshape(-1)).index_select(0, places.to(tensor.device))
    return Fingerprint.of(part.values, places) - Fingerprint.of(before, places)
