"""What several commands share: options with their help, where to compute, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg

from mirrorhead.lab.runtime.errors import UserError

if TYPE_CHECKING:
    from mirrorhead.lab.runtime.jobs import Backend

Flag = Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")]
Partial = Annotated[Flag, arg(help="Accept a slice of the data sets.")]
Download = Annotated[Flag, arg(help="Download data sets that are missing.")]
Json = Annotated[Flag, arg(help="Print a JSON object.")]
_DATA_HELP = "The folder of all data sets (default: $MIRRORHEAD_DATA)."
DataFolder = Annotated[Path | None, arg(metavar="FOLDER", help=_DATA_HELP, help_behavior_hint="")]
RunFolder = Annotated[
    Path | None,
    arg(metavar="FOLDER", help="The folder of this run.", help_behavior_hint="(default: runs/...)"),
]
PresetInt = Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: preset's)")]

BackendName = Annotated[
    Literal["local", "dask", "slurm"],
    arg(help="Compute on this machine, on the dask cluster at --address, or as SLURM jobs."),
]
_ADDRESS_HELP = "The dask scheduler, such as tcp://host:8786."
Address = Annotated[str, arg(metavar="ADDRESS", help=_ADDRESS_HELP, help_behavior_hint="")]
_JOBS_HELP, _ALL = "Processes of the local backend.", "(default: all cores)"
Jobs = Annotated[int | None, arg(metavar="N", help=_JOBS_HELP, help_behavior_hint=_ALL)]


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


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Report errors of these kinds as one line: the user can correct them."""
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from error
