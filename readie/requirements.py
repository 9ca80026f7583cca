"""Requirement strings (PEP 508), and which of them a root filesystem already satisfies."""

from collections.abc import Iterable, Mapping
from typing import Literal

from packaging.markers import Marker, UndefinedEnvironmentName, default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import Version

from readie.errors import BadRequirement
from readie.wire import MAX_NAME, KeptPackage, SkippedPackage

__all__ = ["PackagesPolicy", "Requirement", "parse_requirement", "split_requirements"]

PackagesPolicy = Literal["version", "names"]


def parse_requirement(text: str) -> Requirement:
    """The requirement that `text` states, with canonical names; `str()` of it is the normalized text.

    Raises `BadRequirement` for whatever is not exactly one requirement: options, paths, comments, hashes.
    """
    if not isinstance(text, str) or len(text) > MAX_NAME:
        raise BadRequirement(f"{str(text)[:80]!r}: a requirement is text of at most {MAX_NAME} characters")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise BadRequirement(f"{text!r}: NUL and lone surrogates are in no requirement")
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise BadRequirement(f"{text!r}: {str(error).partition(chr(10))[0]}") from error
    if requirement.marker is not None:
        try:
            requirement.marker.evaluate()
        except UndefinedEnvironmentName as error:
            raise BadRequirement(f"{text!r}: {error.args[0]} stands in markers of lock files only") from error
        except ValueError:  # a comparison without meaning here may have one on the worker
            pass
    try:  # the parser takes names that end in a hyphen, a dot or an underscore; the specification does not
        requirement.name = canonicalize_name(requirement.name, validate=True)
        requirement.extras = {canonicalize_name(extra, validate=True) for extra in requirement.extras}
    except InvalidName as error:
        raise BadRequirement(f"{text!r}: {error}") from error
    return requirement


def split_requirements(
    requirements: Iterable[str],
    distributions: Mapping[str, str],
    markers: Mapping[str, str],
    policy: PackagesPolicy = "version",
) -> tuple[list[SkippedPackage], list[KeptPackage]]:
    """What the root filesystem has, and what is to be installed for the call, each with the reason, in order.

    `distributions` are its canonical names with versions, `markers` its marker environment. Policy `names` looks at
    names alone. Raises `BadRequirement`.
    """
    skipped: list[SkippedPackage] = []
    kept: list[KeptPackage] = []
    for text in requirements:
        requirement = parse_requirement(text)
        installed = distributions.get(requirement.name)
        applies, why = _apply_marker(requirement.marker, markers)
        if not applies:
            skipped.append(SkippedPackage(requirement=str(requirement), installed=installed or "", reason=why))
            continue
        reason = why or _why_kept(requirement, installed, policy)
        if reason:
            kept.append(KeptPackage(requirement=str(requirement), reason=reason, installed=installed))
        else:
            skipped.append(SkippedPackage(requirement=str(requirement), installed=installed or ""))
    return skipped, kept


def _apply_marker(marker: Marker | None, markers: Mapping[str, str]) -> tuple[bool, str]:
    """Whether a requirement with this marker applies; and why not, or why that is left to the installer."""
    if marker is None:
        return True, ""
    # packaging would fill the gaps from this process, which is not where the call runs.
    missing = default_environment().keys() - markers.keys()
    if missing:
        return True, f"its marker cannot be evaluated: the worker reports no {', '.join(sorted(missing))}"
    try:
        return (True, "") if marker.evaluate(dict(markers)) else (False, f"nothing to install: not {marker}")
    except (ValueError, UndefinedEnvironmentName) as error:
        return True, f"its marker cannot be evaluated: {error}"


def _why_kept(requirement: Requirement, installed: str | None, policy: PackagesPolicy) -> str:
    """Why the root filesystem does not satisfy `requirement`; empty if it does."""
    if installed is None:
        return "the root filesystem does not have it"
    if policy == "names":
        return ""
    if requirement.url is not None:
        return f"it names a URL; the root filesystem has {installed or 'no version of it'}"
    if requirement.extras:
        return (
            f"only an installer knows whether its extras are there; the root filesystem has {installed or 'no version'}"
        )
    if not requirement.specifier or _satisfies(requirement, installed):
        return ""
    if not installed:
        return f"the root filesystem names no version of it, and {requirement.specifier} is asked for"
    return f"the root filesystem has {installed}, and {requirement.specifier} is asked for"


def _satisfies(requirement: Requirement, installed: str) -> bool:
    try:
        Version(installed)
        # An installed pre-release counts: it is what an import gets.
        return requirement.specifier.contains(installed, prereleases=True)
    except ValueError:  # it is no version, or one of more digits than Python reads
        # Some versions of packaging compare such a version, some raise: only the very same text satisfies.
        return all(each.operator == "===" and each.version == installed for each in requirement.specifier)
