"""`outrider` and `python -m outrider`."""

import sys


def main() -> None:
    """Run the command line; an interrupt while the program is being read ends it as quietly as later on."""
    try:
        from outrider.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("outrider: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
