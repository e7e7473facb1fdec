"""Training around a center w0, such as pretrained weights: `MirrorDescent` and `CenteredAdam`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mirrorhead._checks import is_number
from mirrorhead.optim._base import GeometryOptimizer
from mirrorhead.optim._options import check_number
from mirrorhead.optim._rule import Group
from mirrorhead.optim._sharded import is_sharded, largest_entry, local, reduce_shards
from mirrorhead.optim._tensors import has_values

Center = Literal["init"] | Mapping[str, Tensor] | Sequence[Tensor] | None

_CENTER = 'center must be None, "init", a state dict or a list of tensors'


class WithCenter(GeometryOptimizer):
    """An optimizer whose groups may have a center."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._centers: dict[Tensor, Tensor] = {}  # given by the caller, until the first step
        GeometryOptimizer.__init__(self, params, defaults)  # not MirrorAdam's
        if _is_given(defaults["center"]):
            self.defaults["center"] = None  # the groups have what was given

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_centers": self._centers}

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, with any option of the constructor as its own, geometry included."""
        own = param_group.get("center") if isinstance(param_group, dict) else None
        if isinstance(own, str) and own == "given":
            raise ValueError(_CENTER)
        super().add_param_group(param_group)

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        super().check_options(options)
        center = options["center"]
        if options["reach"] is not None:
            check_number("reach", options["reach"], positive=True)
        if isinstance(center, str) and center not in ("init", "given"):
            raise ValueError(f"{_CENTER}, got {center!r}")
        if _is_given(center) and (isinstance(center, Tensor) or not hasattr(center, "__len__")):
            raise TypeError(f"{_CENTER}, got {type(center).__name__}")
        if center is None:
            return
        if options["stochastic_rounding"]:
            raise ValueError(
                "stochastic_rounding cannot be used with center: unchanged weights would not keep"
                " the bits of the center"
            )
        if not options["keep_dual"]:
            raise ValueError("keep_dual=False cannot be used with center, which needs its state")

    @classmethod
    def _check_geometry(cls, options: Group) -> None:
        super()._check_geometry(options)
        if options["center"] is not None and not is_number(options["geometry"]):
            raise ValueError(
                f"center needs a p-norm, got geometry={options['geometry']!r}: give"
                " geometry=Centered(...) in a group of its own"
            )

    def _take_group(self, group: Group) -> None:
        """Make a center that was set in a group that of the next step, too."""
        super()._take_group(group)
        if _is_given(group["center"]):
            params = group["params"]
            centers = matched_centers(group["center"], group.get("param_names", ()), params)
            self._centers.update(zip(params, centers, strict=True))
            for param in params:
                self._drop_center(param)
            group["center"] = "given"

    def _place_center(self, group: Group, param: Tensor) -> None:
        """Make w0 and S of a parameter where they are missing."""
        state = self.state[param]
        if "center" in state:
            self._centers.pop(param, None)  # a checkpoint was loaded since
            return
        given = self._centers.pop(param, None)
        if given is None and group["center"] == "given":
            raise RuntimeError(
                f"the center of {self._name(group, param)} is missing: the checkpoint was saved"
                " before the first step. Set the group's center again"
            )
        state["center"] = param.detach().clone() if given is None else like_param(given, param)
        where = local(param).device if has_values(local(param)) else "cpu"
        scale = group["reach"]
        if given is not None:
            scale = first_scale([param], [state["center"]], scale)[0]
        state["scale"] = torch.tensor(scale, dtype=torch.float64, device=where)
        state.pop("dual", None)  # of steps without a center
        self._last.pop(param, None)


def full_steps(total: float) -> float:
    """Return how many full steps a run counts as: `total`, but at most 8 times its root.

    In long runs no weight's gradient keeps its sign. The mean direction of noise over n steps falls
    like 1/sqrt(n), and with the whole sum nothing would move (docs/patches.md).

    >>> full_steps(20), full_steps(10_000)
    (20, 800.0)
    """
    return min(total, 8 * math.sqrt(total))


def _is_given(center: Any) -> bool:
    return center is not None and not isinstance(center, str)


def first_scale(params: Sequence[Tensor], centers: Sequence[Tensor], reach: float) -> list[float]:
    """Return the S of weights that have not taken a step yet: max(reach, max |w - w0|)."""
    largest = [
        largest_entry(local(param).double() - local(center).double())
        for param, center in zip(params, centers, strict=True)
    ]
    return [max(reach, float(x)) for x in reduce_shards(largest, params, "max")]


def matched_centers(center: Any, names: Sequence[str], params: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensor of `center` for each parameter, from a state dict or a list."""
    if hasattr(center, "keys"):
        if not names:
            raise ValueError(
                "center is a state dict, so the parameters need names: give"
                " model.named_parameters() or attention_param_groups(model)"
            )
        if missing := [name for name in names if name not in center]:
            raise ValueError(f"center has no tensor for {', '.join(map(repr, missing[:5]))}")
        center = [center[name] for name in names]
    tensors = list(center)
    if len(tensors) != len(params):
        raise ValueError(
            f"center has {len(tensors)} tensors for a group of {len(params)} parameters"
        )
    result = []
    for i, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
        label = repr(names[i]) if names else f"parameter {i}"
        if not isinstance(tensor, Tensor) or tensor.shape != param.shape:
            given = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"center of {label} must be a tensor of shape {tuple(param.shape)}, got {given}"
            )
        if has_values(local(tensor)) and not local(tensor).isfinite().all():
            raise ValueError(f"center of {label} has inf or NaN")
        # A copy: the model's own state dict, an average of weights or a teacher will move.
        result.append(tensor.detach().to(dtype=param.dtype, copy=True))
    return result


def like_param(center: Tensor, param: Tensor) -> Tensor:
    """Return the center on the parameter's device, sharded as the parameter is."""
    if is_sharded(param) and not is_sharded(center):
        from torch.distributed.tensor import distribute_tensor

        device = param.device_mesh.device_type
        return distribute_tensor(center.to(device), param.device_mesh, param.placements)
    return center.to(param.device)
