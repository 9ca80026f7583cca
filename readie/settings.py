"""Settings from environment variables into a typed record, read once."""

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from readie.errors import BadSetting, ReadieError
from readie.flavor import Flavor, parse_flavor
from readie.units import parse_size
from readie.wire import MAX_SECONDS

Settings = TypeVar("Settings", bound=msgspec.Struct)


class Bytes(int):
    """A setting in bytes, written as bytes or as `16Gi`."""


Duration = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS, description="seconds above 0, a week at most")]

ALIKE = 0.86  # as difflib counts; of WORKER_DIR and WORKER_ID, say, it is less

DEFAULT_ROUTER_URL = "http://127.0.0.1:8700"
RouterUrl = Annotated[str, msgspec.Meta(pattern=r"^https?://[^/]", description=f"a URL such as {DEFAULT_ROUTER_URL}")]


def check_token(variable: str, token: str) -> None:
    """Raises `BadSetting`, without the token, for one that no header can carry."""
    if not (token.isascii() and token.isprintable()):
        raise BadSetting(f"{variable} has characters that a header cannot carry", "Use printable ASCII.")


def _decode(kind: type, value: Any) -> Any:
    if kind is Bytes:
        return Bytes(parse_size(value))
    raise NotImplementedError(kind)


def _check_finite(value: object) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ReadieError("it is not a finite number")


def read_settings(kind: type[Settings], environ: Mapping[str, str]) -> Settings:
    """The record `kind`, each field from the variable of its name in upper case; blank counts as not set.

    Raises `BadSetting`, which names the variable, its value and what is accepted.
    """
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        variable = field.encode_name.upper()
        text = environ.get(variable, "").strip()
        if not text:
            if field.required:
                raise BadSetting(f"{variable} is not set", f"Set it: {describe(field.type)}.")
            continue
        try:
            if field.type is Flavor:
                values[field.name] = parse_flavor(text)
            else:
                values[field.name] = msgspec.convert(text, field.type, strict=False, dec_hook=_decode)
            _check_finite(values[field.name])
        except (msgspec.ValidationError, ReadieError) as error:
            reason = error.detail if isinstance(error, ReadieError) else str(error)
            raise BadSetting(f"{variable}={text!r}: {reason}", f"Accepted: {describe(field.type)}.") from error
    return kind(**values)


def misspelt(environ: Mapping[str, str], *kinds: type[msgspec.Struct]) -> dict[str, str]:
    """Variables that nothing reads and that are nearly called as a setting of `kinds` is → that setting."""
    known = {field.encode_name.upper() for kind in kinds for field in msgspec.structs.fields(kind)}
    close = {name: get_close_matches(name.upper(), known, 1, ALIKE) for name in sorted(environ.keys() - known)}
    return {name: found[0] for name, found in close.items() if found}


def describe(kind: Any) -> str:
    """What a setting of this type accepts, in words."""
    if get_origin(kind) is Annotated:
        metas = [m.description for m in get_args(kind)[1:] if isinstance(m, msgspec.Meta) and m.description]
        return metas[0] if metas else describe(get_args(kind)[0])
    if kind is Flavor:
        return "cpu or gpu"
    options = [option for option in get_args(kind) if option is not type(None)]
    if options and all(isinstance(option, str) for option in options):
        return " or ".join(options)
    if options:
        return describe(options[0])
    words = {int: "a whole number", float: "a number", Bytes: "bytes, or a size such as 16Gi", bool: "true or false"}
    return words.get(kind, "text")
