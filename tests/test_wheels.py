"""Wheels for the packages that calls bring: what is fetched on the host (the rest is in test_both_runtimes.py)."""

import ctypes
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from readie.errors import CallCancelled
from tests.test_rootfs_build import make_wheel
from worker.executor import CHILD_SUBREAPER, children_of
from worker.wheels import Sources, fetch_wheels


@pytest.fixture
def subreaper() -> Iterator[None]:
    """This process as an agent is: what its children leave behind comes to it."""
    library = ctypes.CDLL(None)
    library.prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    library.prctl(CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.usefixtures("subreaper")
def test_a_fetch_that_is_given_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pip, nor the other Python that it has started: they are ended, and reaped. Nor any temporary file."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = children_of("self")
    with socket.create_server(("127.0.0.1", 0)) as server:  # an index that never answers
        server.settimeout(0)

        def give_up() -> None:
            try:
                server.accept()[0].close()
            except BlockingIOError:
                return
            raise CallCancelled("nobody wants it any more")

        index = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        with pytest.raises(CallCancelled):
            fetch_wheels(Path(sys.executable), ["fresh"], tmp_path / "wheels", Sources(index=index), give_up)

    assert children_of("self") == before
    assert list(temporary.iterdir()) == []


def test_what_the_hosts_user_has_installed_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not in the root filesystem, though a PYTHONPATH would have its Python find it."""
    make_wheel(tmp_path, "fresh", {"fresh.py": b""})
    info = tmp_path / "path" / "fresh-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fresh\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(info.parent))
    sources = Sources(wheels=tmp_path)

    assert fetch_wheels(Path(sys.executable), ["fresh"], tmp_path / "wheels", sources, lambda: None) == ["fresh==1.0"]
