"""`readie-worker`: the agent, and what the pipeline needs of a worker: describe, probe, save, restore."""

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn
from uuid import uuid4

import msgspec
import typer

from readie.command_line import run_command_line
from readie.errors import BadFile, BadRequest, UsageError
from readie.flavor import check_gpu
from readie.manifest import read_spec
from readie.units import parse_size
from worker.host import open_runtime
from worker.measure import ProbeRequest, measure
from worker.runtime import Runtime, SaveFailed, StartFailed, try_start

app = typer.Typer(
    name="readie-worker",
    help="Runs calls in sandboxes (serve), and measures and captures for the pipeline in the very same way.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RootfsOption = Annotated[
    Path, typer.Option("--rootfs", envvar="ROOTFS", help="The root filesystem: a folder with its own bin/python.")
]
RuntimeOption = Annotated[
    str, typer.Option("--runtime", envvar="RUNTIME", help="fork: forked processes, no isolation. runsc: gVisor.")
]
CheckpointsOption = Annotated[
    Path, typer.Option("--checkpoint-dir", envvar="CHECKPOINT_DIR", help="The folder of <generation>/<checkpoint id>.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.01, help="Seconds that importing may take.")]


@contextmanager
def opened(name: str, rootfs: Path) -> Iterator[tuple[Runtime, Path]]:
    """A runtime with a folder of its own, for one command."""
    with tempfile.TemporaryDirectory(prefix="readie-worker-") as folder:
        runtime = open_runtime(name, rootfs, Path(folder))
        try:
            yield runtime, Path(folder)
        finally:
            runtime.close()


@app.command()
def describe(rootfs: RootfsOption, runtime: RuntimeOption = "fork", as_json: JsonOption = False) -> None:
    """Say what checkpoints of this host and root filesystem are bound to.

    Example: readie-worker describe --rootfs rootfs --json
    """
    with opened(runtime, rootfs) as (running, _):
        description = running.describe()
    if as_json:
        print(msgspec.json.encode(description).decode())
        return
    for field, value in msgspec.structs.asdict(description.host).items():
        print(f"{field:16} {value}")
    print(f"{'memory source':16} {description.memory_source}")
    print(f"{'preload':16} {len(description.preload)} modules of the standard library")


@app.command()
def probe(
    rootfs: RootfsOption,
    runtime: RuntimeOption = "fork",
    timeout: TimeoutOption = 60.0,
    memory: Annotated[str, typer.Option(help="What a measured process may use, such as 4Gi.")] = "4Gi",
) -> None:
    """Measure imports: one JSON request a line on stdin, one JSON answer a line on stdout, each in a fresh process.

    Modes: time, memory, edges (one hook), plain (no hook).

    Example: echo '{"id": 1, "modules": ["numpy"], "mode": "time"}' | readie-worker probe --rootfs rootfs
    """
    limit = parse_size(memory)
    warned = False
    with opened(runtime, rootfs) as (running, folder):
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
            answer = measure(running, request, folder, timeout=timeout, memory=limit)
            if answer["network"] == "host" and not warned:
                warned = True
                text = "imports are measured with the host's network and files: isolating them needs root or namespaces"
                print(text, file=sys.stderr)
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()


@app.command()
def save(
    *,
    rootfs: RootfsOption,
    checkpoint_dir: CheckpointsOption,
    spec: Annotated[Path, typer.Option(help="What to import: a checkpoint.json.")],
    runtime: RuntimeOption = "fork",
    timeout: TimeoutOption = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Capture a checkpoint: import what it is made of, and save the process, whole or not at all.

    Example: readie-worker save --rootfs rootfs --checkpoint-dir checkpoints --spec checkpoint.json --json
    """
    wanted = read_spec(spec)
    check_gpu(wanted.flavor)
    generation = checkpoint_dir / wanted.generation
    with opened(runtime, rootfs) as (running, _):
        generation.mkdir(parents=True, exist_ok=True)
        aside = generation / f".{wanted.checkpoint_id}.{uuid4().hex[:8]}.partial"
        try:
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
        print(msgspec.json.encode(answer).decode())
    else:
        print(f"{wanted.checkpoint_id}: {saved.measured_mb:.1f} MB in {saved.seconds:.2f} s")


def fail(as_json: bool, failure: dict[str, Any], text: str) -> NoReturn:
    """Ends a command that ran and did not succeed."""
    if as_json:
        print(msgspec.json.encode({"ok": False, "failure": failure}).decode())
    print(f"readie-worker: {text}", file=sys.stderr)
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
        check_gpu(spec.flavor)
        if spec.key != (generation, checkpoint):
            raise BadFile(f"{place / 'checkpoint.json'} is {spec.checkpoint_id} of generation {spec.generation}")
    with opened(runtime, rootfs) as (running, folder):
        python = ".".join(running.describe().host.python.split(".")[:2])
        try:
            if spec:
                running.load(spec, place, timeout=timeout)
            seconds = [try_start(running, spec, folder, python=python, timeout=timeout).ready_s for _ in range(times)]
        except StartFailed as error:
            fail(as_json, {"kind": "no-result", "detail": str(error)}, str(error))
    if as_json:
        print(msgspec.json.encode({"ok": True, "seconds": seconds}).decode())
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


def main() -> None:
    """Entry of the console script."""
    run_command_line("readie-worker", app)


if __name__ == "__main__":
    main()
