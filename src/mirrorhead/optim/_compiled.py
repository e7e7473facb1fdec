"""Eager steps through torch.compile, on devices: one kernel for each rule, for any shapes.

The kernel takes the step of tensors laid end to end. Numbers such as lr are tensors to it, so that
a schedule compiles nothing again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from mirrorhead.optim._batches import EagerBatch, Parts, advance
from mirrorhead.optim._rule import Hyper, Rule, Storage

_logger = logging.getLogger("mirrorhead")


class CompiledBatch(EagerBatch):
    """The eager step, compiled; geometries that need whole matrices stay eager."""

    def prepare(self, grads: list[Tensor]) -> None:
        """Compile the kernel on scratch tensors, before anything moves."""
        if self.rule.whole or self.rule.norm or self.rule.storage is Storage.CENTERED:
            return
        kernel, record, g = self.kernel(), self.records[0], grads[0]
        key = (self.rule, record.weight.device, g.dtype)
        if key in _compiled:
            return
        _logger.warning("mirrorhead: compiling the fused step for %s, %s", *key[0:1], g.dtype)
        like = (record.weight, g, record.stored, record.m, record.v)
        parts: Parts = [None if x is None else x.new_ones(7) for x in like]
        noise = torch.ones(7, dtype=torch.int32, device=record.weight.device)
        parts.append(noise if self.rule.stochastic else None)
        try:
            kernel(parts, Hyper(lr=0.1, **record.numbers))
        except Exception as error:
            raise RuntimeError(
                "fused=True: torch.compile could not build the kernel"
                f" ({type(error).__name__}, above); nothing has moved. foreach=True needs no"
                " compiler"
            ) from error
        _compiled.add(key)

    def kernel(self) -> Callable[[Parts, Hyper], Parts]:
        compiled, wide = _kernel(self.rule), self.rule.wide

        def call(parts: Parts, h: Hyper) -> Parts:
            device = parts[0].device  # pyright: ignore[reportOptionalMemberAccess]
            single = [x for x in h if not isinstance(x, Tensor)]
            numbers = iter(torch.tensor(single, dtype=wide).to(device, non_blocking=True).unbind())
            fields = [x.to(wide) if isinstance(x, Tensor) else next(numbers) for x in h]
            bare = [x if x is None else x.data for x in parts]
            return compiled(bare, fields)

        return call


_compiled: set[tuple] = set()


@cache
def _kernel(rule: Rule) -> Callable[[Parts, list[Tensor]], Parts]:
    def step(parts: Parts, numbers: list[Tensor]) -> Parts:
        return advance(rule, parts, Hyper(*numbers))

    return torch.compile(step, dynamic=True, fullgraph=True)
