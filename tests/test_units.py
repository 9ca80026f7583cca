"""Sizes, seconds, flavors and settings: converted or refused at the border."""

from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from readie.errors import BadFlavor, BadSetting, BadSize
from readie.flavor import Flavor, parse_flavor
from readie.settings import Bytes, describe, read_settings
from readie.units import mb_to_bytes, ns_to_seconds, parse_size, price_size, seconds_to_ns

decimals = st.decimals(min_value=0, max_value=3600, allow_nan=False, allow_infinity=False, places=None)


class TestSizes:
    """Bytes, or a whole number with Ki Mi Gi Ti (1024) or K M G T (1000)."""

    @pytest.mark.parametrize(
        ("size", "in_bytes"),
        [
            (1, 1),
            ("1", 1),
            (2**62, 2**62),
            ("007", 7),
            ("1K", 1000),
            ("1Ki", 1024),
            ("2G", 2_000_000_000),
            ("512Mi", 512 * 1024**2),
            ("16Gi", 16 * 1024**3),
            ("3T", 3 * 10**12),
            ("3Ti", 3 * 1024**4),
            ("4611686018427387904", 2**62),
        ],
    )
    def test_a_size_is_bytes(self, size: int | str, in_bytes: int) -> None:
        """Numbers and texts give the same."""
        assert parse_size(size) == in_bytes

    @pytest.mark.parametrize(
        "size",
        [
            *(0, -1, 2**62 + 1, True, False, 1.0, None, b"1Ki", [1]),
            *(
                "",
                " ",
                "0",
                "0Gi",
                "-1",
                "+1",
                "1.5Gi",
                "1 Gi",
                " 1Gi",
                "1Gi ",
                "1\n",
                "1gi",
                "1GI",
                "1GB",
                "1B",
                "1Ei",
            ),
            *("Gi", "1e9", "1_000", "0x10", "１Gi", "٣", "4611686018427387905", "9999999Ti", "9" * 5000),
        ],
    )
    def test_anything_else_is_refused(self, size: object) -> None:
        """Fractions, signs, blanks, other units, other digits, zero, too much."""
        with pytest.raises(BadSize):
            parse_size(size)  # type: ignore[arg-type]


class TestNanoseconds:
    """Seconds become integer nanoseconds once, from the decimal text, rounded half to even."""

    @given(decimals)
    def test_they_are_exact(self, seconds: Decimal) -> None:
        """As fractions say; the decimal context of the caller does not matter."""
        assert seconds_to_ns(seconds) == round(Fraction(seconds) * 10**9)  # rounds half to even

    @given(decimals, decimals)
    def test_prices_are_rounded_once(self, alpha: Decimal, size_mb: Decimal) -> None:
        """The product is exact before it is rounded."""
        assert price_size(alpha, size_mb) == round(Fraction(alpha) * Fraction(size_mb) * 10**9)

    def test_a_price_is_not_rounded_twice(self) -> None:
        """0.5 ns less a hair is 0, and 1.5 ns are 2."""
        assert price_size(Decimal("0.0000000004999999999"), Decimal(1)) == 0
        assert price_size(Decimal("0.00000000015"), Decimal(10)) == 2

    @given(decimals)
    def test_megabytes_are_a_million_bytes(self, size_mb: Decimal) -> None:
        """Exactly, rounded half to even."""
        assert mb_to_bytes(size_mb) == round(Fraction(size_mb) * 10**6)

    def test_they_are_shown_as_seconds(self) -> None:
        """For people."""
        assert ns_to_seconds(480_000_000) == 0.48


class TestFlavors:
    """`cpu` and `gpu`, nothing else, anywhere."""

    @pytest.mark.parametrize("text", ["cpu", "gpu"])
    def test_a_flavor_is_its_name(self, text: str) -> None:
        """And prints as it."""
        assert str(parse_flavor(text)) == text

    @pytest.mark.parametrize(
        "text", ["", "CPU", " cpu", "cpu ", "cpu\n", "tpu", "ｃｐｕ", None, 0, True, b"cpu", ["cpu"]]
    )
    def test_anything_else_is_refused(self, text: object) -> None:
        """The message shows it, and names both."""
        with pytest.raises(BadFlavor) as caught:
            parse_flavor(text)

        assert repr(text) in str(caught.value)
        assert "cpu or gpu" in str(caught.value)


class Settings(msgspec.Struct):
    worker_id: str
    flavor: Flavor = Flavor.CPU
    memory_total: Bytes | None = None
    port: Annotated[int, msgspec.Meta(ge=1, le=65535, description="a port from 1 to 65535")] = 8700
    headroom: float = 0.9
    runtime: Literal["fork", "runsc"] = "fork"
    migrate: bool = False
    limit: Bytes = Bytes(1000)


class TestSettings:
    """Each setting is the variable of its name, in upper case; an invalid one is named with what is accepted."""

    def test_what_is_not_set_has_its_default(self) -> None:
        """Blank counts as not set; variables of others do not matter."""
        assert read_settings(Settings, {"WORKER_ID": "w", "FLAVOR": "", "PORT": "  ", "PATH": "/bin"}) == Settings("w")

    def test_values_are_converted(self) -> None:
        """Each to its type."""
        environment = {
            "WORKER_ID": " w1 ",
            "FLAVOR": "gpu",
            "MEMORY_TOTAL": "16Gi",
            "PORT": "80",
            "HEADROOM": "0.5",
            "RUNTIME": "runsc",
            "MIGRATE": "true",
            "LIMIT": "2K",
        }

        settings = read_settings(Settings, environment)

        assert settings == Settings("w1", Flavor.GPU, Bytes(16 * 1024**3), 80, 0.5, "runsc", True, Bytes(2000))

    def test_a_required_one_must_be_set(self) -> None:
        """The message names it."""
        with pytest.raises(BadSetting, match="WORKER_ID is not set"):
            read_settings(Settings, {})

    @pytest.mark.parametrize(
        ("variable", "value", "accepted"),
        [
            ("FLAVOR", "tpu", "cpu or gpu"),
            ("MEMORY_TOTAL", "16GB", "bytes, or a size such as 16Gi"),
            ("MEMORY_TOTAL", "0", "bytes, or a size such as 16Gi"),
            ("LIMIT", "much", "bytes, or a size such as 16Gi"),
            ("PORT", "0", "a port from 1 to 65535"),
            ("PORT", "65536", "a port from 1 to 65535"),
            ("PORT", "80.5", "a port from 1 to 65535"),
            ("HEADROOM", "half", "a number"),
            ("RUNTIME", "docker", "fork or runsc"),
            ("MIGRATE", "perhaps", "true or false"),
        ],
    )
    def test_an_invalid_one_is_named_with_its_value(self, variable: str, value: str, accepted: str) -> None:
        """And with what is accepted."""
        with pytest.raises(BadSetting) as caught:
            read_settings(Settings, {"WORKER_ID": "w", variable: value})

        assert caught.value.detail.startswith(f"{variable}={value!r}: ")
        assert caught.value.hint == f"Accepted: {accepted}."

    @pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
    def test_a_number_is_finite(self, value: str) -> None:
        """A limit that is not a number limits nothing."""
        with pytest.raises(BadSetting, match="HEADROOM"):
            read_settings(Settings, {"WORKER_ID": "w", "HEADROOM": value})

    def test_text_is_accepted_as_text(self) -> None:
        """What is said of a text setting."""
        assert describe(str) == "text"
