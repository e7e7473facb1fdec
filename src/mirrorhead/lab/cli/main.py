"""The command line: parse, call, report errors.

A command is a frozen dataclass in `commands/`: its fields are the options, its docstrings the
help, and `run` returns the exit code. Its module imports nothing heavy before `run`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mirrorhead._version import __version__
from mirrorhead.lab.cli.attention import Attention
from mirrorhead.lab.cli.collect import Collect
from mirrorhead.lab.cli.evaluate import Evaluate
from mirrorhead.lab.cli.patch import Patch
from mirrorhead.lab.cli.report import Report
from mirrorhead.lab.cli.reproduce import Reproduce
from mirrorhead.lab.cli.sweep import Sweep
from mirrorhead.lab.cli.train import Train
from mirrorhead.lab.runtime.errors import UserError

COMMANDS = {
    "reproduce": Reproduce,
    "train": Train,
    "sweep": Sweep,
    "evaluate": Evaluate,
    "collect": Collect,
    "attention": Attention,
    "report": Report,
    "patch": Patch,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 failed, 2 wrong use, 130 interrupted."""
    import tyro

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        print(f"mirrorhead {__version__}")
        return 0
    command: Any = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="mirrorhead",
        description="Mirror descent for attention, and certificates for what it selects.",
        args=arguments,
    )
    try:
        return command.run()
    except UserError as error:
        print(f"mirrorhead: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mirrorhead: stopped; the same command goes on from here", file=sys.stderr)
        return 130
