"""The command line: parse, call, print errors as one line.

A command is a frozen dataclass in its own module here: its fields are the options, its docstrings
the help, and `run` returns the exit code. Its module imports nothing heavy before `run`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from mirrorhead._version import __version__
from mirrorhead_lab.cli.attention import Attention
from mirrorhead_lab.cli.bias import Bias
from mirrorhead_lab.cli.classify import Classify
from mirrorhead_lab.cli.download import Download
from mirrorhead_lab.cli.evaluate import Evaluate
from mirrorhead_lab.cli.margins import Margins
from mirrorhead_lab.cli.patch import Patch
from mirrorhead_lab.cli.playground import Playground
from mirrorhead_lab.cli.report import Report
from mirrorhead_lab.cli.reproduce import Reproduce
from mirrorhead_lab.cli.study import Study
from mirrorhead_lab.cli.sweep import Sweep
from mirrorhead_lab.cli.train import Train
from mirrorhead_lab.cli.tune import Tune
from mirrorhead_lab.runtime.errors import UserError, reason, told

COMMANDS = {
    "reproduce": Reproduce,
    "bias": Bias,
    "download": Download,
    "train": Train,
    "sweep": Sweep,
    "study": Study,
    "evaluate": Evaluate,
    "attention": Attention,
    "margins": Margins,
    "report": Report,
    "tune": Tune,
    "patch": Patch,
    "classify": Classify,
    "playground": Playground,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    0 is success, 1 a failed computation, 2 wrong use or a damaged file, 130 an interrupt.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # a stream of another kind, or a closed one
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has ended, as in `mirrorhead --help | head -1`. Python would flush once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UserError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(told(error) if error.filename is not None else reason(error))
    except KeyboardInterrupt:
        print("mirrorhead: Interrupted. Run the same command again to resume.", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"mirrorhead {__version__}")
        return 0
    about = "Mirror descent for attention, and certificates for what it selects."
    return parse(COMMANDS, "mirrorhead", about, arguments).run()


def parse(commands: Mapping[str, Any], prog: str, about: str | None, words: list[str]) -> Any:
    """Return the command that the words name, with its options.

    Each command is parsed by a parser of its own, so that errors and suggestions are about it.
    """
    import tyro

    if not words or words[0].startswith("-"):
        return tyro.extras.subcommand_cli_from_dict(
            dict(commands), prog=prog, description=about, args=words
        )
    name, *rest = words
    if name not in commands:
        near = get_close_matches(name, commands, n=1)
        meant = f"did you mean {prog} {near[0]}?" if near else f"there are {', '.join(commands)}."
        raise UserError(f"there is no command {name!r}; {meant} See {prog} --help")
    command = commands[name]
    if hasattr(command, "ACTIONS"):
        return parse(command.ACTIONS, f"{prog} {name}", command.__doc__, rest)
    return tyro.cli(command, prog=f"{prog} {name}", args=rest)


def _fail(message: str) -> int:
    line = " ".join(message.split("\n"))
    print(f"mirrorhead: {line}", file=sys.stderr)
    return 2
