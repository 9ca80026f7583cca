"""Why a call would start from this checkpoint and not from another: the whole ranking, with what is missing."""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.markers import default_environment
from sqlalchemy import Connection, Row

from app.catalogue import find_active_catalogue, find_catalogue, read_distributions
from app.scoring import (
    Answers,
    PricedOption,
    Prices,
    ScoreRequest,
    conflicting_distributions,
    find_spoiled,
    price_calls,
    why_excluded,
)
from app.sql import statement
from readie.errors import UnknownCatalogue, UnknownCheckpoint
from readie.flavor import Flavor
from readie.requirements import PackagesPolicy, parse_requirement, split_requirements
from readie.units import ns_to_seconds
from readie.wire import ExplainRequest, Explanation, KeptPackage, Match, MissingItem, Option, SkippedPackage

#: Of this process. 8 MB are 300 explanations of 100 options and few missing items, or 50 of 500 missing items.
answers: Answers[Explanation] = Answers(8 * 10**6)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A request that a catalogue prices, on its way to its explanation."""

    request: ExplainRequest
    catalogue: Row[Any]
    skipped: list[SkippedPackage]
    kept: list[KeptPackage]
    score: ScoreRequest


@dataclass(frozen=True, kw_only=True)
class _Ranked:
    """Its options, the best first, those that are none last; and those whose missing items are to be listed."""

    prices: Prices
    options: list[PricedOption]
    excluded: dict[int, str | None]
    itemised: Collection[int]


def explain(
    connection: Connection, request: ExplainRequest, packages_policy: PackagesPolicy = "version"
) -> Explanation:
    """The whole ranking for a set of modules, with what matched, what is missing, and what is no option and why.

    Raises `UnknownCatalogue` for a SHA-256 that was not imported, `UnknownCheckpoint` for an `items_of` that is not
    listed, `BadRequirement` for a malformed package.
    """
    return explain_calls(connection, [request], packages_policy)[0]


def explain_calls(
    connection: Connection, requests: Sequence[ExplainRequest], packages_policy: PackagesPolicy = "version"
) -> list[Explanation]:
    """As `explain`, for many, in their order: from memory, else by a few statements for all the others together."""
    named = {request.catalogue or request.flavor: request for request in requests}
    catalogues = {name: _find_catalogue(connection, request) for name, request in named.items()}
    found: dict[int, Explanation] = {}
    asked: dict[int, _Asked] = {}
    for number, request in enumerate(requests):
        catalogue = catalogues[request.catalogue or request.flavor]
        if catalogue and (known := remembered(catalogue.sha256, request)):
            found[number] = known
            continue
        flavor = Flavor(catalogue.flavor) if catalogue else request.flavor
        skipped, kept = _split_packages(connection, request.packages, catalogue, flavor, packages_policy)
        if catalogue is None:
            found[number] = _without_catalogue(request, skipped, kept)
            continue
        score = ScoreRequest(
            catalogue_id=catalogue.catalogue_id,
            sha256=catalogue.sha256,
            modules=request.modules,
            memory_bytes=request.memory,
            kept_distributions=conflicting_distributions(kept),
        )
        asked[number] = _Asked(request=request, catalogue=catalogue, skipped=skipped, kept=kept, score=score)
    explained = _explain_anew(connection, list(asked.values()))
    found |= dict(zip(asked, explained, strict=True))
    return [found[number] for number in range(len(requests))]


def _find_catalogue(connection: Connection, request: ExplainRequest) -> Row[Any] | None:
    if request.catalogue is None:
        return find_active_catalogue(connection, request.flavor)
    catalogue = find_catalogue(connection, request.catalogue)
    if catalogue is None:
        raise UnknownCatalogue(f"no catalogue {request.catalogue}")
    return catalogue


def remembered(sha256: str, request: ExplainRequest) -> Explanation | None:
    """The answer by that catalogue, if it is still known; never of a request with packages, which depends on workers."""
    return None if request.packages else answers.find(_key(sha256, request))


def _key(sha256: str, request: ExplainRequest) -> tuple[object, ...]:
    """What an answer depends on besides packages: a catalogue never changes."""
    return sha256, tuple(request.modules), request.memory, request.items_of


def _without_catalogue(request: ExplainRequest, skipped: list[SkippedPackage], kept: list[KeptPackage]) -> Explanation:
    return Explanation(
        flavor=request.flavor,
        catalogue=None,
        generation=None,
        alpha=None,
        matches=[Match(module=module, item=None) for module in request.modules],
        options=[Option(checkpoint_id=None, size=0.0, missing=0.0, total=0.0, total_ns=0, items=[])],
        skipped=skipped,
        kept=kept,
    )


def _explain_anew(connection: Connection, asked: Sequence[_Asked]) -> list[Explanation]:
    scores = [each.score for each in asked]
    spoiled = find_spoiled(connection, scores)
    ranked = [
        _rank(each, prices, spoiled.get(number, {}))
        for number, (each, prices) in enumerate(zip(asked, price_calls(connection, scores), strict=True))
    ]
    missing = _list_missing(connection, scores, ranked)
    return list(map(_explain, asked, ranked, missing))


def _rank(asked: _Asked, prices: Prices, spoiled: dict[int, str]) -> _Ranked:
    options = list(prices.options())
    excluded = {option.ordinal: why_excluded(option, asked.score, spoiled) for option in options}
    options.sort(key=lambda option: excluded[option.ordinal] is not None)  # stable
    itemised = {options[0].ordinal} | _ordinals_of(options, asked.request.items_of)
    return _Ranked(prices=prices, options=options, excluded=excluded, itemised=itemised)


def _explain(asked: _Asked, ranked: _Ranked, missing: dict[int, list[MissingItem]]) -> Explanation:
    modules = asked.request.modules
    explanation = Explanation(
        flavor=Flavor(asked.catalogue.flavor),
        catalogue=asked.catalogue.sha256,
        generation=asked.catalogue.generation,
        alpha=asked.catalogue.alpha,
        matches=[Match(module=module, item=ranked.prices.items.get(module)) for module in modules],
        options=[
            Option(
                checkpoint_id=option.checkpoint_id,
                size=ns_to_seconds(option.size_ns),
                missing=ns_to_seconds(option.missing_ns),
                total=ns_to_seconds(option.cost_ns),
                total_ns=option.cost_ns,
                excluded=ranked.excluded[option.ordinal],
                items=missing.get(option.ordinal),
            )
            for option in ranked.options
        ],
        skipped=asked.skipped,
        kept=asked.kept,
    )
    if not asked.request.packages:
        entries = len(ranked.options) + sum(map(len, missing.values()))
        size_bytes = 250 * entries + sum(200 + 4 * len(module) for module in modules)
        answers.keep(_key(asked.catalogue.sha256, asked.request), explanation, size_bytes)
    return explanation


def _list_missing(
    connection: Connection, scores: Sequence[ScoreRequest], ranked: Sequence[_Ranked]
) -> list[dict[int, list[MissingItem]]]:
    """For each request: ordinal of an option that is itemised → what it lacks."""
    missing: list[dict[int, list[MissingItem]]] = [{ordinal: [] for ordinal in each.itemised} for each in ranked]
    needed = [(number, closure_id) for number, each in enumerate(ranked) for closure_id in each.prices.closure_ids]
    itemised = [(number, ordinal) for number, each in enumerate(ranked) for ordinal in each.itemised]
    if not itemised:
        return missing
    parameters = {
        "requests": [number for number, _ in needed],
        "catalogue_ids": [scores[number].catalogue_id for number, _ in needed],
        "closure_ids": [closure_id for _, closure_id in needed],
        "itemised": [number for number, _ in itemised],
        "ordinals": [ordinal for _, ordinal in itemised],
    }
    for row in connection.execute(statement("list_missing_items"), parameters):
        missing[row.request][row.ordinal].append(MissingItem(item=row.key, seconds=ns_to_seconds(row.load_ns)))
    return missing


def _ordinals_of(options: Iterable[PricedOption], items_of: str | None) -> set[int]:
    """The option that `items_of` names: a checkpoint's id, or `cold`."""
    if items_of is None:
        return set()
    ordinals = {option.checkpoint_id or "cold": option.ordinal for option in options}
    if items_of not in ordinals:
        listed = ", ".join(sorted(ordinals))
        raise UnknownCheckpoint(f"{items_of}: the catalogue lists {listed}", "Name one of these, or cold.")
    return {ordinals[items_of]}


def _split_packages(
    connection: Connection,
    packages: Sequence[str],
    catalogue: Row[Any] | None,
    flavor: Flavor,
    policy: PackagesPolicy,
) -> tuple[list[SkippedPackage], list[KeptPackage]]:
    if not packages:
        return [], []
    names = {parse_requirement(package).name for package in packages}
    distributions = read_distributions(connection, catalogue.catalogue_id, names) if catalogue else {}
    return split_requirements(packages, distributions, _markers(connection, flavor), policy)


def _markers(connection: Connection, flavor: Flavor) -> dict[str, str]:
    """No worker is chosen yet: the markers are those of any of the flavor, else the router's own."""
    reported = connection.execute(statement("find_markers"), {"flavor": str(flavor)}).scalar_one_or_none()
    return (
        dict(json.loads(reported)) if reported else {name: str(value) for name, value in default_environment().items()}
    )
