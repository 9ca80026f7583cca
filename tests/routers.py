"""Real router processes for the tests."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
SETTINGS = ["DATABASE_URL", "CATALOGUE_DIR", "ROUTER_HOST", "ROUTER_PORT", "ROUTER_URL", "AUTH_TOKEN", "WORKER_TOKEN"]
SETTINGS += ["LOG_FORMAT", "TLS_CERT", "TLS_KEY", "ROUTER_CA"]


@contextmanager
def serving(*arguments: str, **environ: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A router process on a free port: (process, URL, lines of its log so far)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "serve", "--port", "0", *arguments],
        env={name: value for name, value in os.environ.items() if name not in SETTINGS}
        | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        | environ,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    lines: list[str] = []
    ready = threading.Event()

    def follow() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "serving" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=follow)
    reader.start()
    try:
        assert ready.wait(60)
        port = re.search(r'port"?[=:] ?(\d+)', "".join(lines))
        assert port, "".join(lines)
        yield process, f"{'https' if 'TLS_CERT' in environ else 'http'}://127.0.0.1:{port[1]}", lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        if process.stderr is not None:
            process.stderr.close()


def ask(method: str, url: str, **options: Any) -> httpx.Response:
    return httpx.request(method, url, trust_env=False, timeout=60, **options)
