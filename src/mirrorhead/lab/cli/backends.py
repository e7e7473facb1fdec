"""The options that say where to compute, which several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mirrorhead.lab.runtime.errors import UserError

if TYPE_CHECKING:
    from mirrorhead.lab.runtime.jobs import Backend

BackendName = Literal["local", "dask", "slurm"]


def chosen_backend(name: BackendName, address: str, jobs: int | None, out: Path) -> Backend:
    """The backend of --backend, --address and --jobs, which must fit together."""
    from mirrorhead.lab.runtime.jobs import dask, local, slurm

    if address and name != "dask":
        raise UserError(f"--address goes with --backend dask, not with {name}")
    if jobs is not None and name != "local":
        raise UserError(f"--jobs goes with --backend local, not with {name}")
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}")
    if name == "slurm":
        return slurm(out)
    if name == "dask" and not address:
        raise UserError("--backend dask needs --address, such as tcp://host:8786")
    return dask(address) if name == "dask" else local(jobs)
