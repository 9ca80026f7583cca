"""How long a call waits for its first line, by how its sandbox starts: `python benchmarks/sandboxes.py --rootfs ROOTFS`.

The demo's ten calls, each with a checkpoint of just what it imports, side by side in one run: cold and restored in gVisor,
from the pool, cold and forked outside. Rounds go through all of them in a random order, so that a machine that is slower
for a while is so for each. The root filesystem is one that stands alone, with the demo's packages
(`readie-pipeline rootfs --out ROOTFS demo/requirements.lock`); both runtimes run it. Needs root and runsc.

The exit status is 1 where restoring is not ten times faster than a cold start in gVisor for pandas and scikit-learn, or
what alpha predicts is more than a fifth off in the median. The result is one JSON document on standard output; `--out`
writes it to a file, and `--table FILE` fills the tables of docs/gvisor.md from such a file and measures nothing.
"""

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.path.insert(1, str(ROOT / "demo"))

import cloudpickle  # noqa: E402
import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402

from readie import remote  # noqa: E402
from readie.files import replaced  # noqa: E402
from readie.manifest import CheckpointSpec  # noqa: E402
from readie.resources import FILE, hash_resources, read_resources  # noqa: E402
from worker.fork import ForkRuntime  # noqa: E402
from worker.pool import Pool  # noqa: E402
from worker.runsc import Options, RunscRuntime  # noqa: E402
from worker.runtime import Call, Runtime, Stop, Ties, run_call, run_in  # noqa: E402

PAGE = ROOT / "docs" / "gvisor.md"
WAYS = ("cold in gVisor", "restored in gVisor", "from the pool", "cold outside", "forked outside")
BALLAST_MB = (0, 100, 400)
HEAVY = ("pandas", "sklearn.linear_model")
FIND = """
import importlib.util, json, sys
def longest(name):
    while name:
        try:
            if importlib.util.find_spec(name): return name
        except ImportError: pass
        name = name.rpartition(".")[0]
print(json.dumps(sorted({found for name in sys.argv[1:] if (found := longest(name))})))
"""

console = Console(stderr=True)


def modules_of(rootfs: Path, function: Any) -> list[str]:
    """What a function imports, as modules that the root filesystem has."""
    hints = remote(function).request().modules
    found = subprocess.run([rootfs / "bin" / "python", "-c", FIND, *hints], capture_output=True, check=True)
    return msgspec.json.decode(found.stdout, type=list[str])


class Case:
    """A call, its checkpoint, and what was measured of it."""

    def __init__(self, title: str, function: Any, modules: Sequence[str], resources: str) -> None:
        self.title = title
        self.payload = cloudpickle.dumps((function, (), {}))
        self.modules = list(modules)
        name = "-".join(modules).replace(".", "_") or "empty"
        self.spec = CheckpointSpec(
            checkpoint_id=name[:100], generation="bench", canonical=tuple(modules), resources=resources
        )
        self.size_mb = 0.0
        self.seconds: dict[str, list[float]] = {way: [] for way in WAYS}

    def call(self, python: str) -> Call:
        return Call(self.payload, python, self.modules, 2**31, 2**31, 120.0, 120.0, 2**20)


def start(runtime: Runtime, case: Case, python: str, *, cold: bool) -> float:
    """Seconds to ready of one call in a sandbox of its own."""
    runtime.prepare()
    with Stop() as stop:
        spec = None if cold else case.spec
        result = run_call(runtime, spec, case.call(python), Ties(stop=stop), arrived=time.monotonic())
    if result.outcome != "returned":
        raise SystemExit(f"{case.title}: {result.problem}")
    return result.phases.ready


def take(pool: Pool, case: Case, python: str) -> float:
    """Seconds to ready of one call in a sandbox of the pool's, once the pool is full."""
    pool.asked = {case.spec.key: 1.0}
    with pool.changed:
        pool.changed.notify_all()
    while not pool.ready.get(case.spec.key):
        time.sleep(0.02)
    time.sleep(0.2)  # it has nothing left to do
    with Stop() as stop:
        arrived = time.monotonic()
        talk = pool.take(case.spec)
        if talk is None:
            raise SystemExit(f"{case.title}: the pool is empty")
        pool.asked = {}
        result = run_in(talk, case.call(python), Ties(stop=stop), arrived=arrived, restore=0.0)
        talk.close()
    if result.outcome != "returned":
        raise SystemExit(f"{case.title}: {result.problem}")
    return result.phases.ready


def measure(rootfs: Path, rounds: int) -> dict[str, Any]:
    import calls

    cloudpickle.register_pickle_by_value(calls)  # the root filesystem has no such module
    declared = read_resources(rootfs / FILE)
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="readie-bench-"))) for _ in range(2)]
        gvisor, fork = RunscRuntime(rootfs, folders[0], Options()), ForkRuntime(rootfs, folders[1])
        stack.callback(gvisor.close)
        stack.callback(fork.close)
        host = gvisor.describe().host
        python = ".".join(host.python.split(".")[:2])
        cases = []
        for one in calls.CALLS:
            modules = modules_of(rootfs, one.function)
            cases.append(Case(one.title, one.function, modules, hash_resources(declared, modules)))
        pair = Case("pandas + scikit-learn, imported", lambda: 0, HEAVY, hash_resources(declared, HEAVY))
        empty = Case("nothing", lambda: 0, (), hash_resources(declared, ()))
        cases += [pair, empty]
        for case in track(cases, "capturing", console=console):
            folder = folders[0] / "checkpoints" / case.spec.checkpoint_id
            case.size_mb = gvisor.save(case.spec, folder, timeout=300).measured_mb
            gvisor.load(case.spec, folder, timeout=300)
            fork.load(case.spec, folders[1], timeout=300)
        pool = Pool(gvisor, 1, 60.0)
        stack.callback(pool.close)
        for case in cases:
            pool.offer(case.spec)
        turns = [(case, way) for case in cases for way in WAYS for _ in range(rounds)]
        random.Random(5).shuffle(turns)
        for case, way in track(turns, "starting", console=console):
            match way:
                case "cold in gVisor":
                    seconds = start(gvisor, case, python, cold=True)
                case "restored in gVisor":
                    seconds = start(gvisor, case, python, cold=False)
                case "from the pool":
                    seconds = take(pool, case, python)
                case "cold outside":
                    seconds = start(fork, case, python, cold=True)
                case _:
                    seconds = start(fork, case, python, cold=False)
            case.seconds[way].append(seconds)
        ballast = [time_ballast(gvisor, folders[0], size, rounds, python) for size in BALLAST_MB]
        compressed = time_compression(gvisor, folders[0], pair, rounds, python)
    return {
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "date": time.strftime("%Y-%m-%d")},
        "runsc": host.runtime_version,
        "python": host.python,
        "rounds": rounds,
        "cases": [
            {"title": case.title, "modules": case.modules, "size_mb": case.size_mb, "seconds": case.seconds}
            for case in cases
        ],
        "ballast": ballast,
        "compression": compressed,
    }


def time_ballast(gvisor: RunscRuntime, folder: Path, size_mb: int, rounds: int, python: str) -> dict[str, Any]:
    """Restores of an executor with ballast instead of imports."""
    case = Case(f"ballast of {size_mb} MB", lambda: 0, (), hash_resources({}, ()))
    case.spec = msgspec.structs.replace(case.spec, checkpoint_id=f"ballast_{size_mb}", ballast_mb=float(size_mb))
    place = folder / "checkpoints" / case.spec.checkpoint_id
    gvisor.save(case.spec, place, timeout=300)
    gvisor.load(case.spec, place, timeout=300)
    return {"size_mb": size_mb, "seconds": [start(gvisor, case, python, cold=False) for _ in range(rounds)]}


def time_compression(
    gvisor: RunscRuntime, folder: Path, case: Case, rounds: int, python: str
) -> dict[str, dict[str, Any]]:
    """Size and restores of one checkpoint, as it is kept and compressed, in turns."""
    specs = {}
    for kind in ("none", "flate-best-speed"):
        gvisor.compression = kind
        spec = msgspec.structs.replace(case.spec, checkpoint_id=f"compression_{kind}")
        gvisor.save(spec, folder / "checkpoints" / kind, timeout=300)
        gvisor.load(spec, folder / "checkpoints" / kind, timeout=300)
        size = sum(path.stat().st_size for path in (folder / "checkpoints" / kind / "image").iterdir())
        specs[kind] = (spec, size / 1e6)
    found: dict[str, dict[str, Any]] = {kind: {"file_mb": size, "seconds": []} for kind, (_, size) in specs.items()}
    for _ in range(rounds):
        for kind, (spec, _) in specs.items():
            case.spec = spec
            found[kind]["seconds"].append(start(gvisor, case, python, cold=False))
    return found


# ---- the tables ----


def fit(result: dict[str, Any]) -> tuple[float, float, list[float]]:
    """Alpha and the fixed part by least squares over checkpoints and ballast; each case's relative error, as predicted
    from all the others.
    """
    points = [(case["size_mb"], statistics.median(case["seconds"]["restored in gVisor"])) for case in result["cases"]]
    points += [(one["size_mb"], statistics.median(one["seconds"])) for one in result["ballast"]]
    sizes, seconds = np.array(points).T
    slope, fixed = np.polyfit(sizes, seconds, 1)
    errors = []
    for left_out in range(len(result["cases"])):
        others = np.polyfit(np.delete(sizes, left_out), np.delete(seconds, left_out), 1)
        errors.append(abs(float(np.polyval(others, sizes[left_out])) - seconds[left_out]) / seconds[left_out])
    return float(slope), float(fixed), errors


def write_tables(result: dict[str, Any]) -> str:
    """Markdown: seconds to ready by call and way, then what the last lines claim."""

    def middle(case: dict[str, Any], way: str) -> float:
        return float(statistics.median(case["seconds"][way]))

    lines = [
        "| call | MB | " + " | ".join(WAYS) + " | cold / restored | cold / pool |",
        "|---|---|" + "---|" * (len(WAYS) + 2),
    ]
    for case in result["cases"]:
        cells = [f"{middle(case, way):.3f}" for way in WAYS]
        ratios = [middle(case, WAYS[0]) / middle(case, way) for way in WAYS[1:3]]
        lines.append(
            f"| {case['title']} | {case['size_mb']:.0f} | "
            + " | ".join(cells)
            + f" | {ratios[0]:.1f}× | {ratios[1]:.0f}× |"
        )
    alpha, fixed, errors = fit(result)
    small, large = (result["compression"][kind] for kind in ("flate-best-speed", "none"))
    conditions = (
        f"Medians of {result['rounds']} starts each, in seconds, in a random order; runsc {result['runsc']}, Python "
        f"{result['python']}, {result['machine']['cpus']} virtual processors, {result['machine']['date']}."
    )
    line = (
        f"- alpha, by least squares over the {len(result['cases'])} checkpoints and ballast of 0, 100 and 400 MB: "
        f"{alpha:.6f} s/MB; the fixed part {fixed:.3f} s. Each checkpoint predicted from all the "
        f"others, against measured: median error {100 * statistics.median(errors):.0f} %."
    )
    compression = (
        f"- Compression (`flate-best-speed`) of the checkpoint of pandas and scikit-learn: {small['file_mb']:.0f} MB of "
        f"files instead of {large['file_mb']:.0f}, and {statistics.median(small['seconds']):.3f} s to ready instead of "
        f"{statistics.median(large['seconds']):.3f}. So checkpoints are not compressed."
    )
    lines += ["", conditions, "", line, compression]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rootfs", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each call and way; default: 5")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="write the tables of docs/gvisor.md from this result")
    options = parser.parse_args()
    if options.table:
        text = PAGE.read_text(encoding="utf-8")
        head, _, rest = text.partition("<!-- measured -->\n")
        tail = rest.partition("<!-- end -->")[2]
        tables = write_tables(msgspec.json.decode(options.table.read_bytes()))
        PAGE.write_text(f"{head}<!-- measured -->\n{tables}\n<!-- end -->{tail}", encoding="utf-8")
        return
    if options.rootfs is None:
        parser.error("give --rootfs, or --table")
    result = measure(options.rootfs, options.rounds)
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
    if options.out:
        with replaced(options.out) as aside:
            aside.write_bytes(encoded + b"\n")
    print(encoded.decode())
    [pair] = [case for case in result["cases"] if case["modules"] == list(HEAVY)]
    cold, restored = (statistics.median(pair["seconds"][way]) for way in WAYS[:2])
    error = statistics.median(fit(result)[2])
    console.print(
        f"pandas and scikit-learn: {cold / restored:.1f}×; predicted within {100 * error:.0f} % in the median"
    )
    sys.exit(int(cold < 10 * restored or error > 0.2))


if __name__ == "__main__":
    main()
