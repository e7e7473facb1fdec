"""Patches: sparse differences between checkpoints, and weight sync by chains of them."""

from mirrorhead.patches.checkpoints import PatchError as PatchError
from mirrorhead.patches.patch import Patch as Patch
from mirrorhead.patches.weight_receiver import WeightReceiver as WeightReceiver
from mirrorhead.patches.weight_sync import WeightSync as WeightSync
