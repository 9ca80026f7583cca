"""https by settings: a real router with a certificate that was made for the test, and those who ask it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import trustme

from pipeline.recorded import fetch_recorded
from readie import BadSetting, NoWorkers, RouterUnreachable, remote
from readie.errors import RouterNotTrusted
from readie.wire import WorkerStatus
from tests.routers import ROOT, SETTINGS, serving
from worker.router import Router
from worker.settings import read_worker_settings

STATUS = WorkerStatus(flavor="cpu", state="ready", python="3.11.7", runtime="fork")  # type: ignore[arg-type]


@remote
def nothing() -> None:
    pass


class Secure(NamedTuple):
    """A router that serves https, and the file of the certificate that signed its own."""

    url: str
    router_ca: str


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files: what signs, another that signs, the router's certificate and key, the key of another certificate."""
    folder = tmp_path_factory.mktemp("certificates")
    ours, other = trustme.CA(), trustme.CA()
    own, strange = ours.issue_cert("127.0.0.1"), other.issue_cert("127.0.0.1")
    files = {
        "ca": ours.cert_pem,
        "other_ca": other.cert_pem,
        "cert": own.cert_chain_pems[0],
        "key": own.private_key_pem,
        "other_key": strange.private_key_pem,
    }
    for name, pem in files.items():
        pem.write_to_path(str(folder / f"{name}.pem"))
    return {name: str(folder / f"{name}.pem") for name in files}


@pytest.fixture(scope="module")
def secure(certificates: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """A router that serves https."""
    database_url = f"duckdb:///{tmp_path_factory.mktemp('tls') / 'readie.duckdb'}"
    environ = {"TLS_CERT": certificates["cert"], "TLS_KEY": certificates["key"], "DATABASE_URL": database_url}
    with serving(**environ) as (_, url, _):
        yield Secure(url, certificates["ca"])


def cli(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Runs `readie-router` to its end."""
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    command = [sys.executable, "-m", "app.cli", *arguments]
    return subprocess.run(
        command, env=clean | {"PYTHONPATH": str(ROOT)} | environ, capture_output=True, text=True, check=False
    )


def report(secure: Secure, **environ: str) -> None:
    """An agent reports to the router."""
    router = Router(read_worker_settings({"ROOTFS": "/", "WORKER_ID": "w", "ROUTER_URL": secure.url, **environ}))
    with closing(router.http):
        router.report(STATUS)


def test_who_trusts_the_certificate_is_served(secure: Secure, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's call, an agent, a command line and the pipeline: each by ROUTER_CA."""
    monkeypatch.setenv("ROUTER_URL", secure.url)
    monkeypatch.setenv("ROUTER_CA", secure.router_ca)
    with pytest.raises(NoWorkers):  # it came so far
        nothing()
    report(secure, ROUTER_CA=secure.router_ca)
    listed = cli("workers", "--json", "--router", secure.url, ROUTER_CA=secure.router_ca)

    assert [view["worker_id"] for view in json.loads(listed.stdout)] == ["w"]
    assert fetch_recorded(secure.url) == []


@pytest.mark.parametrize("trusted", [None, "other_ca"])
def test_a_certificate_that_is_not_trusted(
    secure: Secure, certificates: dict[str, str], trusted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a problem of its own, which names the way out; nothing is sent."""
    environ = {} if trusted is None else {"ROUTER_CA": certificates[trusted]}
    monkeypatch.setenv("ROUTER_URL", secure.url)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RouterNotTrusted, match="Set ROUTER_CA to a file with the certificate"):
        nothing()
    with pytest.raises(RouterNotTrusted):
        report(secure, **environ)
    with pytest.raises(RouterNotTrusted):
        fetch_recorded(secure.url)
    run = cli("workers", "--router", secure.url, **environ)

    assert (run.returncode, run.stdout) == (1, "")
    assert "Set ROUTER_CA to a file with the certificate" in run.stderr


def test_a_name_that_the_certificate_does_not_have(secure: Secure, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trusted issuer is not enough."""
    monkeypatch.setenv("ROUTER_URL", secure.url.replace("127.0.0.1", "localhost"))
    monkeypatch.setenv("ROUTER_CA", secure.router_ca)

    with pytest.raises(RouterNotTrusted, match=r"(?i)hostname mismatch"):
        nothing()


def test_a_router_with_a_certificate_serves_no_plain_http(secure: Secure) -> None:
    """What is sent in clear is not answered."""
    with pytest.raises(httpx.TransportError):
        httpx.get(secure.url.replace("https", "http") + "/health", trust_env=False)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file or directory"), ("nonsense", "there is no certificate in it")]
)
def test_a_file_of_certificates_that_is_none(
    content: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting is named, and what is wrong with it."""
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("ROUTER_URL", "https://127.0.0.1:1")
    monkeypatch.setenv("ROUTER_CA", str(file))

    with pytest.raises(BadSetting, match=message):
        nothing()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TLS_KEY": ""}, "TLS_KEY is not set, and the other of the two is. Set TLS_CERT and TLS_KEY, or none."),
        ({"TLS_CERT": ""}, "TLS_CERT is not set, and the other of the two is."),
        ({"TLS_CERT": "nowhere.pem"}, "TLS_CERT='nowhere.pem': No such file or directory."),
        ({"TLS_KEY": "."}, "TLS_KEY='.': Is a directory."),
        ({"TLS_KEY": "other_key"}, "key values mismatch"),
        ({"TLS_CERT": "key"}, "Name a certificate"),
    ],
)
def test_certificates_that_are_not_served(
    certificates: dict[str, str], changes: dict[str, str], message: str, tmp_path: Path
) -> None:
    """A router does not start then, and says which setting is wrong; it creates no database."""
    named = {"TLS_CERT": "cert", "TLS_KEY": "key"} | changes
    environ = {name: certificates.get(value, value) for name, value in named.items()}
    run = cli("serve", "--port", "0", DATABASE_URL=f"duckdb:///{tmp_path / 'new.duckdb'}", **environ)

    assert run.returncode == 2
    assert message.lower() in run.stderr.lower()
    assert not list(tmp_path.iterdir())


def test_who_cannot_reach_a_router_by_https_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there: that is no matter of trust."""
    monkeypatch.setenv("ROUTER_URL", "https://127.0.0.1:1")

    with pytest.raises(RouterUnreachable) as raised:
        nothing()
    assert not isinstance(raised.value, RouterNotTrusted)
