"""The router's settings, each from the environment variable of its name, read once at start."""

from typing import Annotated

import msgspec

from readie import wire
from readie.logs import LogFormat
from readie.requirements import PackagesPolicy
from readie.settings import Bytes, Duration


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `readie-router` reads with `readie.settings.read_settings(RouterSettings, os.environ)`."""

    database_url: str = "duckdb:///readie.duckdb"  # a file, or postgresql+psycopg://user:password@host/name
    catalogue_dir: str | None = None  # the folder of <flavor>.json and <flavor>.parquet/; unset: no files are imported
    # ROUTER_HOST and ROUTER_PORT, beside the clients' ROUTER_URL: some shells export HOST for themselves.
    host: str = msgspec.field(default="127.0.0.1", name="router_host")  # the address to listen on
    port: Annotated[int, msgspec.Meta(ge=0, le=65535, description="a port from 0 (any free one) to 65535")] = (
        msgspec.field(default=8700, name="router_port")
    )  # the port to listen on
    auth_token: str | None = None  # what clients send; unset: anyone may call
    worker_token: str | None = None  # what agents send; unset: any agent may join
    tls_cert: str | None = None  # a certificate (PEM): the router serves https; with TLS_KEY alone
    tls_key: str | None = None  # its key (PEM), without a password
    router_ca: str | None = None  # of commands that ask a router by https: a file of certificates (PEM) to trust alone
    worker_ttl: Duration = 30.0  # a worker not heard from for this long is evicted
    sweep_interval: Duration = 5.0  # between two looks for what has expired
    accept_timeout: Duration = 30.0  # a placement not accepted for this long is placed again
    call_timeout: Duration = 600.0  # of a function whose call gives none
    calls_kept_days: Annotated[int, msgspec.Meta(ge=1, le=36_500, description="days from 1 to 36500")] = (
        30  # a call is remembered this long after its end, for the views and for planning
    )
    session_wait_timeout: Duration = 60.0  # a call waits this long at most for its turn in its session
    memory_headroom: Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0, 1 at most")] = (
        0.9  # the part of a worker's memory that calls may reserve
    )
    default_memory: Bytes = Bytes(2**30)  # budget of a call that gives none
    max_payload: Bytes = Bytes(wire.MAX_PAYLOAD)  # of a call and of a result
    max_catalogue: Bytes = Bytes(2**30)  # of a document sent to the API; it waits in TMPDIR until it is imported
    packages_policy: PackagesPolicy = "version"  # names: skip by name alone, whatever the version
    rate_limit: (
        Annotated[float, msgspec.Meta(gt=0, le=1_000_000, description="a number above 0, 1000000 at most")] | None
    ) = None  # requests a second of each address on clients' routes, counted over ten seconds; unset: no limit
    log_format: LogFormat = "text"  # json: one object a line, on stderr
