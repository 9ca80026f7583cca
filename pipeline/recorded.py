"""The corpus of a live system: what a router has recorded that calls import, and how often."""

import os
from collections import Counter
from datetime import datetime
from typing import Any

import httpx

from pipeline.corpus import ImportSet, is_item_name
from readie.flavor import Flavor
from readie.http import connection, read_answer, unreachable
from readie.imports import deepest, outside_stdlib
from readie.resources import is_resource
from readie.settings import check_token
from readie.wire import RecordedImports

ROUTE = "/v1/calls/imports"
PAGE = 1000  # sets
TIMEOUT = 120.0  # seconds for one page: it is counted anew from all calls


def fetch_recorded(url: str, since: datetime | None = None, flavor: Flavor | None = None) -> list[ImportSet]:
    """The import sets of the calls that the router at `url` has placed, most frequent first.

    AUTH_TOKEN is what the router asks clients for, ROUTER_CA whom to trust. Names of the standard library, and those that no item can have, are
    left out. Raises `BadSetting`, `RouterUnreachable`, and what the router says.
    """
    token = os.environ.get("AUTH_TOKEN", "")
    check_token("AUTH_TOKEN", token)
    options = connection(url, token, os.environ.get("ROUTER_CA") or None, named="--from-router ")
    parameters: dict[str, Any] = {"limit": PAGE, "offset": 0}
    if since is not None:
        parameters["since"] = since.isoformat()
    if flavor is not None:
        parameters["flavor"] = str(flavor)
    calls: dict[tuple[str, ...], int] = {}  # of each set as it was sent: no page counts one twice
    try:
        with httpx.Client(**options, timeout=TIMEOUT) as http:
            while True:
                page = read_answer(http.get(ROUTE, params=parameters), RecordedImports)
                calls |= {tuple(one.modules): one.calls for one in page.sets}
                if len(page.sets) < PAGE or page.until is None:
                    break
                parameters |= {"until": page.until.isoformat(), "offset": parameters["offset"] + PAGE}
    except httpx.HTTPError as error:
        raise unreachable(url, error) from error
    counts: Counter[tuple[str, ...]] = Counter()
    for modules, count in calls.items():
        counts[_kept(modules)] += count
    del counts[()]
    return sorted(
        (ImportSet(modules, count) for modules, count in counts.items()), key=lambda one: (-one.count, one.modules)
    )


def _kept(modules: tuple[str, ...]) -> tuple[str, ...]:
    """What a set is for the planner: names that items can have, the deepest only."""
    names = [name for name in modules if is_item_name(name)]
    keys = {name for name in names if is_resource(name)}
    return tuple(sorted(keys | deepest(outside_stdlib(set(names) - keys))))
