"""What several commands share: options with their help, where to compute, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from mirrorhead_lab.runtime.errors import UserError

if TYPE_CHECKING:
    from mirrorhead_lab.runtime.jobs import Backend


def option(metavar: str, default: str = "", help: str | None = None, **more: Any) -> Any:
    """An option whose default is shown in these words, or not at all."""
    return arg(metavar=metavar, help=help, help_behavior_hint=default, **more)


Flag = Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")]
Partial = Annotated[Flag, arg(help="Accept a slice of the data sets.")]
Download = Annotated[Flag, arg(help="Download data sets that are missing.")]
Json = Annotated[Flag, arg(help="Print a JSON object.")]
_DATA_HELP = "The folder of all data sets (default: $MIRRORHEAD_DATA)."
DataFolder = Annotated[Path | None, option("FOLDER", "", _DATA_HELP)]
RunFolder = Annotated[
    Path | None, option("FOLDER", "(default: runs/...)", "The folder of this run.")
]
PresetInt = Annotated[int | None, option("N", "(default: preset's)")]

BackendName = Annotated[
    Literal["local", "dask", "slurm"],
    arg(help="Compute on this machine, on the dask cluster at --address, or as SLURM jobs."),
]
_ADDRESS_HELP = "The dask scheduler, such as tcp://host:8786."
Address = Annotated[str, option("ADDRESS", "", _ADDRESS_HELP)]
_JOBS_HELP, _ALL = "Processes of the local backend.", "(default: all cores)"
Jobs = Annotated[int | None, option("N", _ALL, _JOBS_HELP)]


def chosen_backend(name: BackendName, address: str, jobs: int | None, out: Path) -> Backend:
    """The backend of --backend, --address and --jobs, which must fit together."""
    from mirrorhead_lab.runtime.jobs import dask, local, slurm

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
def user_errors(*kinds: type[Exception], command: object = None) -> Iterator[None]:
    """Report errors of these kinds as one line: the user can correct them.

    A message that begins with the name of a field of `command` begins with its option instead.
    """
    try:
        yield
    except kinds as error:
        name, space, rest = str(error).partition(" ")
        if command is not None and name in vars(command):
            name = spelled(name)
        raise UserError(f"{name}{space}{rest}") from error


def spelled(field: str) -> str:
    """Return the option of a field.

    >>> spelled("batch_size")
    '--batch-size'
    """
    return f"--{field.replace('_', '-')}"
