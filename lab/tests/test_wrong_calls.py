"""Wrong calls of every command: each ends with code 2 and says what to type instead."""

from __future__ import annotations

import re

import pytest

from mirrorhead_lab.cli.main import main


@pytest.mark.parametrize(
    ("line", "help_of"),
    [
        ("", "mirrorhead"),
        ("--onyl", "mirrorhead"),
        ("--onyl train", "mirrorhead train"),
        ("reproduce --trials x", "mirrorhead reproduce"),
        ("reproduce --onyl", "mirrorhead reproduce"),
        ("train imdb --epoch 3", "mirrorhead train"),
        ("train imdb --p abc", "mirrorhead train"),
        ("patch", "mirrorhead patch"),
        ("patch info file --onyl", "mirrorhead patch info"),
        ("playground extra", "mirrorhead playground"),
    ],
)
def test_a_line_that_cannot_be_parsed_points_to_the_help_of_its_command(
    line: str, help_of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out and "Traceback" not in printed.err
    assert re.findall(r"mirrorhead[a-z ]*(?= --help)", printed.err)[-1] == help_of


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian imdb", "there is no command 'trian'; did you mean mirrorhead train? See"),
        ("patch mak a b", "there is no command 'mak'; did you mean mirrorhead patch make? See"),
        ("xyzzy", "there is no command 'xyzzy'; there are reproduce, train, "),
    ],
)
def test_a_mistyped_command_is_one_line(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mirrorhead: {message}") and error.count("\n") == 1
