"""The command `mirrorhead`, also as `python -m mirrorhead`; it lives in the lab, an extra."""

import sys


def main() -> int:
    """Run the command line, or say how to install it."""
    try:
        from mirrorhead.lab.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mirrorhead"):
            raise
        print(
            f"mirrorhead: the command line needs the package {error.name!r}. "
            "Install it with: pip install 'mirrorhead[lab]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("mirrorhead: Interrupted.", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
