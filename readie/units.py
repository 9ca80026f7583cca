"""Units, converted once, at the border: sizes to bytes, seconds to integer nanoseconds.

MB is 10⁶ bytes everywhere. Costs are integers so that every engine adds them to the same sum, in any order.
"""

import re
from decimal import ROUND_HALF_EVEN, Context, Decimal

from readie.errors import BadSize

MB = 1_000_000
NS_PER_SECOND = 1_000_000_000
MAX_BYTES = 2**62

#: Sums of up to a million items stay inside 64 bits: 2**63 ns are 292 years.
MAX_LOAD_SECONDS = Decimal(3600)
MAX_SIZE_MB = Decimal(10**9)
MAX_ALPHA = Decimal(1000)

_UNITS = {"": 1}
_UNITS |= {letter: 1000**power for power, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"([0-9]{1,19})(" + "|".join(sorted(_UNITS, key=len, reverse=True)) + r")")
_EXACT = Context(prec=200, rounding=ROUND_HALF_EVEN, Emax=10_000, Emin=-10_000)


def parse_size(size: int | str) -> int:
    """Bytes of `size`: a whole number of bytes, or text such as `512Mi` (Ki Mi Gi Ti = 1024) or `2G` (K M G T = 1000).

    Raises `BadSize` for anything else: fractions, signs, blanks, other units, zero, more than 2**62 bytes.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        number = size
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if match is None:
            raise BadSize(f"{size!r} is not a size")
        number = int(match[1]) * _UNITS[match[2]]
    if not 0 < number <= MAX_BYTES:
        raise BadSize(f"{size!r} is out of range")
    return number


def seconds_to_ns(seconds: Decimal) -> int:
    """Nanoseconds, exact from the decimal text, rounded half to even."""
    return int(_EXACT.multiply(seconds, Decimal(NS_PER_SECOND)).to_integral_value(ROUND_HALF_EVEN))


def price_size(alpha: Decimal, size_mb: Decimal) -> int:
    """`size_ns`: what a checkpoint of `size_mb` costs at `alpha` seconds per MB, in nanoseconds, rounded once."""
    return seconds_to_ns(_EXACT.multiply(alpha, size_mb))


def mb_to_bytes(size_mb: Decimal) -> int:
    """Bytes, exact from the decimal text, rounded half to even."""
    return int(_EXACT.multiply(size_mb, Decimal(MB)).to_integral_value(ROUND_HALF_EVEN))


def ns_to_seconds(nanoseconds: int) -> float:
    """Seconds, for people and for JSON answers; never added up again."""
    return nanoseconds / NS_PER_SECOND
