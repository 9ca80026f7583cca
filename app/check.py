"""Whether the database holds together: rules of `app/sql/check.sql`, all of one state, beside running routers."""

import msgspec
from sqlalchemy import Connection

from app.liveness import READ_SECONDS, UNREAD_SECONDS
from app.placement import PPM
from app.settings import RouterSettings
from app.sql import declared_parameters, statement

#: What must never be: a fault of the router's, or somebody else has written to the database.
RULES = (
    "workers_overcommitted",
    "calls_without_lease",
    "leases_without_call",
    "leases_unlike_calls",
    "leases_of_unknown_workers",
    "leases_of_another_flavor",
    "leases_unlike_sessions",
    "calls_without_payload",
    "calls_with_an_early_end",
    "calls_without_end",
    "calls_without_result",
    "calls_miscounted",
    "calls_of_another_flavor",
    "sessions_without_call",
    "sessions_with_two_sandboxes",
    "cancellations_with_lease",
    "rows_without_call",
    "rows_without_worker",
    "times_to_come",
    "catalogues_not_whole",
)

#: What may be for a while. If it lasts, a worker or the sweeps do not do their part.
WARNINGS = ("workers_too_full", "leases_overdue", "sessions_elsewhere")

#: A lease that should have ended this many sweeps, and seconds, ago is overdue.
LATE_SWEEPS, LATE_SECONDS = 3, 30

#: A clock that is set right by this much finds nothing.
FUTURE_SECONDS = 60


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A row that breaks a rule; `wrong` is false where that may be for a while."""

    rule: str
    wrong: bool
    about: str
    found: str


def check_rows(connection: Connection, settings: RouterSettings) -> list[Finding]:
    """What breaks a rule, in the order of the rules; none: all is well."""
    limits = {
        "headroom_ppm": round(settings.memory_headroom * PPM),
        "ttl_ms": round(settings.worker_ttl * 1000),
        "late_ms": round((LATE_SWEEPS * settings.sweep_interval + LATE_SECONDS) * 1000),
        "read_ms": READ_SECONDS * 1000,
        "unread_ms": UNREAD_SECONDS * 1000,
        "future_ms": FUTURE_SECONDS * 1000,
        "accept_ms": round(settings.accept_timeout * 1000),
    }
    return [
        Finding(rule=rule, wrong=rule in RULES, about=row.about, found=row.found)
        for rule in (*RULES, *WARNINGS)
        for row in connection.execute(statement(rule), {name: limits[name] for name in declared_parameters(rule)})
    ]
