"""Which version of Readie runs."""

from importlib.metadata import PackageNotFoundError, version


def this_version() -> str:
    """The installed version; 0 where it runs from a checkout that is not installed."""
    try:
        return version("readie")
    except PackageNotFoundError:
        return "0"
