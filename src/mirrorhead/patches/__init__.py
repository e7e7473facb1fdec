"""Patches: the sparse difference between a checkpoint and its fine-tuned version."""

from mirrorhead.patches.checkpoints import PatchError as PatchError
from mirrorhead.patches.patch import Patch as Patch
