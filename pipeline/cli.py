"""`readie-pipeline`: from example code to a catalogue of checkpoints."""

import fcntl
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from pipeline import capture as capturing
from pipeline.analyze import Measurements, read_measurements
from pipeline.analyze import analyze as run_analysis
from pipeline.capture import PlanOptions, alpha_to_plan_with, carry_over, plan_checkpoints
from pipeline.corpus import Corpus, ImportSet, collect_corpus, merge_sets, read_corpus, write_corpus
from pipeline.plan import find_planner
from pipeline.problem import Limits
from pipeline.processes import Sandbox
from pipeline.progress import stage
from pipeline.recorded import fetch_recorded
from pipeline.report import (
    GenerationReport,
    find_memory_noise,
    find_noise,
    read_report,
    report_generation,
    write_plan_text,
    write_text,
)
from pipeline.rootfs_build import build_rootfs, check_rootfs
from pipeline.verify import verify as run_verification
from pipeline.verify import write_verification
from pipeline.what_if import HeldOut, WhatIf, explore_limits, hold_out, plot_what_if, write_held_out, write_what_if
from readie.command_line import (
    SINCE_FORMATS,
    JsonOption,
    add_version,
    plain,
    print_json,
    report_checks,
    run_command_line,
    say,
)
from readie.errors import BadFile, BadSetting, Unavailable, UsageError
from readie.flavor import Flavor, check_gpu, parse_flavor
from readie.units import MAX_ALPHA, MB, parse_size

app = typer.Typer(
    name="readie-pipeline",
    help="From example code to a catalogue: corpus, analyze, plan, capture; or all of it: generation.",
    epilog="Example: readie-pipeline generation --rootfs rootfs --out generation examples",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
add_version(app, "readie-pipeline")

OutOption = Annotated[
    Path, typer.Option("--out", envvar="PIPELINE_OUT", help="The work folder: everything is written into it.")
]
FlavorOption = Annotated[str, typer.Option("--flavor", envvar="FLAVOR", help="cpu, or gpu on a host with a GPU.")]
RootfsOption = Annotated[
    Path, typer.Option("--rootfs", envvar="ROOTFS", help="The root filesystem: a folder with its own bin/python.")
]
MeasuredRootfsOption = Annotated[
    Path | None,
    typer.Option("--rootfs", envvar="ROOTFS", help="The root filesystem of the sandboxes; default: the one measured."),
]
RuntimeOption = Annotated[
    str, typer.Option("--runtime", envvar="RUNTIME", help="fork: forked processes, no isolation. runsc: gVisor.")
]
CorpusOption = Annotated[
    Path | None, typer.Option("--corpus", help="The import sets; default: corpus.jsonl in the work folder.")
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", envvar="PIPELINE_TIMEOUT", min=0.1, help="Seconds that one import may take.")
]
MemoryOption = Annotated[
    str, typer.Option("--memory", envvar="PIPELINE_MEMORY", help="What one import may use, such as 4Gi.")
]
RepeatsOption = Annotated[
    int,
    typer.Option(
        "--repeats", envvar="PIPELINE_REPEATS", min=1, max=1000, help="How often each module is timed, at least."
    ),
]
MaxRepeatsOption = Annotated[
    int | None,
    typer.Option(
        "--max-repeats",
        envvar="PIPELINE_MAX_REPEATS",
        min=1,
        max=1000,
        help="How often at most, where the 95 % interval of a module is wider than ± 5 % and ± 0.5 ms, or all that "
        "a process loads is known to a standard error above 3 %; default: three times --repeats, and once where "
        "--repeats is 1.",
    ),
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        envvar="PIPELINE_MINUTES",
        min=0,
        help="Stop measuring after this time; what is needed most and known least comes first.",
    ),
]
PlannerOption = Annotated[
    str, typer.Option("--planner", envvar="PIPELINE_PLANNER", help="optimal, greedy, or fixed (--sets).")
]
SetsOption = Annotated[
    Path | None, typer.Option("--sets", help="The sets of the fixed planner, one a line, written like corpus.jsonl.")
]
AlphaOption = Annotated[
    float | None,
    typer.Option(
        "--alpha",
        envvar="PIPELINE_ALPHA",
        help="Seconds per MB; default: as last measured in the work folder, else a calibration.",
    ),
]
MaxCheckpointsOption = Annotated[
    int,
    typer.Option(
        "--max-checkpoints",
        envvar="PIPELINE_MAX_CHECKPOINTS",
        min=1,
        max=10_000,
        help="How many checkpoints at most, the empty one included.",
    ),
]
SizeBudgetOption = Annotated[
    float,
    typer.Option("--size-budget-mb", envvar="PIPELINE_SIZE_BUDGET_MB", min=0, help="MB of all checkpoints together."),
]
CheckpointMbOption = Annotated[
    float, typer.Option("--checkpoint-mb", envvar="PIPELINE_CHECKPOINT_MB", min=0, help="MB of one checkpoint.")
]

DEFAULT_OUT = Path("generation")
LIMITS = Limits()
SHOWN_CHANGES = 20
RESUMED = {"analyze", "capture", "generation", "verify"}  # the commands that have a journal


# ---- what the options mean ----


def check_flavor(text: str) -> Flavor:
    """The flavor, if this host can build for it. Raises `BadFlavor`, `NeedsGpu`."""
    flavor = parse_flavor(text)
    check_gpu(flavor)
    return flavor


def choose_sandbox(
    rootfs: Path,
    runtime: str,
    timeout: float = 60.0,
    memory: str = "4Gi",
    *,
    flavor: Flavor = Flavor.CPU,
    must_run: bool = True,
) -> Sandbox:
    """Raises `UsageError`, `RuntimeUnavailable`. Planning goes on without a root filesystem that runs."""
    try:
        kind = msgspec.convert(runtime, Literal["fork", "runsc"])
    except msgspec.ValidationError:
        raise BadSetting(f"{runtime!r} is not a runtime", "Use fork or runsc.") from None
    if must_run and not (rootfs / "bin" / "python").exists():
        missing = "it has no bin/python" if rootfs.is_dir() else "no such folder"
        raise BadFile(f"{rootfs}: {missing}", "Give a root filesystem with a Python of its own with --rootfs.")
    parse_size(memory)
    return Sandbox(rootfs, kind, check_number("--timeout", timeout), memory, flavor)


def check_number(name: str, number: float, least: float = 0.0, most: float = 1e9) -> float:
    """`number`, if it is within the bounds; NaN never is. Raises `BadSetting`."""
    if not (math.isfinite(number) and least <= number <= most):
        raise BadSetting(f"{name} {number:g} is out of range", f"Give a number from {least:g} to {most:g}.")
    return number


def choose_options(
    *,
    planner: str,
    sets: Path | None,
    alpha: float | None,
    max_checkpoints: int,
    budget_mb: float,
    checkpoint_mb: float,
) -> PlanOptions:
    """Raises `UsageError`."""
    find_planner(planner)
    if (planner == "fixed") != (sets is not None):
        raise UsageError("--sets and --planner fixed go together", "Give both, or none of them.")
    limits = Limits(
        max_checkpoints,
        check_number("--size-budget-mb", budget_mb),
        check_number("--checkpoint-mb", checkpoint_mb),
    )
    if alpha is not None and not 1e-9 <= alpha <= MAX_ALPHA:
        raise BadSetting(f"--alpha {alpha:g} is out of range", f"Give seconds per MB, from 1e-9 to {MAX_ALPHA}.")
    return PlanOptions(planner, limits, alpha, read_sets(sets) if sets else ())


class _Set(msgspec.Struct):
    modules: list[str]


def read_sets(path: Path) -> tuple[tuple[str, ...], ...]:
    """The sets of the fixed planner, in the order of the file. Raises `BadFile`."""
    try:
        lines = msgspec.json.Decoder(_Set).decode_lines(path.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: {error}", 'Write one set a line: {"modules": ["numpy", "pandas"]}.') from error
    return tuple(tuple(line.modules) for line in lines)


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """The folder, made and locked: two runs would mix their files. Raises `BadFile`, `Unavailable`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / ".lock").open("w")
    except OSError as error:
        raise BadFile(f"{out}: {error.strerror}", "Give another folder with --out.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unavailable(
                f"another readie-pipeline works in {out}", "Wait for it, or give another --out."
            ) from error
        yield out


def find_corpus(out: Path, corpus: Path | None) -> list[ImportSet]:
    return read_corpus(corpus or out / "corpus.jsonl")


def find_measurements(out: Path, flavor: Flavor) -> Measurements:
    """Raises `BadFile`."""
    path = out / "measurements.parquet"
    if not path.exists():
        raise BadFile(f"{path}: no such file", "Measure first with readie-pipeline analyze.")
    measurements = read_measurements(path)
    if measurements.info.flavor is not flavor:
        raise BadFile(f"{path} is of flavor {measurements.info.flavor}", f"Measure again with --flavor {flavor}.")
    return measurements


def print_lines(lines: Sequence[str]) -> None:
    print(plain("\n".join(lines)))


# ---- the commands ----


@app.command()
def rootfs(
    requirements: Annotated[
        list[Path] | None,
        typer.Argument(help="Requirement files, or lock files with hashes, as pip reads them; none: a bare Python."),
    ] = None,
    *,
    out: Annotated[Path | None, typer.Option("--out", help="The folder to make.")] = None,
    python: Annotated[
        str | None,
        typer.Option(
            "--python", help="The interpreter to copy: CPython 3.11 or later; default: the one that runs the pipeline."
        ),
    ] = None,
    resources: Annotated[
        Path | None, typer.Option("--resources", help="Declarations of datasets, models and tokenizers to put into it.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option("--check", help="Instead: say what in this folder is not as it was built.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a self-contained root filesystem: a Python with what is to be installed, and all libraries that these need.

    Example: readie-pipeline rootfs --out rootfs --python python3.11 requirements.lock
    """
    if (out is None) == (check is None):
        raise UsageError("--out makes a root filesystem, --check looks at one", "Give one of the two.")
    if out is not None:
        show_built(out, requirements or [], python, resources, as_json=as_json)
    elif requirements or python or resources:
        raise UsageError("--check takes nothing but a folder", "Leave the rest out.")
    elif check is not None:
        show_changes(check, as_json=as_json)


def show_built(
    out: Path, requirements: Sequence[Path], python: str | None, resources: Path | None, *, as_json: bool
) -> None:
    begun = time.monotonic()
    built = build_rootfs(out, requirements, python=python, resources=resources)
    seconds = time.monotonic() - begun
    for warning in built.warnings:
        say(f"warning: {warning}")
    record = built.record
    if as_json:
        about = {"path": str(out), "seconds": round(seconds, 1), "warnings": built.warnings}
        print_json(about | msgspec.to_builtins(record))
        return
    holds = f"Python {record.python}, {record.distributions} distributions, {record.bytes / MB:.0f} MB"
    print(f"{out}: {holds}, made in {seconds:.0f} s\ndigest {record.digest}")


def show_changes(path: Path, *, as_json: bool) -> None:
    """Ends the command with 1 where there are some."""
    record, changes = check_rootfs(path)
    if as_json:
        print_json({"path": str(path), "digest": record.digest, "changes": changes})
    elif changes:
        more = [f"and {len(changes) - SHOWN_CHANGES} more"] if len(changes) > SHOWN_CHANGES else []
        print_lines([f"{path} is not as it was built:", *changes[:SHOWN_CHANGES], *more])
    else:
        print(f"{path}: ok, as it was built\ndigest {record.digest}")
    if changes:
        raise typer.Exit(1)


@app.command()
def corpus(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Python files, notebooks, Markdown and reStructuredText pages, folders of them, and sets that were collected"
            " before (.jsonl, .jsonl.gz)."
        ),
    ] = None,
    *,
    out: OutOption = DEFAULT_OUT,
    router: Annotated[
        str | None,
        typer.Option(
            "--from-router", help="Take the calls that this router has recorded too; AUTH_TOKEN is its token."
        ),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(help="Of the recorded calls only those placed later; a time in UTC.", formats=SINCE_FORMATS),
    ] = None,
    flavor: Annotated[
        str | None, typer.Option("--flavor", help="Of the recorded calls only those of workers of this flavor.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Collect the import sets of example code, and of the calls that a router has recorded; nothing is run.

    Example: readie-pipeline corpus examples notebooks/first.ipynb --from-router http://127.0.0.1:8700
    """
    if not paths and router is None:
        raise UsageError("nothing to collect from", "Give paths, or --from-router.")
    if router is None and not (since is None and flavor is None):
        raise UsageError("--since and --flavor are about recorded calls", "Give --from-router too.")
    with work_folder(out):
        recorded = []
        if router is not None:
            moment = None if since is None else since.replace(tzinfo=UTC)
            recorded = fetch_recorded(router, moment, None if flavor is None else parse_flavor(flavor))
        found = collect(paths or [], out, recorded)
    calls = sum(one.count for one in recorded)
    if router is not None and not as_json:
        print(f"{calls} calls were recorded: {len(recorded)} import sets")
    if as_json:
        print_json(
            {
                "sets": len(found.sets),
                "recorded_calls": calls,
                "recorded_sets": len(recorded),
                "files": found.files,
                "without_imports": found.without_imports,
                "errors": [str(error) for error in found.errors],
                "over_limit": found.over_limit,
            }
        )
    else:
        print_lines(describe_corpus(found))


def collect(paths: Sequence[Path], out: Path, recorded: Sequence[ImportSet] = ()) -> Corpus:
    """The import sets of example code, of what was collected before, and of recorded calls; `corpus.jsonl` has them.

    Raises `BadFile`, also where nothing asks for anything.
    """
    collected = [path for path in paths if path.name.endswith((".jsonl", ".jsonl.gz"))]
    found = collect_corpus(path for path in paths if path not in collected)
    found = replace(found, sets=tuple(merge_sets(found.sets, recorded, *map(read_corpus, collected))))
    if not found.sets:
        nothing = f"none of {found.files} files imports anything but the standard library"
        raise BadFile(
            f"{', '.join(map(str, paths))}: {nothing}" if paths else "no recorded call asks for a module",
            "Give folders with example code.",
        )
    write_corpus(found, out / "corpus.jsonl")
    return found


def describe_corpus(found: Corpus) -> list[str]:
    requests = sum(one.count for one in found.sets)
    lines = [f"{found.files} files: {len(found.sets)} import sets, asked for {requests} times"]
    if found.errors:
        broken = len({error.path for error in found.errors})
        lines.append(f"{broken} files were not read, or only in part:")
    lines += [f"  {error}" for error in found.errors]
    lines += [f"  over 10 MB, not read: {path}" for path in found.over_limit]
    return lines


@app.command()
def analyze(
    *,
    rootfs: RootfsOption,
    out: OutOption = DEFAULT_OUT,
    flavor: FlavorOption = "cpu",
    runtime: RuntimeOption = "fork",
    corpus: CorpusOption = None,
    repeats: RepeatsOption = 3,
    max_repeats: MaxRepeatsOption = None,
    minutes: MinutesOption = None,
    timeout: TimeoutOption = 60.0,
    memory: MemoryOption = "4Gi",
    as_json: JsonOption = False,
) -> None:
    """Import everything in fresh processes, and measure what each module costs. Goes on where it was stopped.

    Example: readie-pipeline analyze --rootfs rootfs --out generation
    """
    kind = check_flavor(flavor)
    sandbox = choose_sandbox(rootfs, runtime, timeout, memory, flavor=kind)
    with work_folder(out):
        sets = find_corpus(out, corpus)
        measurements = run_analysis(
            sandbox, sets, out, flavor=kind, repeats=repeats, most_repeats=max_repeats, minutes=minutes
        )
    info = measurements.info
    noise, memory_noise = find_noise(measurements), find_memory_noise(measurements)
    if as_json:
        answer = {"modules": len(measurements.items), "noise": noise, "memory_noise": memory_noise}
        print_json(answer | msgspec.to_builtins(info))
        return
    print(f"{len(measurements.items)} modules measured, {len(info.failures)} could not be imported")
    print_lines([f"  {one}" for one in (*noise, *memory_noise)])
    print_lines([f"  {failure.module}: {failure.detail}" for failure in info.failures] or ["  every root was imported"])
    for warning in info.warnings:
        say(f"warning: {warning}")


@app.command()
def plan(
    *,
    out: OutOption = DEFAULT_OUT,
    flavor: FlavorOption = "cpu",
    rootfs: MeasuredRootfsOption = None,
    runtime: RuntimeOption = "fork",
    corpus: CorpusOption = None,
    planner: PlannerOption = "optimal",
    sets: SetsOption = None,
    alpha: AlphaOption = None,
    max_checkpoints: MaxCheckpointsOption = LIMITS.max_checkpoints,
    size_budget_mb: SizeBudgetOption = LIMITS.size_budget_mb,
    checkpoint_mb: CheckpointMbOption = LIMITS.checkpoint_mb,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Show what other limits would cost instead, and plot it: what-if.svg.")
    ] = False,
    holdout: Annotated[
        float | None,
        typer.Option(
            "--holdout",
            min=0.01,
            max=0.99,
            help="Plan without this share of the import sets instead, by every planner, and show what they then cost.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random choice for --holdout.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Choose the checkpoints that make all requests of the corpus cheapest together.

    Example: readie-pipeline plan --out generation --checkpoint-mb 150
    """
    if what_if and holdout is not None:
        raise UsageError("--what-if and --holdout are two questions", "Ask one at a time.")
    kind = check_flavor(flavor)
    options = choose_options(
        planner="fixed" if holdout is not None and sets else planner,
        sets=sets,
        alpha=alpha,
        max_checkpoints=max_checkpoints,
        budget_mb=size_budget_mb,
        checkpoint_mb=checkpoint_mb,
    )
    with work_folder(out):
        measurements = find_measurements(out, kind)
        sandbox = choose_sandbox(rootfs or Path(measurements.info.rootfs), runtime, flavor=kind, must_run=False)
        if what_if or holdout is not None:
            answer, lines = ask_planners(
                sandbox, measurements, find_corpus(out, corpus), out, options, holdout=holdout, seed=seed
            )
            if as_json:
                print_json(answer)
            else:
                print_lines(lines)
            return
        chosen, _ = plan_checkpoints(sandbox, measurements, find_corpus(out, corpus), out, options, again=True)
    if as_json:
        print_json(chosen)
        return
    print_lines(write_plan_text(chosen))
    for warning in chosen.warnings:
        say(f"warning: {warning}")


def ask_planners(
    sandbox: Sandbox,
    measurements: Measurements,
    corpus: Sequence[ImportSet],
    out: Path,
    options: PlanOptions,
    *,
    holdout: float | None,
    seed: int,
) -> tuple[WhatIf | HeldOut, list[str]]:
    """The answer to `--what-if` or `--holdout`, and its text. No plan is written."""
    carried = carry_over(measurements, sandbox.rootfs)
    alpha, warnings = alpha_to_plan_with(sandbox, measurements.info, out, options.alpha)
    for warning in (*carried.warnings, *warnings):
        say(f"warning: {warning}")
    if holdout is not None:
        held_out = hold_out(
            carried.items,
            corpus,
            share=holdout,
            seed=seed,
            alpha=alpha,
            limits=options.limits,
            sets=options.sets,
            barred=carried.barred,
        )
        return held_out, write_held_out(held_out)
    found = explore_limits(carried.items, corpus, alpha=alpha, limits=options.limits, barred=carried.barred)
    plot_what_if(found, out / "what-if.svg")
    return found, [*write_what_if(found), f"Plotted in {out / 'what-if.svg'}"]


@app.command()
def capture(
    *,
    out: OutOption = DEFAULT_OUT,
    flavor: FlavorOption = "cpu",
    rootfs: MeasuredRootfsOption = None,
    runtime: RuntimeOption = "fork",
    corpus: CorpusOption = None,
    planner: PlannerOption = "optimal",
    sets: SetsOption = None,
    alpha: AlphaOption = None,
    max_checkpoints: MaxCheckpointsOption = LIMITS.max_checkpoints,
    size_budget_mb: SizeBudgetOption = LIMITS.size_budget_mb,
    checkpoint_mb: CheckpointMbOption = LIMITS.checkpoint_mb,
    as_json: JsonOption = False,
) -> None:
    """Plan (unless a plan of the same input is there), capture, restore and time the checkpoints, write the catalogue.

    Example: readie-pipeline capture --out generation --rootfs rootfs
    """
    kind = check_flavor(flavor)
    options = choose_options(
        planner=planner,
        sets=sets,
        alpha=alpha,
        max_checkpoints=max_checkpoints,
        budget_mb=size_budget_mb,
        checkpoint_mb=checkpoint_mb,
    )
    with work_folder(out):
        measurements = find_measurements(out, kind)
        sandbox = choose_sandbox(rootfs or Path(measurements.info.rootfs), runtime, flavor=kind)
        finish(sandbox, measurements, find_corpus(out, corpus), out, options, as_json=as_json)


def finish(
    sandbox: Sandbox,
    measurements: Measurements,
    sets: Sequence[ImportSet],
    out: Path,
    options: PlanOptions,
    *,
    as_json: bool,
) -> None:
    """Plan, capture, report."""
    chosen, carried = plan_checkpoints(sandbox, measurements, sets, out, options, again=False)
    manifest = capturing.capture(sandbox, measurements, chosen, carried, out)
    show_report(out, report_generation(out, measurements, chosen, manifest), as_json=as_json)


def show_report(out: Path, report: GenerationReport, *, as_json: bool) -> None:
    """`report.html` beside the catalogue, and the text."""
    from pipeline.report_page import save_page  # plots take half a second to load

    save_page(out / "report.html", report, datetime.now(UTC))
    if as_json:
        print_json(report)
    else:
        print(plain(write_text(report)))
        say(f"the same as a page: {out / 'report.html'}")


@app.command()
def report(*, out: OutOption = DEFAULT_OUT, flavor: FlavorOption = "cpu", as_json: JsonOption = False) -> None:
    """Report on a generation that was captured: text, and report.html beside the catalogue.

    Example: readie-pipeline report --out generation
    """
    kind = parse_flavor(flavor)
    with work_folder(out):
        show_report(out, read_report(out, kind), as_json=as_json)


@app.command()
def generation(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Example code, or import sets (.jsonl, .jsonl.gz); default: corpus.jsonl in the work folder."
        ),
    ] = None,
    *,
    rootfs: RootfsOption,
    out: OutOption = DEFAULT_OUT,
    flavor: FlavorOption = "cpu",
    runtime: RuntimeOption = "fork",
    repeats: RepeatsOption = 3,
    max_repeats: MaxRepeatsOption = None,
    minutes: MinutesOption = None,
    timeout: TimeoutOption = 60.0,
    memory: MemoryOption = "4Gi",
    planner: PlannerOption = "optimal",
    sets: SetsOption = None,
    alpha: AlphaOption = None,
    max_checkpoints: MaxCheckpointsOption = LIMITS.max_checkpoints,
    size_budget_mb: SizeBudgetOption = LIMITS.size_budget_mb,
    checkpoint_mb: CheckpointMbOption = LIMITS.checkpoint_mb,
    as_json: JsonOption = False,
) -> None:
    """Do all of it: corpus, analyze, plan, capture, report. Stopped and started again, it goes on where it was.

    Example: readie-pipeline generation --rootfs rootfs --out generation examples
    """
    kind = check_flavor(flavor)
    sandbox = choose_sandbox(rootfs, runtime, timeout, memory, flavor=kind)
    options = choose_options(
        planner=planner,
        sets=sets,
        alpha=alpha,
        max_checkpoints=max_checkpoints,
        budget_mb=size_budget_mb,
        checkpoint_mb=checkpoint_mb,
    )
    with work_folder(out):
        if paths:
            with stage("Collecting import sets"):
                for line in describe_corpus(collect(paths, out)):
                    say(f"  {line}")
        found = find_corpus(out, None)
        measurements = run_analysis(
            sandbox, found, out, flavor=kind, repeats=repeats, most_repeats=max_repeats, minutes=minutes
        )
        finish(sandbox, measurements, found, out, options, as_json=as_json)


@app.command()
def verify(
    *,
    out: OutOption = DEFAULT_OUT,
    flavor: FlavorOption = "cpu",
    rootfs: MeasuredRootfsOption = None,
    runtime: RuntimeOption = "fork",
    corpus: CorpusOption = None,
    sample: Annotated[int, typer.Option(min=1, max=100_000, help="Modules, and import sets, to check.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the random choice.")] = 0,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=1000, help="Processes for each import, at least.")
    ] = 3,
    max_repeats: Annotated[
        int,
        typer.Option(
            "--max-repeats",
            min=1,
            max=1000,
            help="Processes at most, for an import whose time is known to a standard error above 3 % and 0.5 ms.",
        ),
    ] = 25,
    timeout: TimeoutOption = 60.0,
    memory: MemoryOption = "4Gi",
    as_json: JsonOption = False,
) -> None:
    """Import a random sample whole, in fresh processes, and compare with what was predicted. Goes on where it stopped.

    Example: readie-pipeline verify --out generation --sample 20 --seed 7
    """
    kind = check_flavor(flavor)
    with work_folder(out):
        measurements = find_measurements(out, kind)
        sandbox = choose_sandbox(rootfs or Path(measurements.info.rootfs), runtime, timeout, memory, flavor=kind)
        sets = find_corpus(out, corpus)
        result = run_verification(
            sandbox, measurements, sets, out, count=sample, seed=seed, repeats=repeats, most_repeats=max_repeats
        )
    if as_json:
        print_json(result)
        return
    print_lines(write_verification(result))
    for warning in result.warnings:
        say(f"warning: {warning}")


@app.command()
def doctor(
    *,
    rootfs: MeasuredRootfsOption = None,
    out: OutOption = DEFAULT_OUT,
    flavor: FlavorOption = "cpu",
    runtime: RuntimeOption = "fork",
    corpus: CorpusOption = None,
    timeout: TimeoutOption = 60.0,
    memory: MemoryOption = "4Gi",
    as_json: JsonOption = False,
) -> None:
    """Look at all that the pipeline needs, and say how to mend it; exit code 1 if something fails. It changes nothing.

    The root filesystem, readie-worker and its runtime, the corpus, what the work folder holds, and the machine.

    Example: readie-pipeline doctor --rootfs rootfs --out generation
    """
    from pipeline.doctor import Setup, examine

    sandbox = choose_sandbox(rootfs or Path(), runtime, timeout, memory, flavor=parse_flavor(flavor), must_run=False)
    asked = Setup(sandbox, rootfs is not None, out, corpus or out / "corpus.jsonl")
    report_checks(examine(asked), as_json=as_json)


def main() -> None:
    """Entry of the console script."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    stopped = "stopped; started again, it goes on from here" if command in RESUMED else "stopped"
    run_command_line("readie-pipeline", app, stopped=stopped)


if __name__ == "__main__":
    main()
