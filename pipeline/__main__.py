"""Where `readie-pipeline` begins: with nothing to load, so that Ctrl-C while the rest is loaded is no traceback."""

import sys


def main() -> None:
    """Entry of the console script."""
    try:
        from pipeline.cli import main as run
    except KeyboardInterrupt:
        print("readie-pipeline: stopped", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
