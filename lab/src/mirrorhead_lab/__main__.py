"""The command `mirrorhead`, also as `python -m mirrorhead_lab`."""

import sys


def main() -> int:
    """Run the command line; an interrupt while it is imported is one line, too."""
    try:
        from mirrorhead_lab.cli.main import main as run
    except KeyboardInterrupt:
        print("mirrorhead: Interrupted.", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
