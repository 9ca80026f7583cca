"""The public surface of `readie`."""

import subprocess
import sys

import readie
from readie import client, resources
from readie.errors import ReadieError

CLIENT = ["Call", "Remote", "remote"]
PROBLEMS = [
    "BadBudget",
    "BadFunction",
    "BadRequest",
    "BadRequirement",
    "BadResult",
    "BadSetting",
    "BadSize",
    "CallCancelled",
    "CallError",
    "CallTimeout",
    "InstallFailed",
    "NoCapacity",
    "NoWorkers",
    "OutOfMemory",
    "PayloadTooLarge",
    "PlacementError",
    "PythonMismatch",
    "RateLimited",
    "ReadieError",
    "RemoteError",
    "ResultTooLarge",
    "RouterNotTrusted",
    "RouterStopping",
    "RouterUnreachable",
    "SandboxFailed",
    "SessionBusy",
    "SessionConflict",
    "SessionExpired",
    "Unauthorized",
    "Unavailable",
    "UnknownCheckpoint",
    "UnknownResource",
    "UsageError",
    "WorkerLost",
]


def modules_after(program: str) -> set[str]:
    """Names of the modules that a fresh Python has loaded after a program."""
    command = [sys.executable, "-c", f"import sys\n{program}\nprint(*sys.modules)"]
    return set(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.split())


def test_public_names_are_these() -> None:
    """`remote`, the types that it gives, `resource`, `after_restore`, and the exceptions that a caller can meet."""
    assert sorted(readie.__all__) == sorted([*CLIENT, *PROBLEMS, "after_restore", "resource"])
    assert all(getattr(readie, name) is getattr(client, name) for name in CLIENT)
    assert readie.resource is resources.resource
    assert all(issubclass(getattr(readie, name), ReadieError) for name in PROBLEMS)
    assert not hasattr(readie, "remoat")


def test_importing_readie_loads_no_client() -> None:
    """A worker that imports the units loads neither HTTP nor pickling."""
    assert {"httpx", "cloudpickle", "readie.client", "msgspec"}.isdisjoint(modules_after("import readie.units"))
