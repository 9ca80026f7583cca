"""Requirement strings (DESIGN §5): what the root filesystem has, and what is kept for installation, and why."""

from collections.abc import Mapping
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readie.errors import BadRequirement
from readie.requirements import parse_requirement, split_requirements
from readie.wire import KeptPackage, SkippedPackage
from tests.strategies import distribution_names

INSTALLED = {
    "numpy": "2.0.0",
    "scikit-learn": "1.5.2",
    "ruamel-yaml": "0.18",
    "opencv-python": "4.9",
    "torch": "2.1.0+cu118",
    "beta": "2.1.0rc1",
    "legacy": "2004d-unknown",
    "bare": "",
    "endless": "9" * 5000,
}

#: Of a root filesystem that differs from this process in every way.
MARKERS = {
    "implementation_name": "pypy",
    "implementation_version": "7.3.0",
    "os_name": "none",
    "platform_machine": "riscv64",
    "platform_python_implementation": "PyPy",
    "platform_release": "0",
    "platform_system": "Plan9",
    "platform_version": "0",
    "python_full_version": "3.99.1",
    "python_version": "3.99",
    "sys_platform": "plan9",
}

#: requirement → the version that it is skipped for
SKIPPED = {
    "numpy": "2.0.0",
    "Numpy": "2.0.0",
    "  numpy  ": "2.0.0",
    "numpy>=1.0,": "2.0.0",
    "numpy (>=1.0)": "2.0.0",
    "numpy>=2,!=2.0.1": "2.0.0",
    "numpy~=2.0": "2.0.0",
    "scikit_learn==1.*": "1.5.2",
    "Scikit.Learn": "1.5.2",
    "SCIKIT--learn": "1.5.2",
    "ruamel_yaml": "0.18",
    "opencv-python": "4.9",
    "torch==2.1.0": "2.1.0+cu118",
    "torch==2.1.0+cu118": "2.1.0+cu118",
    "torch===2.1.0+cu118": "2.1.0+cu118",
    "beta": "2.1.0rc1",
    "beta>=2.0": "2.1.0rc1",  # a pre-release that is installed counts
    "beta>=2,<3": "2.1.0rc1",
    "legacy": "2004d-unknown",
    "legacy===2004d-unknown": "2004d-unknown",
    "bare": "",
}

#: requirement → a part of the reason for which it is installed, and what the root filesystem has of it
KEPT = {
    "cv2": ("does not have it", None),
    "requests": ("does not have it", None),
    "numpy<2": ("has 2.0.0, and <2 is asked for", "2.0.0"),
    "numpy>=2,<2": ("has 2.0.0, and <2,>=2 is asked for", "2.0.0"),
    "numpy==1.26": ("has 2.0.0, and ==1.26 is asked for", "2.0.0"),
    "torch===2.1.0": ("has 2.1.0+cu118, and ===2.1.0 is asked for", "2.1.0+cu118"),
    "torch==2.1.0+cu121": ("has 2.1.0+cu118, and ==2.1.0+cu121 is asked for", "2.1.0+cu118"),
    "beta>=2.1": ("has 2.1.0rc1, and >=2.1 is asked for", "2.1.0rc1"),
    "legacy>=1.0": ("has 2004d-unknown, and >=1.0 is asked for", "2004d-unknown"),
    "legacy>=1.0,===2004d-unknown": ("has 2004d-unknown", "2004d-unknown"),
    "endless>=1": ("has 999", "9" * 5000),  # more digits than Python makes a number of
    "bare>=1": ("names no version of it, and >=1 is asked for", ""),
    "numpy @ https://example.org/numpy-2.0.0-py3-none-any.whl": ("it names a URL", "2.0.0"),
    "numpy @ https://example.org/n.whl;python_version<'3'": ("it names a URL", "2.0.0"),  # the URL contains the ;
    "numpy[extra]": ("its extras", "2.0.0"),
    "requests[security]>=2.31": ("does not have it", None),
}

#: Whatever is not exactly one requirement is refused by name, never cut down to "numpy".
REFUSED = [
    "numpy_",
    "numpy[extra-]",
    "1.",
    "git+https://example.org/x.git",
    "./pkg",
    "-r req.txt",
    "--pre",
    "numpy # c",
    "numpy==1 --hash=sha256:ab",
    "numpy==",
    "num py",
    "numpy~=2",
    "scikit-learn>=1.*",
    "numpy\n",
    "\nnumpy",
    "numpy\0",
    "numpy\r\n--pre",
    "ｎｕｍｐｙ",
    "",
    " ",
    "numpy; foo == '1'",
    "numpy; " + "(" * 400 + "python_version > '3'" + ")" * 400,
    "numpy; 'a' in extras",
    "numpy; 'a' in dependency_groups and os_name == 'none'",
    "numpy @ https://example.org/\0.whl",
    "numpy @ https://example.org/\ud800.whl",
    "numpy===\udfff",
    "numpy==" + "9" * 1024,
    "x" * 1025,
]


def split(
    *requirements: str,
    markers: Mapping[str, str] = MARKERS,
    policy: Literal["version", "names"] = "version",
) -> tuple[list[SkippedPackage], list[KeptPackage]]:
    return split_requirements(requirements, INSTALLED, markers, policy)


class TestParse:
    """A requirement is one PEP 508 string; names are compared canonically."""

    @pytest.mark.parametrize(
        ("text", "normalized"),
        [
            ("  Numpy ", "numpy"),
            ("Scikit.Learn>=1,", "scikit-learn>=1"),
            ("requests[Security,b_c] >= 2.31", "requests[b-c,security]>=2.31"),
            ("numpy (>=1.0)", "numpy>=1.0"),
            (
                "A @ https://example.org/a.whl ; python_version<'3'",
                'a @ https://example.org/a.whl ; python_version < "3"',
            ),
        ],
    )
    def test_it_is_normalized(self, text: str, normalized: str) -> None:
        """What is sent has canonical names and one spacing; and is a requirement itself."""
        assert str(parse_requirement(text)) == normalized
        assert str(parse_requirement(normalized)) == normalized

    @pytest.mark.parametrize("text", REFUSED)
    def test_anything_else_is_refused_by_name(self, text: str) -> None:
        """The message shows the text, on one line."""
        with pytest.raises(BadRequirement) as caught:
            parse_requirement(text)

        assert repr(text)[:40] in caught.value.detail
        assert "\n" not in caught.value.detail

    def test_what_is_no_text_is_refused(self) -> None:
        """A list in place of a string, say."""
        with pytest.raises(BadRequirement, match="is text"):
            parse_requirement(["numpy"])  # type: ignore[arg-type]

    @given(st.text(st.sampled_from("numpy<>=~!.,;@[]() -_#'\"\n\0é1*+"), max_size=30))
    def test_text_is_parsed_or_refused(self, text: str) -> None:
        """No other exception comes out, whatever the text."""
        try:
            requirement = parse_requirement(text)
        except BadRequirement:
            return
        assert parse_requirement(str(requirement)) == requirement


class TestSplit:
    """Skipped is what the installed version satisfies. The rest is kept, with the reason and both versions."""

    @pytest.mark.parametrize(("text", "version"), SKIPPED.items())
    def test_what_the_root_filesystem_satisfies_is_skipped(self, text: str, version: str) -> None:
        """The installed version is named."""
        assert split(text) == ([SkippedPackage(requirement=str(parse_requirement(text)), installed=version)], [])

    @pytest.mark.parametrize("text", KEPT)
    def test_what_it_does_not_satisfy_is_kept(self, text: str) -> None:
        """The reason and the installed version are named."""
        reason, installed = KEPT[text]

        skipped, (kept,) = split(text)

        assert skipped == []
        assert reason in kept.reason
        assert (kept.requirement, kept.installed) == (str(parse_requirement(text)), installed)

    @pytest.mark.parametrize("text", ["numpy<2", "legacy>=1", "bare>=1", "numpy[extra]", "numpy @ https://e.org/n.whl"])
    def test_by_names_alone_the_version_does_not_matter(self, text: str) -> None:
        """PACKAGES_POLICY=names skips whatever is there, and still names its version."""
        (skipped,), kept = split(text, "requests", policy="names")

        name = parse_requirement(text).name
        assert (skipped.installed, [each.requirement for each in kept]) == (INSTALLED[name], ["requests"])

    def test_a_malformed_requirement_is_refused(self) -> None:
        """With the others, nothing is split."""
        with pytest.raises(BadRequirement, match="num py"):
            split("numpy", "num py")

    @given(distribution_names, st.sampled_from(["", "1.0", "1!2.0.post1", "2.0.dev3", "2004d", "1.0+local"]))
    def test_a_bare_name_is_satisfied_by_any_version(self, name: str, version: str) -> None:
        """An empty, an odd and a development version too."""
        skipped, kept = split_requirements([name.upper()], {name: version}, MARKERS)

        assert ([each.installed for each in skipped], kept) == ([version], [])


class TestMarkers:
    """Markers are evaluated in the worker's environment: where one is false, there is nothing to install."""

    @pytest.mark.parametrize("marker", ["python_version < '3'", "sys_platform == 'linux'", "extra == 'x'"])
    def test_a_false_marker_leaves_nothing_to_install(self, marker: str) -> None:
        """Whether the root filesystem has it or not; the answer says why."""
        skipped, kept = split(f"numpy<2; {marker}", f"requests; {marker}", f"a @ https://e.org/a.whl ; {marker}")

        assert kept == []
        assert [each.installed for each in skipped] == ["2.0.0", "", ""]
        assert all(each.reason.startswith("nothing to install: not ") for each in skipped)

    @pytest.mark.parametrize("marker", ["python_version >= '3.99'", "sys_platform == 'plan9' and os_name == 'none'"])
    def test_a_true_marker_changes_nothing(self, marker: str) -> None:
        """The environment is the worker's, not this process's."""
        skipped, kept = split(f"numpy; {marker}", f"requests; {marker}")

        assert [each.reason for each in skipped] == [""]
        assert [each.reason for each in kept] == ["the root filesystem does not have it"]

    def test_without_the_workers_environment_the_installer_decides(self) -> None:
        """This process's own would be a wrong guess."""
        skipped, (kept,) = split("numpy; python_version > '3'", "numpy", markers={"python_version": "3.11"})

        assert [each.requirement for each in skipped] == ["numpy"]
        assert kept.reason.startswith("its marker cannot be evaluated: the worker reports no implementation_name, ")
        assert kept.installed == "2.0.0"

    def test_a_comparison_without_meaning_is_left_to_the_installer(self) -> None:
        """No exception: the requirement is kept, and the answer says why."""
        skipped, (kept,) = split("numpy; os_name ~= 'none'")

        assert skipped == []
        assert kept.reason.startswith("its marker cannot be evaluated: ")

    def test_a_name_of_lock_files_behind_one_is_left_to_the_installer_too(self) -> None:
        """Whichever of the two is found first, where the call runs."""
        marker = "os_name ~= 'none' and 'a' in extras"

        _, (kept,) = split(f"numpy; {marker}", markers=MARKERS | {"os_name": "1"})

        assert kept.reason.startswith("its marker cannot be evaluated: ")
