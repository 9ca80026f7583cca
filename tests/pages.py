"""The code blocks of the documentation, and a terminal that runs them in order as a reader would.

What a block is to be, a comment on the line before it says, which readers do not see:

- `<!-- file: NAME -->`: the block is what the file NAME is to hold.
- `<!-- run by: tests/test_x.py::test_y -->`: that test runs it, or the same command with other arguments.
- `<!-- run by: .ci/run -->`: the gate does.
- `<!-- exit: 1 -->`: the command is to end so.

Without one, `sh` is for the terminal, and `text` is what the block before it prints. There, any number stands for any
other, and so do ids of hexadecimal digits; `…` stands for any text, and for any lines where it is alone.
"""

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(
    r"(?P<marks>(?:^<!-- [^\n]* -->\n)*)^```(?P<language>\w*)[^\n`]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
#: Not the digits of a name such as checkpoint_1 or sha256.
NUMBER = re.compile(r"(?<![\w-])-?\d+(?:[.,:T-]\d+)*(?:e-?\d+)?Z?(?!\w)|\b(?=\w*\d)[0-9a-f]{12,64}\b")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: the section (##) and the line that it is in, its language ("": none), its marks."""

    page: Path
    section: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def is_left_out(self) -> bool:
        """Whether who follows the page passes it by."""
        return "run by" in self.marks

    @property
    def is_done(self) -> bool:
        """Whether who follows the page does what it says."""
        return not self.is_left_out and ("file" in self.marks or self.language == "sh")


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            section=re.findall(r"^## (.*)$|\A", text[: found.start()], re.MULTILINE)[-1],
            line=text[: found.start("language")].count("\n") + 1,
            language=found["language"],
            text=found["text"],
            marks=dict(re.findall(r"^<!-- ([\w ]+): (.*) -->$", found["marks"], re.MULTILINE)),
        )
        for found in FENCE.finditer(text)
    ]


def clone_project(folder: Path) -> None:
    """A clean clone, whose virtual environment is the one that runs the tests: `make setup` has nothing to do there."""
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], check=True)
    (folder / ".venv").mkdir()
    for name in ("bin", "include", "lib", "lib64", "pyvenv.cfg"):
        (folder / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    (folder / ".venv" / "ready").touch()  # newer than what it is made from


def without_make() -> dict[str, str]:
    """The environment as a terminal has it: what a `make` that started the tests wants of its own kind is not in it."""
    return {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "T"}}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def normalize(line: str) -> str:
    """A line with every number as 0, and every run of blanks or of a table's rules as one."""
    return re.sub(r"([━─])\1+", r"\1", re.sub(r"\s+", " ", NUMBER.sub("0", line))).strip()


def prints(expected: str, printed: str) -> bool:
    """Whether what was printed is what a page says, by the rules above."""
    pattern = ""
    for line in expected.splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in normalize(line).split("…")) + "\n"
    lines = [normalize(line) for line in printed.splitlines()]
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines if line or "\n\n" in expected)) is not None


class Terminal:
    """A bash that stands for a reader's terminal. It and all that it started end with `close`.

    `instead` are texts, such as a port that may be taken, and what is typed instead of them.
    """

    def __init__(self, folder: Path, environment: dict[str, str], instead: Mapping[str, str]) -> None:
        self.folder = folder
        self.instead = instead
        self.script = folder / ".script.sh"
        self.process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**without_make(), **environment},
            start_new_session=True,
        )

    def run(self, script: str, *, code: int = 0, seconds: float = 600) -> str:
        """What the lines print, on both outputs together. Raises `AssertionError` if they do not end with `code`."""
        assert self.process.poll() is None, "an earlier block has ended the terminal"
        assert self.process.stdin
        assert self.process.stdout
        mark = f"--- {time.monotonic_ns()}"
        self.script.write_text(script, encoding="utf-8")
        source = f"source {self.script} </dev/null"  # what reads its input must not read what comes next
        if code == 0:  # each line has to succeed
            source = f"trap 'echo \"{mark} $? $PWD\"' EXIT; set -e; {source}; set +e; trap - EXIT"
        self.process.stdin.write(f'{source}; echo "{mark} $? $PWD"\n'.encode())
        self.process.stdin.flush()
        printed = ""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while f"{mark} " not in printed or not printed.endswith("\n"):
                left = deadline - time.monotonic()
                assert left > 0, f"it takes longer than {seconds} s:\n{script}\n{printed}"
                if selector.select(left):
                    chunk = os.read(self.process.stdout.fileno(), 65536)
                    assert chunk, f"the terminal ended:\n{script}\n{printed}"
                    printed += chunk.decode(errors="replace")
        printed, _, end = printed.rpartition(f"{mark} ")
        ended, _, where = end.strip().partition(" ")
        assert int(ended) == code, f"it ended with {ended}:\n{script}\n{printed}"
        self.folder = Path(where)
        return printed

    def follow(self, blocks: Iterable[Block]) -> None:
        """Does what the blocks of a page say. Raises `AssertionError` where it turns out differently."""
        printed = ""
        for block in blocks:
            if block.is_done and (name := block.marks.get("file")):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).write_text(block.text, encoding="utf-8")
            elif block.is_done:
                script = block.text
                for text, typed in self.instead.items():
                    script = script.replace(text, typed)
                printed = self.run(script, code=int(block.marks.get("exit", "0")))
            elif block.language == "text" and not block.is_left_out:
                assert prints(block.text, printed), f"{block}: it says\n{block.text}\nand this was printed\n{printed}"

    def close(self) -> None:
        """Ends bash, and what it left in the background."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
