"""Where `readie-worker` begins: with nothing to load, so that Ctrl-C while the rest is loaded is no traceback."""

import sys


def main() -> None:
    """Entry of the console script."""
    try:
        from worker.cli import main as run
    except KeyboardInterrupt:
        print("readie-worker: stopped", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in {"readie", "worker"}:
            raise  # ours, not one that an extra brings
        print(f"readie-worker: {error.name} is not installed. Run pip install 'readie[worker]'", file=sys.stderr)
        sys.exit(1)
    run()


if __name__ == "__main__":
    main()
