"""One process or several: the rank of this one, how the model is wrapped, sums over all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that train one model together: the rank of this one and their number."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:  # the one that writes the files and prints
        return self.rank == 0

    def part(self, batch: np.ndarray) -> np.ndarray:
        """Return this process's share of a batch."""
        return batch[self.rank :: self.size]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module, how: Literal["ddp", "fsdp"]) -> nn.Module:
        """Replicate or shard the model, with the first process's weights; call what is returned."""
        if self.size == 1:
            return model
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        if how == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        from torch.distributed.fsdp import fully_shard

        for module in model.modules():
            if isinstance(module, nn.ModuleList):  # a stack of blocks
                for block in module:
                    fully_shard(block)
        fully_shard(model)  # in place
        return model


def own_device() -> torch.device:
    """Return this process's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def process_group() -> Iterator[ProcessGroup]:
    """Join the processes that torchrun started; without torchrun, this process is alone."""
    if dist.is_available() and dist.is_initialized():
        yield ProcessGroup(dist.get_rank(), dist.get_world_size())
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        store, rank, size = next(dist.rendezvous("env://"))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        try:
            yield ProcessGroup(rank, size)
            # Wait until no process needs the connections: closing one of gloo's resets it. A
            # barrier alone does not protect the peer: the first process to return from it may close
            # the connection while another is still inside (pytorch/gloo#155, open). The store
            # outlives the group. More is in docs/lab/reliability.md.
            dist.barrier()
            store.set(f"left-{rank}", "1")
            store.wait([f"left-{other}" for other in range(size)])
        finally:
            dist.destroy_process_group()
    else:
        yield ProcessGroup()
