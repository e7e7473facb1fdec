"""The options that say where to compute, which several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mirrorhead.lab.runtime.errors import UserError

if TYPE_CHECKING:
    from mirrorhead.lab.runtime.jobs import Backend

Place = Literal["local", "dask", "slurm"]


def chosen_backend(place: Place, address: str, jobs: int | None, out: Path) -> Backend:
    """The backend of --backend, --address and --jobs, which must fit together."""
    from mirrorhead.lab.runtime.jobs import dask, local, slurm

    if address and place != "dask":
        raise UserError(f"--address goes with --backend dask, not with {place}")
    if jobs is not None and place != "local":
        raise UserError(f"--jobs goes with --backend local, not with {place}")
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}")
    if place == "slurm":
        return slurm(out)
    if place == "dask" and not address:
        raise UserError("--backend dask needs --address, such as tcp://host:8786")
    return dask(address) if place == "dask" else local(jobs)
