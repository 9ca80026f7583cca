"""`readie-worker`: the agent, and what the pipeline needs of a worker: describe, probe, save, restore."""

import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn
from uuid import uuid4

import msgspec
import typer

from readie.command_line import (
    JsonOption,
    add_version,
    plain,
    print_json,
    report_checks,
    run_command_line,
    say,
    waiting,
)
from readie.errors import BadFile, BadRequest, UsageError
from readie.flavor import Flavor, parse_flavor
from readie.manifest import read_spec
from readie.units import parse_size
from worker.host import opened
from worker.measure import ProbeRequest, measure
from worker.runsc import Options
from worker.runtime import SaveFailed, StartFailed, try_start
from worker.specification import Limits

app = typer.Typer(
    name="readie-worker",
    help="Runs calls in sandboxes (serve), and measures and captures for the pipeline in the very same way.",
    epilog="Example: ROOTFS=rootfs CHECKPOINT_DIR=checkpoints readie-worker serve",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
add_version(app, "readie-worker")

RootfsOption = Annotated[
    Path, typer.Option("--rootfs", envvar="ROOTFS", help="The root filesystem: a folder with its own bin/python.")
]
RuntimeOption = Annotated[
    str, typer.Option("--runtime", envvar="RUNTIME", help="fork: forked processes, no isolation. runsc: gVisor.")
]
CheckpointsOption = Annotated[
    Path, typer.Option("--checkpoint-dir", envvar="CHECKPOINT_DIR", help="The folder of <generation>/<checkpoint id>.")
]
FlavorOption = Annotated[
    str, typer.Option("--flavor", envvar="WORKER_FLAVOR", help="What sandboxes are made for: cpu, or gpu.")
]
CpusOption = Annotated[
    float,
    typer.Option(
        "--cpus",
        envvar="SANDBOX_CPUS",
        min=0.0,
        max=10_000.0,
        help="Processors that a sandbox may keep busy, under runsc alone; 0: all.",
    ),
]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.01, help="Seconds that importing may take.")]


def options_of(flavor: str, cpus: float) -> Options:
    """How the sandboxes of a command are: as those of a worker with the same settings."""
    return Options(flavor=parse_flavor(flavor), limits=Limits(cpus=cpus))


def check_same_flavor(flavor: Flavor, given: str) -> None:
    """Raises `BadRequest` for a checkpoint of another flavor than the sandboxes are made for."""
    if flavor is not parse_flavor(given):
        raise BadRequest(f"the checkpoint is of flavor {flavor.value}", f"Give --flavor {flavor.value}.")


@app.command()
def describe(
    *,
    rootfs: RootfsOption,
    runtime: RuntimeOption = "fork",
    flavor: FlavorOption = "cpu",
    cpus: CpusOption = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Say what checkpoints of this host and root filesystem are bound to.

    Example: readie-worker describe --rootfs rootfs --json
    """
    with opened(runtime, rootfs, options_of(flavor, cpus)) as running:
        description = running.describe()
    if as_json:
        print_json(description)
        return
    for field, value in msgspec.structs.asdict(description.host).items():
        print(f"{field:16} {plain(str(value))}")
    print(f"{'memory source':16} {description.memory_source}")
    print(f"{'preload':16} {len(description.preload)} modules of the standard library")


@app.command()
def probe(
    *,
    rootfs: RootfsOption,
    runtime: RuntimeOption = "fork",
    flavor: FlavorOption = "cpu",
    cpus: CpusOption = 0.0,
    timeout: TimeoutOption = 60.0,
    memory: Annotated[str, typer.Option(help="What a measured process may use, such as 4Gi.")] = "4Gi",
) -> None:
    """Measure imports: one JSON request a line on stdin, one JSON answer a line on stdout, each in a fresh process.

    Modes: time, memory, edges (one hook), plain (no hook).

    Example: echo '{"id": 1, "modules": ["numpy"], "mode": "time"}' | readie-worker probe --rootfs rootfs
    """
    limit = parse_size(memory)
    warned = False
    with opened(runtime, rootfs, options_of(flavor, cpus)) as running:
        running.describe()  # a root filesystem that cannot run the probe is one error, not one a request
        for line in sys.stdin.buffer:
            if not line.strip():
                continue
            try:
                request = msgspec.json.decode(line, type=ProbeRequest)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                text = line[:200].decode(errors="replace").strip()
                raise BadRequest(
                    f"{text!r}: {error}", 'Send {"id": 1, "modules": ["numpy"], "mode": "time"}.'
                ) from error
            answer = measure(running, request, timeout=timeout, memory=limit)
            if answer["network"] == "host" and not warned:
                warned = True
                say("imports are measured with the host's network and files: isolating them needs root or namespaces")
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()


@app.command()
def save(
    *,
    rootfs: RootfsOption,
    checkpoint_dir: CheckpointsOption,
    spec: Annotated[Path, typer.Option(help="What to import: a checkpoint.json.")],
    runtime: RuntimeOption = "fork",
    flavor: FlavorOption = "cpu",
    cpus: CpusOption = 0.0,
    timeout: TimeoutOption = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Capture a checkpoint: import what it is made of, and save the process, whole or not at all.

    Example: readie-worker save --rootfs rootfs --checkpoint-dir checkpoints --spec checkpoint.json --json
    """
    wanted = read_spec(spec)
    check_same_flavor(wanted.flavor, flavor)
    generation = checkpoint_dir / wanted.generation
    with opened(runtime, rootfs, options_of(flavor, cpus)) as running:
        generation.mkdir(parents=True, exist_ok=True)
        aside = generation / f".{wanted.checkpoint_id}.{uuid4().hex[:8]}.partial"
        try:
            with waiting(f"Capturing {wanted.checkpoint_id}", as_json=as_json):
                saved = running.save(wanted, aside, timeout=timeout)
            target = generation / wanted.checkpoint_id
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)
        except SaveFailed as error:
            fail(as_json, {"kind": error.kind, "detail": error.detail}, f"{wanted.checkpoint_id}: {error.detail}")
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    if as_json:
        answer = {"ok": True, "checkpoint_id": wanted.checkpoint_id, **msgspec.structs.asdict(saved)}
        print_json(answer)
    else:
        print(f"{plain(wanted.checkpoint_id)}: {saved.measured_mb:.1f} MB in {saved.seconds:.2f} s")


def fail(as_json: bool, failure: dict[str, Any], text: str) -> NoReturn:
    """Ends a command that ran and did not succeed."""
    if as_json:
        print_json({"ok": False, "failure": failure})
    say(f"readie-worker: {text}")
    raise typer.Exit(1)


@app.command()
def restore(
    *,
    rootfs: RootfsOption,
    checkpoint_dir: CheckpointsOption = Path(),
    generation: Annotated[str, typer.Option(help="The generation that the checkpoint belongs to.")] = "",
    checkpoint: Annotated[str, typer.Option(help="The checkpoint's id.")] = "",
    cold: Annotated[bool, typer.Option("--cold", help="Time cold starts instead.")] = False,
    times: Annotated[int, typer.Option(min=1, max=1000, help="How often.")] = 5,
    runtime: RuntimeOption = "fork",
    flavor: FlavorOption = "cpu",
    cpus: CpusOption = 0.0,
    timeout: TimeoutOption = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Time restores (or cold starts): each starts a sandbox and asks it for one call that imports nothing.

    Seconds are from the order to the sandbox's word that the call's first line runs.

    Example: readie-worker restore --rootfs rootfs --checkpoint-dir checkpoints --generation … --checkpoint checkpoint_1
    """
    if cold == bool(checkpoint):
        raise UsageError("say what to restore", "Give --generation and --checkpoint, or --cold.")
    spec = None
    place = checkpoint_dir / generation / checkpoint
    if not cold:
        spec = read_spec(place / "checkpoint.json")
        check_same_flavor(spec.flavor, flavor)
        if spec.key != (generation, checkpoint):
            raise BadFile(f"{place / 'checkpoint.json'} is {spec.checkpoint_id} of generation {spec.generation}")
    with opened(runtime, rootfs, options_of(flavor, cpus)) as running:
        python = running.describe().host.python_minor
        seconds = []
        try:
            with waiting("Timing cold starts" if cold else f"Timing restores of {checkpoint}", as_json=as_json):
                if spec:
                    running.load(spec, place, timeout=timeout)
                for _ in range(times):
                    running.prepare()  # as it is on a worker that is not busy
                    seconds.append(try_start(running, spec, python=python, timeout=timeout).ready_s)
        except StartFailed as error:
            fail(as_json, {"kind": "no-result", "detail": str(error)}, str(error))
    if as_json:
        print_json({"ok": True, "seconds": seconds})
    else:
        print(f"median {statistics.median(seconds):.4f} s of {len(seconds)}: {', '.join(f'{s:.4f}' for s in seconds)}")


@app.command()
def serve() -> None:
    """Run the agent: offer this machine to a router, and run the calls that it places here.

    Settings are environment variables: ROUTER_URL, WORKER_ID, WORKER_FLAVOR, WORKER_MEM_TOTAL, WORKER_GPU_TOTAL,
    WORKER_MAX_SANDBOXES, WORKER_DIR, WORKER_TOKEN, ROOTFS, CHECKPOINT_DIR, RUNTIME, MAX_PAYLOAD and others that
    docs/reference.md describes.

    Example: ROOTFS=rootfs CHECKPOINT_DIR=checkpoints readie-worker serve
    """
    from worker.agent import serve as run_agent

    run_agent(os.environ)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Look at all that `serve` needs, and say how to mend it; exit code 1 if something fails. It changes nothing of it.

    What killed commands have left behind it removes, as each command does. It reads the settings that `serve` reads, starts one sandbox and ends it, and asks the router.

    Example: ROOTFS=rootfs CHECKPOINT_DIR=checkpoints readie-worker doctor
    """
    from worker.doctor import examine

    report_checks(examine(os.environ), as_json=as_json)


def main() -> None:
    """Entry of the console script."""
    run_command_line("readie-worker", app)


if __name__ == "__main__":
    main()
