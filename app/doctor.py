"""`readie-router doctor`: looks at everything that a router needs, and changes nothing."""

import os
import shutil
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import httpx
import msgspec

from app.address import listen
from app.api.catalogues import read_summaries
from app.api.workers import MOST_WORKERS, read_workers
from app.application import is_loopback, missing_tokens
from app.check import check_rows
from app.database import POOL_SIZE, Database, ServerFacts, check_schema, open_database, shown
from app.settings import RouterSettings
from app.tls import server_certificate
from readie.client import ClientSettings
from readie.command_line import Check, Doubt, check, seconds_ahead
from readie.errors import (
    BadSetting,
    DatabaseInUse,
    DatabaseUnavailable,
    PortTaken,
    ReadieError,
    RouterUnreachable,
    Unavailable,
)
from readie.http import connection, read_answer, unreachable
from readie.projection import load_catalogue
from readie.settings import misspelt, read_settings
from readie.version import this_version
from readie.wire import REPORT_SECONDS, CatalogueSummary, WorkerView

OLDEST_POSTGRESQL = 15  # that the tests run on
CONNECTIONS = POOL_SIZE + 1  # of a router: its pool, and one that listens
SKEW_S = 1.0  # between two clocks: less is a matter of asking
ROOM_BYTES = 10**9  # free where the DuckDB file is
NOTICE_S = 5.0  # that a notice may take
ASK_S = 10.0  # that a router may take to answer
EXPIRES_SOON = timedelta(days=30)

Answered = TypeVar("Answered")


class _Router(msgspec.Struct):
    """Who answers on the router's address, if anybody does."""

    version: str = ""


def examine(environ: Mapping[str, str]) -> Iterator[Check]:
    """Every check, as soon as it is made; what the next one needs, and is not there, is left out."""
    read: list[RouterSettings] = []
    yield check("settings", lambda: _look_at_settings(environ, read))
    if not read:
        return
    settings = read[0]
    yield check("patience", lambda: _look_at_patience(settings))
    yield check("tokens", lambda: _look_at_tokens(settings))
    yield check("TLS", lambda: _look_at_certificate(settings))
    yield check("catalogue files", lambda: _look_at_files(settings))
    found = _Router()
    yield check("address", lambda: _look_at_address(settings, found))
    opened: list[Database] = []
    yield check("database", lambda: _look_at_database(settings, bool(found.version), opened))
    if opened:
        with closing(opened[0]) as database:
            yield from _look_into(database, settings)
    elif found.version:  # it has the file open
        with suppress(ReadieError):
            summaries = _ask(settings, "/v1/catalogues", list[CatalogueSummary])
            views = _ask(settings, f"/v1/workers?limit={MOST_WORKERS}", list[WorkerView])
            yield check("catalogues", lambda: _look_at_catalogues(summaries))
            yield check("workers", lambda: _look_at_workers(views, summaries, settings, datetime.now(UTC)))


def _look_at_settings(environ: Mapping[str, str], read: list[RouterSettings]) -> str:
    read.append(read_settings(RouterSettings, environ))
    wrong = misspelt(environ, RouterSettings, ClientSettings)
    if wrong:
        names = ", ".join(f"{name} (is {meant} meant?)" for name, meant in wrong.items())
        raise Doubt(f"nothing reads {names}", "docs/reference.md lists the settings.")
    fields = msgspec.structs.fields(RouterSettings)
    given = sum(bool(environ.get(field.encode_name.upper(), "").strip()) for field in fields)
    return f"{given} of {len(fields)} are set, the others have their defaults"


def _look_at_patience(settings: RouterSettings) -> str:
    least = 2 * REPORT_SECONDS
    if settings.worker_ttl < least:
        raise Doubt(
            f"WORKER_TTL={settings.worker_ttl:g}: agents report every {REPORT_SECONDS:g} seconds, and one late report "
            "would lose a worker with its calls",
            f"Set it to {least:g} or more.",
        )
    return f"a worker is lost when it was not heard from for {settings.worker_ttl:g} seconds"


def _look_at_tokens(settings: RouterSettings) -> str:
    missing = missing_tokens(settings)
    if missing:
        raise Doubt(
            f"{missing} not set: every process on this machine may send calls or run them",
            f"Set {missing}, unless nobody else uses this machine.",
        )
    return "AUTH_TOKEN and WORKER_TOKEN are set"


# ---- TLS ----


def _look_at_certificate(settings: RouterSettings) -> str:
    context = server_certificate(settings)
    if context is None:
        if is_loopback(settings.host):
            return "http, on this machine alone"
        way_out = "Set TLS_CERT and TLS_KEY, unless something before the router does that."
        raise Doubt(f"http on {settings.host}: tokens and payloads can be read on the way", way_out)
    names, ends = _read_certificate(context, Path(settings.tls_cert or ""))
    renew = "Renew it, and start the router again."
    told = f"https; the certificate is for {', '.join(names) or 'no name'}, until {ends:%Y-%m-%d}"
    if ends < datetime.now(UTC) + EXPIRES_SOON:
        raise Doubt(told, renew)
    everywhere = settings.host in {"0.0.0.0", "::"}  # noqa: S104 - not listened on here
    if not names or not (everywhere or settings.host in names):
        raise Doubt(told, f"Clients must ask by one of its names, and ROUTER_HOST is {settings.host}.")
    return told


def _trusting(file: Path) -> ssl.SSLContext:
    """A client's, which trusts the certificate in this file and no other, by whatever name."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(file)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return client


def _read_certificate(server: ssl.SSLContext, file: Path) -> tuple[list[str], datetime]:
    """The names of the certificate that `server` shows, and when it expires.

    Only a client that trusts a certificate is told what is in it: so one connects, in memory, that trusts just that.
    """
    client = _trusting(file)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):  # messages go to and fro
        for side in (asking, answering):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                raise BadSetting(f"TLS_CERT={str(file)!r}: {error.verify_message}", "Renew the certificate.") from error
    found = asking.getpeercert()
    assert found
    names = [str(entry[1]) for entry in found.get("subjectAltName", ())]
    return names, datetime.fromtimestamp(ssl.cert_time_to_seconds(str(found["notAfter"])), UTC)


# ---- files and address ----


def _look_at_files(settings: RouterSettings) -> str:
    if settings.catalogue_dir is None:
        return "CATALOGUE_DIR is not set: none are imported at start"
    folder = Path(settings.catalogue_dir)
    files = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    if not files:
        raise Doubt(f"{folder} has no *.json", "Put catalogues there, such as cpu.json with cpu.parquet.")
    read = {path: load_catalogue(path) for path in files}
    by_flavor: dict[str, list[str]] = {}
    for path, catalogue in read.items():
        by_flavor.setdefault(catalogue.flavor.value, []).append(path.name)
    doubts = [f"{', '.join(names)} are all of flavor {flavor}" for flavor, names in by_flavor.items() if len(names) > 1]
    doubts += [warning for catalogue in read.values() for warning in catalogue.warnings]
    if doubts:
        raise Doubt("; ".join(doubts), "<flavor>.json is used, else the first by name.")
    return f"{folder}: " + ", ".join(f"{path.name} ({len(read[path].keys)} items)" for path in files)


def _look_at_address(settings: RouterSettings, found: _Router) -> str:
    where = f"{settings.host}:{settings.port}"
    try:
        listen(settings).close()
    except PortTaken:
        try:
            # Without the token: who answers is not known yet, and this is open to all.
            found.version = _ask(settings, "/schema", _Schema, token="").info.version
        except RouterUnreachable as error:
            raise PortTaken(f"another process listens on {where}, and no router answers: {error.detail}") from error
        if found.version != this_version():
            way_out = "Start the router again, if it is to be of this version."
            raise Doubt(
                f"a router of version {found.version} serves {where}; this is {this_version()}", way_out
            ) from None
        return f"a router of this version ({found.version}) serves {where}"
    return f"{where} is free"


class _Info(msgspec.Struct):
    version: str


class _Schema(msgspec.Struct):
    info: _Info


def _ask(settings: RouterSettings, path: str, kind: type[Answered], token: str | None = None) -> Answered:
    """The answer of the router that serves here. Raises `RouterUnreachable`, or what it answers."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    url = f"{'https' if settings.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{settings.port}"
    token = (settings.auth_token or "") if token is None else token
    options = connection(url, token, settings.router_ca, named="ROUTER_HOST and ROUTER_PORT: ")
    if settings.tls_cert:  # under the name of this machine's address, which no certificate need have
        options["verify"] = _trusting(Path(settings.tls_cert))
    try:
        with httpx.Client(**options, timeout=ASK_S) as http:
            return read_answer(http.get(path), kind)
    except httpx.HTTPError as error:
        raise unreachable(url, error) from error


# ---- the database ----


def _look_at_database(settings: RouterSettings, served: bool, opened: list[Database]) -> str:
    file = Path(settings.database_url.removeprefix("duckdb:///").partition("?")[0])
    embedded = settings.database_url.startswith("duckdb:///")
    if embedded and not file.exists():
        if not os.access(file.absolute().parent, os.W_OK | os.X_OK):
            raise DatabaseUnavailable(f"{file.absolute().parent}: no folder that can be written")
        raise Doubt(f"{file}: no such file", "readie-router serve makes it.")
    try:
        opened.append(open_database(settings.database_url))
    except DatabaseInUse:
        if not served:
            raise
        return f"{file} is open in the router that serves here"
    url = shown(opened[0].engine.url)
    if embedded:
        free = shutil.disk_usage(file.absolute().parent).free
        if not os.access(file, os.W_OK):
            raise DatabaseUnavailable(f"{file} cannot be written", "Give this user the right to.")
        if free < ROOM_BYTES:
            raise Doubt(
                f"{url}: {free / 10**6:.0f} MB are free beside it", "Make room: a router stops where it is full."
            )
        return f"{url} opens; {free / 10**9:.1f} GB are free beside it"
    return f"{url} answers"


def _look_into(database: Database, settings: RouterSettings) -> Iterator[Check]:
    """What is to be seen of a database that is open."""
    schema = check("schema", lambda: _look_at_schema(database))
    yield schema
    ahead_s = 0.0
    with suppress(ReadieError):
        began = time.time()
        facts = database.server_facts()
        if facts is not None:
            ahead_s = seconds_ahead(facts.clock_s, began, time.time())
            yield from _look_at_postgresql(database, facts, ahead_s)
    now = datetime.now(UTC) + timedelta(seconds=ahead_s)
    if schema.state == "failed":
        return
    read: list[tuple[list[CatalogueSummary], list[WorkerView]]] = []
    rows = check("rows", lambda: _look_at_rows(database, settings, read))
    for summaries, views in read:
        yield check("catalogues", partial(_look_at_catalogues, summaries))
        yield check("workers", partial(_look_at_workers, views, summaries, settings, now))
    yield rows


def _look_at_rows(
    database: Database, settings: RouterSettings, read: list[tuple[list[CatalogueSummary], list[WorkerView]]]
) -> str:
    """Whether rows break rules; what else is looked at is put into `read`, of the same moment."""
    with database.reading() as reading:
        read.append((read_summaries(reading), read_workers(reading)))
        wrong = [each for each in check_rows(reading, settings) if each.wrong]
    if wrong:
        way_out = "readie-router check lists them (docs/checking.md)."
        raise Unavailable(f"{len(wrong)} are wrong, first {wrong[0].rule}: {wrong[0].about}", way_out)
    return "none breaks a rule"


def _look_at_postgresql(database: Database, facts: ServerFacts, ahead_s: float) -> Iterator[Check]:
    yield check("server", lambda: _look_at_server(facts))
    yield check("clock", lambda: _look_at_clock(ahead_s))
    yield check("rights", lambda: _look_at_rights(facts))
    yield check("queries", lambda: _look_at_reader(database))
    yield check("connections", lambda: _look_at_connections(facts))
    yield check("notices", lambda: _look_at_notices(database))


def _look_at_schema(database: Database) -> str:
    check_schema(database)
    return "it is this version's"


def _look_at_server(facts: ServerFacts) -> str:
    if facts.version < OLDEST_POSTGRESQL:
        raise Doubt(
            f"PostgreSQL {facts.version_text}", f"Use {OLDEST_POSTGRESQL} or later: older ones have not been tried."
        )
    return f"PostgreSQL {facts.version_text}"


def _look_at_clock(ahead_s: float) -> str:
    if abs(ahead_s) > SKEW_S:
        raise Doubt(
            f"the database's clock is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's",
            "Readie goes by the database's; have both set by NTP, so that logs and tables agree.",
        )
    return "the database's is this machine's, within a second"


def _look_at_rights(facts: ServerFacts) -> str:
    if facts.missing:
        raise DatabaseUnavailable(
            f"this role lacks {', '.join(facts.missing)}", "GRANT them, or connect as the tables' owner."
        )
    if not facts.may_create:
        raise Doubt("this role may not create tables", "Run readie-router upgrade as one that may.")
    return "this role may read, write and create tables"


def _look_at_reader(database: Database) -> str:
    role = database.reader_role()
    if role is None:
        raise Doubt(
            "people's queries run as the router's own role: there is no role for them that it may become",
            "They are held by what is let through and by a read-only transaction all the same. docs/dashboard.md says how "
            "to make the role.",
        )
    return f"people's queries run as {role}, which can read the views alone"


def _look_at_connections(facts: ServerFacts) -> str:
    free = facts.most_connections - facts.connections
    told = f"{facts.connections} of {facts.most_connections} are in use, a router takes up to {CONNECTIONS}"
    if free < CONNECTIONS:
        raise Doubt(told, "Raise max_connections, or run fewer routers.")
    return told


def _look_at_notices(database: Database) -> str:
    """LISTEN and NOTIFY, by which routers wake one another; some poolers of connections let neither through."""
    notices = database.notices()
    mine = f"doctor-{uuid4().hex}"  # routers ring what comes after the first line: nothing here
    try:
        next(notices)
        began = time.monotonic()
        database.notify([mine])
        for notice in notices:
            if notice == mine:
                return f"a notice arrives after {1000 * (time.monotonic() - began):.0f} ms"
            if time.monotonic() > began + NOTICE_S:
                break
    finally:
        notices.close()  # type: ignore[attr-defined]
    raise DatabaseUnavailable(
        f"what was told by NOTIFY did not arrive in {NOTICE_S:g} s", "Connect to PostgreSQL itself, without a pooler."
    )


# ---- what is in it ----


def _look_at_catalogues(summaries: list[CatalogueSummary]) -> str:
    active = [each for each in summaries if each.active]
    if not active:
        raise Doubt(
            "no flavor has an active one: every call starts cold", "Set CATALOGUE_DIR, or run readie-router import."
        )
    now = datetime.now(UTC)
    return "; ".join(
        f"{each.flavor}: {each.sha256[:12]}, {each.checkpoints} checkpoints, imported {_age(now - each.imported_at)} ago"
        for each in active
    )


def _age(time: timedelta) -> str:
    hours = max(0.0, time.total_seconds() / 3600)
    return f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.0f} hours" if hours >= 2 else f"{60 * hours:.0f} min"


def _look_at_workers(
    views: list[WorkerView], summaries: list[CatalogueSummary], settings: RouterSettings, now: datetime
) -> str:
    active = {each.flavor: each.generation for each in summaries if each.active}
    here = [each for each in views if each.state != "removed"]
    if not here:
        raise Doubt(
            "none has reported", "Start one with readie-worker serve; readie-worker doctor looks at its set-up."
        )
    silent = [each.worker_id for each in here if now - each.heard_at > timedelta(seconds=settings.worker_ttl)]
    without = [
        each.worker_id
        for each in here
        if each.flavor in active and active[each.flavor] not in {held.generation for held in each.generations}
    ]
    if silent:
        raise Doubt(f"not heard from for WORKER_TTL: {', '.join(silent)}", "Look at their logs, and at the network.")
    if without:
        way_out = "Give it that generation in CHECKPOINT_DIR; readie-worker doctor says what is in the way."
        raise Doubt(f"without the active generation of their flavor: {', '.join(without)}", way_out)
    return f"{len(here)} report, and hold the active generation" if active else f"{len(here)} report"
