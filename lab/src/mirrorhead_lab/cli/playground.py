"""`mirrorhead playground`: drag tokens and see which one attention selects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mirrorhead_lab.cli.options import option
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.folders import check_new_file


@dataclass(frozen=True)
class Playground:
    """Open a page on which to drag tokens and see which one attention selects.

    The page needs no network. It shows the max-margin solution with its certificate, and the path
    of mirror descent, for tokens in the plane and any p.
    """

    save: Annotated[Path | None, option("FILE")] = None
    """Write the page to this file instead of opening it."""

    def run(self) -> int:
        import tempfile
        import webbrowser

        from mirrorhead._files import write_atomically
        from mirrorhead_lab.playground import playground_page

        if self.save is not None:
            check_new_file(self.save, "--save")
            if self.save.exists() and not _is_playground(self.save):
                raise UserError(
                    f"--save {self.save} exists and is not a playground page; choose another name"
                )
        path = self.save or Path(tempfile.mkdtemp(prefix="mirrorhead-")) / "playground.html"
        write_atomically(path, playground_page().encode())
        print(f"playground: {path}")
        if self.save is None and not webbrowser.open(path.as_uri()):
            print("No browser was found. Open that file in one.")
        return 0


def _is_playground(path: Path) -> bool:
    """Whether the file was written by this command: only then may it be replaced."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b'content="mirrorhead playground"' in file.read(2000)
