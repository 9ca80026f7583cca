"""DESIGN §9, names to distributions: what a root filesystem has, and which distribution a module belongs to."""

import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.analyze import MeasurementInfo, Measurements
from pipeline.capture import carry_over
from pipeline.measurement import MeasuredItem, ResourceType
from pipeline.rootfs import RootFilesystem, contract_items, filter_measured, list_rootfs
from readie.errors import RootfsUnreadable
from readie.flavor import Flavor
from readie.manifest import Host

EXTENSION = f".cpython-{sys.version_info[0]}{sys.version_info[1]}-x86_64-linux-gnu.so"


def make_rootfs(path: Path) -> Path:
    """An empty virtual environment, made by hand because that takes a millisecond; returns its site-packages."""
    interpreter = Path(os.path.realpath(sys.executable))
    site = path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (path / "bin").mkdir()
    (path / "bin" / "python").symlink_to(interpreter)
    (path / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
    return site


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def install(
    site: Path,
    name: str,
    version: str | None,
    files: Iterable[str] = (),
    *,
    top_level: str | None = None,
    record: bool = True,
) -> None:
    """Puts a distribution there as an installer does: its files, and its metadata."""
    info = site / f"{name}-{version}.dist-info"
    for file in files:
        write(site / file)
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\n" + (f"Version: {version}\n" if version else ""))
    if record:
        write(
            info / "RECORD", "".join(f"{file},,\n" for file in [*files, f"{info.name}/METADATA", f"{info.name}/RECORD"])
        )
    if top_level is not None:
        write(info / "top_level.txt", top_level)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return make_rootfs(tmp_path / "rootfs")


def listed(site: Path) -> RootFilesystem:
    return list_rootfs(site.parents[2])


class TestNamespacePackages:
    """The root name is not enough (K05): the longest path match on RECORD decides."""

    @pytest.fixture(scope="class")
    @classmethod
    def rootfs(cls, tmp_path_factory: pytest.TempPathFactory) -> RootFilesystem:
        site = make_rootfs(tmp_path_factory.mktemp("namespaces") / "rootfs")
        install(site, "google_cloud_storage", "2.0", ["google/cloud/storage/__init__.py"])
        install(site, "protobuf", "5.0", ["google/protobuf/__init__.py"])
        commons = ["google/api/__init__.py", "google/rpc/__init__.py"]
        install(site, "googleapis_common_protos", "1.6", commons, top_level="google\n")
        install(site, "ruamel.yaml", "0.18", ["ruamel/yaml/__init__.py"], top_level="ruamel\n")
        install(site, "zope.interface", "6", ["zope/interface/__init__.py"], top_level="zope\n")
        return list_rootfs(site.parents[2])

    @pytest.mark.parametrize(
        ("module", "distribution"),
        [
            ("google.cloud.storage", "google-cloud-storage"),
            ("google.cloud.storage.Client", "google-cloud-storage"),
            ("google.protobuf.message", "protobuf"),
            ("google.cloud.bigquery", None),
            ("google.rpc", "googleapis-common-protos"),
            ("ruamel.yaml.YAML", "ruamel-yaml"),
            ("zope.interface", "zope-interface"),
            ("zope.event", None),
            ("google", None),
            ("google.cloud", None),
        ],
    )
    def test_module_belongs_to_the_distribution_that_recorded_it(
        self, rootfs: RootFilesystem, module: str, distribution: str | None
    ) -> None:
        """A module belongs to the distribution whose RECORD has it or its nearest package, and to no neighbour."""
        assert rootfs.distribution_of(module) == distribution

    def test_bare_namespaces_are_told_apart_from_unknown_names(self, rootfs: RootFilesystem) -> None:
        """`google` is reported as a bare namespace; `google.cloud.bigquery` and `google.protobuf` are not."""
        asked = ["google", "google.cloud", "zope", "google.cloud.bigquery", "google.protobuf", "numpy"]

        assert [name for name in asked if rootfs.is_namespace(name)] == ["google", "google.cloud", "zope"]

    def test_own_names_of_a_distribution_in_a_namespace_are_its_packages(self, rootfs: RootFilesystem) -> None:
        """What such a distribution brings to import is its own packages, not the namespace."""
        assert rootfs.top_levels == {
            "google-cloud-storage": ["google.cloud.storage"],
            "googleapis-common-protos": ["google.api", "google.rpc"],
            "protobuf": ["google.protobuf"],
            "ruamel-yaml": ["ruamel.yaml"],
            "zope-interface": ["zope.interface"],
        }

    def test_the_file_decides_where_it_is_known(self, rootfs: RootFilesystem) -> None:
        """With its file, even a module under a misleading name goes to the file's owner."""
        site = rootfs.path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

        assert rootfs.distribution_of("alias", str(site / "google/protobuf/__init__.py")) == "protobuf"
        assert rootfs.distribution_of("google.protobuf", "/elsewhere/google/protobuf.py") is None


class TestDeclaredNamespaces:
    """Namespaces of the old styles have an `__init__.py` in several distributions."""

    @pytest.mark.parametrize(
        "text",
        [
            "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n",
            "import pkg_resources\npkg_resources.declare_namespace(__name__)\n",
            """try:
    __import__("pkg_resources").declare_namespace(__name__)
except ImportError:
    from pkgutil import extend_path
    __path__ = extend_path(__path__, __name__)
""",
        ],
    )
    def test_init_that_only_declares_is_a_namespace(self, site: Path, text: str) -> None:
        """Such an `__init__.py` belongs to nobody, without a warning about its owners."""
        install(site, "backports.a", "1", ["backports/__init__.py", "backports/a.py"], top_level="backports")
        install(site, "backports.b", "1", ["backports/__init__.py", "backports/b/__init__.py"], top_level="backports")
        write(site / "backports/__init__.py", text)
        rootfs = listed(site)

        assert [rootfs.distribution_of(name) for name in ("backports.a", "backports.b.c", "backports")] == [
            "backports-a",
            "backports-b",
            None,
        ]
        assert rootfs.is_namespace("backports")
        assert rootfs.distribution_of("backports", str(site / "backports/__init__.py")) is None
        assert rootfs.warnings == ()
        assert rootfs.top_levels["backports-b"] == ["backports.b"]

    def test_one_owner_makes_no_package_of_it(self, site: Path) -> None:
        """`zope.event` is not zope.interface's, although that alone installed the `__init__.py` around both."""
        install(site, "zope.interface", "6", ["zope/__init__.py", "zope/interface/__init__.py"], top_level="zope\n")
        write(site / "zope/__init__.py", "__import__('pkg_resources').declare_namespace(__name__)\n")
        rootfs = listed(site)

        assert rootfs.distribution_of("zope.interface") == "zope-interface"
        assert [rootfs.distribution_of(name) for name in ("zope", "zope.event")] == [None, None]
        assert rootfs.is_namespace("zope")
        assert rootfs.top_levels == {"zope-interface": ["zope.interface"]}

    def test_init_that_imports_its_own_parts_is_a_package(self, site: Path) -> None:
        """It declares a namespace, and is code of its distribution all the same."""
        install(site, "air", "1", ["air/__init__.py", "air/core.py"])
        code = "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\nfrom air.core import run\n"
        write(site / "air/__init__.py", code)

        assert listed(site).distribution_of("air") == "air"

    def test_init_that_does_more_belongs_to_its_distribution(self, site: Path) -> None:
        """A package that lets others extend it, and has code of its own, stays one distribution's."""
        install(site, "apache-air", "1", ["air/__init__.py", "air/models.py"])
        install(site, "air-providers-x", "1", ["air/providers/x.py"])
        code = "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\ndef run(): ...\n"
        write(site / "air/__init__.py", code)
        rootfs = listed(site)

        assert rootfs.distribution_of("air") == "apache-air"
        assert rootfs.distribution_of("air.providers.x") == "air-providers-x"


class TestNames:
    """An import name says little about the distribution's name."""

    def test_modules_of_every_kind_are_found(self, site: Path) -> None:
        """Packages, single-file modules, extension modules and private ones belong to the one that recorded them."""
        install(site, "Pillow", "13", ["PIL/__init__.py", f"PIL/_imaging{EXTENSION}"])
        install(site, "PyYAML", "6", ["yaml/__init__.py", "_yaml/__init__.py"], top_level="_yaml\nyaml\n")
        install(site, "six", "1", ["six.py"], top_level="six\n")
        install(site, "mod_ext", "1", [f"fast{EXTENSION}", "stable.abi3.so", "plain.so"])
        rootfs = listed(site)
        asked = ["PIL.Image", "PIL._imaging", "yaml", "_yaml", "six.moves", "fast", "stable", "plain"]

        assert [rootfs.distribution_of(name) for name in asked] == [
            *["pillow", "pillow", "pyyaml", "pyyaml", "six"],
            *["mod-ext"] * 3,
        ]
        assert rootfs.top_levels == {
            "mod-ext": ["fast", "plain", "stable"],
            "pillow": ["PIL"],
            "pyyaml": ["_yaml", "yaml"],
            "six": ["six"],
        }

    def test_extension_of_another_python_is_no_module(self, site: Path) -> None:
        """A file that this Python could not import is not taken for a module."""
        install(site, "old", "1", ["old/__init__.py", "legacy.cpython-27m-x86_64-linux-gnu.so"])

        assert listed(site).distribution_of("legacy") is None

    def test_standard_library_belongs_to_nobody(self, site: Path) -> None:
        """Neither by name nor by file, even where a distribution is called as a module is."""
        install(site, "json", "1", ["json/__init__.py"])
        rootfs = listed(site)

        assert rootfs.distribution_of("json.decoder") is None
        assert rootfs.distribution_of("json.decoder", json.decoder.__file__) is None
        assert rootfs.distribution_of("sys") is None

    def test_vendored_package_belongs_to_the_vendor(self, site: Path) -> None:
        """`pip._vendor.requests` is pip's, whoever owns `requests`."""
        install(site, "pip", "24", ["pip/__init__.py", "pip/_vendor/requests/__init__.py"])
        install(site, "requests", "2", ["requests/__init__.py"])
        rootfs = listed(site)

        assert rootfs.distribution_of("pip._vendor.requests.api") == "pip"
        assert rootfs.distribution_of("requests.api") == "requests"

    def test_file_is_found_through_links(self, site: Path) -> None:
        """`lib64` is often a link to `lib`: the file is the same."""
        install(site, "demo", "1", ["demo/__init__.py"])
        (site.parents[2] / "lib64").symlink_to("lib")
        rootfs = listed(site)
        file = str(site / "demo/__init__.py").replace("/lib/", "/lib64/")

        assert rootfs.distribution_of("demo", file) == "demo"

    def test_file_is_found_where_the_root_filesystem_is_mounted_elsewhere(self, site: Path) -> None:
        """Inside a sandbox the same file has another folder before it."""
        install(site, "demo", "1", ["demo/sub/__init__.py"])

        assert listed(site).distribution_of("demo.sub", "/usr/lib/python3/demo/sub/__init__.py") == "demo"

    def test_folder_without_init_inside_a_package_belongs_to_the_package(self, site: Path) -> None:
        """`numpy.doc` has no `__init__.py`, and is numpy's all the same."""
        install(site, "numpy", "2", ["numpy/__init__.py", "numpy/doc/ufuncs.py"])
        rootfs = listed(site)

        assert rootfs.distribution_of("numpy.doc") == "numpy"
        assert not rootfs.is_namespace("numpy.doc")

    def test_tests_and_project_folders_are_no_own_names(self, site: Path) -> None:
        """Test packages, and folders such as `docs` that were installed by mistake, are left out of what is imported."""
        files = ["tool/__init__.py", "tool/tests/__init__.py", "tests/__init__.py", "test_tool.py", "docs/conf.py"]
        install(site, "tool", "1", files)
        rootfs = listed(site)

        assert rootfs.top_levels == {"tool": ["tool"]}
        assert rootfs.distribution_of("tests") == "tool"


class TestWithoutRecord:
    """Where there is no RECORD: top_level.txt, else the module that is called as the distribution is."""

    def test_top_level_names_count(self, site: Path) -> None:
        """Names in top_level.txt belong to their distribution, with all below them."""
        install(site, "Deb_Pkg", "1", ["debpkg/__init__.py"], top_level="debpkg\n", record=False)
        rootfs = listed(site)

        assert rootfs.distribution_of("debpkg.sub") == "deb-pkg"
        assert rootfs.distribution_of("debpkg.sub", str(site / "debpkg/sub.py")) == "deb-pkg"
        assert rootfs.top_levels == {"deb-pkg": ["debpkg"]}

    def test_module_of_the_same_name_counts(self, site: Path) -> None:
        """Without top_level.txt too, a module with the distribution's name is taken as its own."""
        install(site, "some-thing", "1", ["some_thing.py"], record=False)
        rootfs = listed(site)

        assert rootfs.distribution_of("some_thing") == "some-thing"
        assert rootfs.top_levels == {"some-thing": ["some_thing"]}

    def test_namespace_is_divided_by_the_names_of_distributions(self, site: Path) -> None:
        """Several that list no files and name the same namespace have what is called as they are."""
        for name in ("zope.event", "zope.interface"):
            install(site, name, "1", [name.replace(".", "/") + "/__init__.py"], top_level="zope\n", record=False)
        write(site / "zope/other/__init__.py")
        rootfs = listed(site)

        asked = ["zope.event", "zope.interface.verify", "zope.other", "zope"]
        assert [rootfs.distribution_of(name) for name in asked] == ["zope-event", "zope-interface", None, None]
        assert rootfs.top_levels == {"zope-event": ["zope.event"], "zope-interface": ["zope.interface"]}

    def test_top_level_txt_of_a_distribution_with_record_comes_last(self, site: Path) -> None:
        """A RECORD that has nothing of a name says more than the top_level.txt beside it."""
        install(site, "aaa", "1", ["aaa.py"], top_level="aaa\nshared\n")
        install(site, "bbb", "1", ["shared/__init__.py"], top_level="shared\n", record=False)

        assert listed(site).distribution_of("shared.part") == "bbb"

    def test_record_that_is_no_csv_is_read_as_far_as_it_goes(self, site: Path) -> None:
        """A field longer than the reader takes, or a NUL, spoils no other line."""
        install(site, "odd", "1", ["odd.py"])
        with (site / "odd-1.dist-info/RECORD").open("a") as file:
            file.write('"' + "x" * 200_000 + '",,\nnul\0.py,,\n')

        assert listed(site).distribution_of("odd") == "odd"

    def test_distribution_with_nothing_to_import_is_reported(self, site: Path) -> None:
        """It is installed, and a warning says that nothing of it can be imported."""
        install(site, "mystery", "1", record=False)
        rootfs = listed(site)

        assert rootfs.distributions == {"mystery": "1"}
        assert rootfs.warnings == ("1 distribution with no list of files, and nothing to import: mystery",)

    def test_egg_info_counts(self, site: Path) -> None:
        """The older metadata is read: a folder with installed-files.txt, and a single file."""
        write(site / "egg/__init__.py")
        write(site / "Egg-2.egg-info/PKG-INFO", "Metadata-Version: 1.0\nName: Egg\nVersion: 2\n")
        write(site / "Egg-2.egg-info/installed-files.txt", "../egg/__init__.py\nPKG-INFO\n")
        write(site / "flat.py")
        write(site / "flat-3.egg-info", "Metadata-Version: 1.0\nName: flat\nVersion: 3\n")
        rootfs = listed(site)

        assert rootfs.distributions == {"egg": "2", "flat": "3"}
        assert (rootfs.distribution_of("egg"), rootfs.distribution_of("flat")) == ("egg", "flat")


class TestEditableInstalls:
    """An editable install leaves its code where it is; path files say where."""

    def test_install_by_a_real_build_backend_is_followed(self, site: Path, tmp_path: Path) -> None:
        """A `.pth` file that hatchling wrote leads to the project's packages; its scripts are no own names."""
        project = tmp_path / "project"
        write(project / "src/my_pkg/__init__.py")
        write(project / "src/my_pkg/deep.py")
        write(project / "src/noxfile.py")
        write(
            project / "pyproject.toml",
            '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
            '[project]\nname = "My.Pkg"\nversion = "1.0"\n[tool.hatch.build.targets.wheel]\npackages = ["src/my_pkg"]\n',
        )
        build = "import sys, hatchling.build; print(hatchling.build.build_editable(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=project, check=True, stdout=subprocess.PIPE)
        (wheel,) = tmp_path.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(site)
        rootfs = listed(site)

        assert rootfs.distributions == {"my-pkg": "1.0"}
        assert rootfs.top_levels == {"my-pkg": ["my_pkg"]}
        assert rootfs.distribution_of("my_pkg.deep") == "my-pkg"
        assert rootfs.distribution_of("my_pkg.deep", str(project / "src/my_pkg/deep.py")) == "my-pkg"

    def test_finder_module_is_read(self, site: Path, tmp_path: Path) -> None:
        """The mapping in setuptools' `__editable___…_finder.py` is followed; its namespace is shared."""
        write(tmp_path / "src/my_pkg/__init__.py")
        write(tmp_path / "flat/ns_x/inner/__init__.py")
        finder = "__editable___my_pkg_1_0_finder.py"
        install(site, "My.Pkg", "1.0", [finder, "__editable__.my_pkg-1.0.pth"], top_level="my_pkg\nns_x\n")
        mapping = {"my_pkg": str(tmp_path / "src/my_pkg"), "ns_x.inner": str(tmp_path / "flat/ns_x/inner")}
        write(
            site / finder, f"MAPPING: dict[str, str] = {mapping!r}\nNAMESPACES: dict[str, list[str]] = {{'ns_x': []}}\n"
        )
        write(site / "__editable__.my_pkg-1.0.pth", "import sys\n")
        rootfs = listed(site)

        assert rootfs.top_levels == {"my-pkg": ["my_pkg", "ns_x.inner"]}
        asked = ["my_pkg.deep", "ns_x.inner.y", "ns_x.other", "ns_x"]
        assert [rootfs.distribution_of(name) for name in asked] == ["my-pkg", "my-pkg", None, None]
        assert rootfs.is_namespace("ns_x")
        assert rootfs.distribution_of("ns_x.inner.y", str(tmp_path / "flat/ns_x/inner/y.py")) == "my-pkg"

    def test_setup_py_develop_is_followed(self, site: Path, tmp_path: Path) -> None:
        """An `.egg-link` and `easy-install.pth` lead to a folder with code, scripts and metadata; its namespace is shared."""
        project = tmp_path / "project" / "src"
        write(project / "ns/mine/__init__.py")
        write(project / "setup.py", "raise SystemExit")
        write(project / "My_Dev.egg-info/PKG-INFO", "Metadata-Version: 1.0\nName: My-Dev\nVersion: 3\n")
        write(project / "My_Dev.egg-info/top_level.txt", "ns\n")
        write(site / "My-Dev.egg-link", f"{project}\n.")
        write(site / "easy-install.pth", f"{project}\n")
        install(site, "other", "1", ["ns/other.py"])
        rootfs = listed(site)

        assert rootfs.distributions == {"my-dev": "3", "other": "1"}
        assert rootfs.top_levels == {"my-dev": ["ns.mine"], "other": ["ns.other"]}
        assert rootfs.distribution_of("ns.mine.deep", str(project / "ns/mine/deep.py")) == "my-dev"
        asked = ["ns.mine.deep", "ns.other", "ns"]
        assert [rootfs.distribution_of(name) for name in asked] == ["my-dev", "other", None]

    @pytest.mark.parametrize("zipped", [False, True])
    def test_egg_is_found(self, site: Path, zipped: bool) -> None:
        """A folder or an archive on the module path that brings its own metadata."""
        egg = site / "Old_Egg-2-py3.11.egg"
        content = {"oldegg/__init__.py": "", "EGG-INFO/top_level.txt": "oldegg\n"}
        content["EGG-INFO/PKG-INFO"] = "Metadata-Version: 1.0\nName: Old-Egg\nVersion: 2\n"
        if zipped:
            with zipfile.ZipFile(egg, "w") as archive:
                for name, text in content.items():
                    archive.writestr(name, text)
        else:
            for name, text in content.items():
                write(egg / name, text)
        write(site / "easy-install.pth", f"./{egg.name}\n")
        rootfs = listed(site)

        assert rootfs.distributions == {"old-egg": "2"}
        assert rootfs.top_levels == {"old-egg": ["oldegg"]}
        assert rootfs.distribution_of("oldegg.part", str(egg / "oldegg/part.py")) == "old-egg"
        assert rootfs.distribution_of("oldegg.part") == "old-egg"

    def test_mapping_of_every_module_has_one_root(self, site: Path, tmp_path: Path) -> None:
        """Some build backends map each file: only the package around them is an own name."""
        write(tmp_path / "src/skb/__init__.py")
        write(tmp_path / "src/skb/part.py")
        install(site, "skb", "1", ["_skb_editable.py", "_skb_editable.pth"])
        mapping = {"skb": str(tmp_path / "src/skb/__init__.py"), "skb.part": str(tmp_path / "src/skb/part.py")}
        write(site / "_skb_editable.py", f"install({mapping!r})\n")
        rootfs = listed(site)

        assert rootfs.top_levels == {"skb": ["skb"]}
        assert rootfs.distribution_of("skb.part", str(tmp_path / "src/skb/part.py")) == "skb"

    def test_loader_that_says_nothing_leaves_the_project(self, site: Path, tmp_path: Path) -> None:
        """Where only direct_url.json leads to the code, the package called as the distribution is its own."""
        write(tmp_path / "project/src/some_thing/__init__.py")
        install(site, "some-thing", "1", ["_some_thing_editable_loader.py"])
        url = {"url": (tmp_path / "project").as_uri(), "dir_info": {"editable": True}}
        write(site / "some-thing-1.dist-info/direct_url.json", json.dumps(url))
        rootfs = listed(site)

        file = tmp_path / "project/src/some_thing/part.py"
        assert rootfs.distribution_of("some_thing.part", str(file)) == "some-thing"
        assert rootfs.distribution_of("some_thing.part") == "some-thing"
        assert rootfs.top_levels == {"some-thing": ["some_thing"]}

    def test_project_folder_counts_and_the_environment_inside_it_does_not(self, tmp_path: Path) -> None:
        """direct_url.json names the project; a root filesystem inside that folder is not the project's code."""
        site = make_rootfs(tmp_path / "project" / ".venv")
        install(site, "project", "1")
        url = {"url": (tmp_path / "project").as_uri(), "dir_info": {"editable": True}}
        write(site / "project-1.dist-info/direct_url.json", json.dumps(url))
        rootfs = listed(site)

        assert rootfs.distribution_of("anything", str(tmp_path / "project/lib/anything.py")) == "project"
        assert rootfs.distribution_of("stray", str(site / "stray.py")) is None


class TestMetadata:
    """Leftover, duplicate and unnamed metadata (K07), versions, and files that two distributions own."""

    @pytest.mark.parametrize("order", [1, -1])
    def test_leftovers_are_not_installed(self, site: Path, order: int) -> None:
        """Folders without a name are left out and counted; the whole one counts, whatever the order of folders."""

        def whole() -> None:
            install(site, "torch", "1.13.1", ["torch/__init__.py"])

        def leftover() -> None:
            write(site / "torch-1.12.1.dist-info/REQUESTED")
            (site / "ghost-1.12.dist-info").mkdir()
            (site / ".dist-info").mkdir()
            write(site / "noname-1.dist-info/METADATA", "Name:")

        for step in (whole, leftover)[::order]:
            step()
        rootfs = listed(site)

        assert rootfs.distributions == {"torch": "1.13.1"}
        names = ".dist-info, ghost-1.12.dist-info, noname-1.dist-info, torch-1.12.1.dist-info"
        assert rootfs.warnings == (f"4 metadata folders left out, without a name or left over: {names}",)
        assert rootfs.distribution_of("torch") == "torch"

    @pytest.mark.parametrize("leftover", ["~orch-2.0.dist-info", "-orch-2.0.dist-info"])
    def test_what_pip_was_removing_is_not_installed(self, site: Path, leftover: str) -> None:
        """Whole metadata of a higher version, renamed for its removal, changes nothing but the warning."""
        install(site, "torch", "1.0", ["torch/__init__.py"])
        write(site / leftover / "METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.0\n")
        rootfs = listed(site)

        assert rootfs.distributions == {"torch": "1.0"}
        assert rootfs.warnings == (f"1 metadata folder left out, without a name or left over: {leftover}",)

    def test_of_twins_the_one_that_has_files_counts(self, site: Path) -> None:
        """Metadata of a higher version whose files are gone is no installation."""
        install(site, "twin", "1.0", ["twin.py"])
        install(site, "twin", "2.0", record=False)

        assert listed(site).distributions == {"twin": "1.0"}

    def test_version_that_cannot_be_printed_is_none(self, site: Path) -> None:
        """It could stand in no catalogue."""
        install(site, "nul", "1", ["nul.py"])
        write(site / "nul-1.dist-info/METADATA", "Name: nul\nVersion: 1\0\n")

        assert listed(site).distributions == {"nul": ""}

    @pytest.mark.parametrize("versions", [("1.9", "1.10"), ("1.10", "1.9")])
    def test_duplicates_get_a_fixed_choice(self, site: Path, versions: Sequence[str]) -> None:
        """Of two whole folders the higher version counts, in either order of creation, with a warning."""
        for version in versions:
            install(site, "dup", version, ["dup/__init__.py"])
        rootfs = listed(site)

        assert rootfs.distributions == {"dup": "1.10"}
        assert rootfs.warnings == ("dup is there 2 times (dup-1.10.dist-info, dup-1.9.dist-info): taken as 1.10",)

    @pytest.mark.parametrize(
        "names", [("opencv-python", "opencv_python_headless"), ("opencv_python_headless", "opencv-python")]
    )
    def test_two_owners_of_one_file_get_a_fixed_choice(self, site: Path, names: Sequence[str]) -> None:
        """A file that two distributions own counts as the first one's by name, with one warning for the pair."""
        for name in names:
            install(site, name, "4.9", ["cv2/__init__.py", "cv2/data.py"])
        rootfs = listed(site)

        assert rootfs.distribution_of("cv2.data") == "opencv-python"
        assert rootfs.top_levels == {"opencv-python": ["cv2"], "opencv-python-headless": []}
        (warning,) = rootfs.warnings
        assert warning.startswith("opencv-python and opencv-python-headless own 2 module files, such as")
        assert warning.endswith(f"{site}/cv2/__init__.py: taken as opencv-python's")

    def test_recorded_files_that_are_gone_are_not_owned(self, site: Path) -> None:
        """A RECORD that an interrupted upgrade left does not claim what is there no more."""
        install(site, "aaa", "1", ["shared.py"])
        (site / "shared.py").unlink()

        assert listed(site).distribution_of("shared") is None

    def test_names_are_canonical_and_versions_as_installed(self, site: Path) -> None:
        """Case and `-_.` do not matter in names; a version is kept as it is written, and may be missing."""
        install(site, "Ruamel.Yaml_X", "1.0+local.1", ["a.py"])
        install(site, "legacy", "2004d-unknown", ["b.py"])
        install(site, "bare", None, ["c.py"])
        rootfs = listed(site)

        assert rootfs.distributions == {"bare": "", "legacy": "2004d-unknown", "ruamel-yaml-x": "1.0+local.1"}
        assert rootfs.warnings == ("1 distribution without a version: bare",)

    def test_metadata_that_is_not_utf_8_is_read(self, site: Path) -> None:
        """Old metadata in Latin-1 still has its name and version."""
        install(site, "old", "1", ["old.py"])
        (site / "old-1.dist-info/METADATA").write_bytes("Author: Zoë\nName: old\nVersion: 1\n".encode("latin-1"))

        assert listed(site).distributions == {"old": "1"}


class TestListing:
    """The root filesystem's own Python is asked; where it cannot answer, the error says why."""

    def test_talk_at_start_does_not_spoil_the_listing(self, site: Path) -> None:
        """What path files print goes nowhere; the listing comes back in a file of its own."""
        install(site, "demo", "1", ["demo.py"])
        write(site / "noise.pth", "import sys; sys.stdout.write('{}'); sys.stderr.write('noise')\n")

        assert listed(site).distributions == {"demo": "1"}

    def test_listing_leaves_no_trace(self, site: Path) -> None:
        """Nothing is written into the root filesystem, byte code included."""
        install(site, "demo", "1", ["demo.py"])
        before = sorted(site.parents[2].rglob("*"))
        listed(site)

        assert sorted(site.parents[2].rglob("*")) == before

    def test_python_is_the_root_filesystems(self, site: Path) -> None:
        """The version is of the Python that was asked."""
        assert listed(site).python == sys.version.split()[0]

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            (
                "#!/bin/sh\necho 'cannot open shared object' >&2; exit 127\n",
                "ended with 127: cannot open shared object",
            ),
            ("#!/bin/sh\nexit 0\n", "its Python wrote no listing"),
            ("#!/bin/sh\necho '[1' > $4\n", "its Python wrote no listing"),
            ("#!/bin/sh\necho '{}' > $4\n", "its Python wrote no listing"),
            ("#!/nowhere/python\n", "cannot run: No such file or directory"),
            ("\x7fELF", "cannot run: Exec format error"),
            ("#!/bin/sh\nsleep 60 & sleep 60\n", "took more than 0.2 s"),
        ],
    )
    def test_python_that_does_not_answer_is_a_clear_error(self, tmp_path: Path, script: str, reason: str) -> None:
        """A Python that fails, says nothing, cannot start or hangs is named with the reason."""
        write(tmp_path / "bin/python", script)
        (tmp_path / "bin/python").chmod(0o755)

        with pytest.raises(RootfsUnreadable, match=reason) as caught:
            list_rootfs(tmp_path, timeout=0.2 if "sleep" in script else 30)
        assert str(tmp_path) in caught.value.detail

    def test_folder_without_python_is_a_clear_error(self, tmp_path: Path) -> None:
        """So are a folder without bin/python, and no folder at all."""
        with pytest.raises(RootfsUnreadable, match="it has no bin/python"):
            list_rootfs(tmp_path)
        with pytest.raises(RootfsUnreadable, match="no such folder"):
            list_rootfs(tmp_path / "missing")

    def test_this_environment_is_resolved(self) -> None:
        """In the environment that runs the tests, real modules go to their distributions."""
        rootfs = list_rootfs(Path(sys.prefix))

        import duckdb
        import rich.console

        assert rootfs.distribution_of("duckdb", duckdb.__file__) == "duckdb"
        assert rootfs.distribution_of("rich.console", rich.console.__file__) == "rich"
        assert rootfs.distribution_of("numpy.linalg.norm") == "numpy"
        assert rootfs.distribution_of("markdown_it") == "markdown-it-py"


def item(
    key: str, distribution: str = "kept", needs: Iterable[str] = (), kind: ResourceType = "package"
) -> MeasuredItem:
    return MeasuredItem(
        key=key,
        seconds=0.1,
        size_mb=1.0,
        resource_type=kind,
        distribution="" if kind != "package" else distribution,
        dependencies=frozenset(needs),
    )


def items(*all_items: MeasuredItem) -> dict[str, MeasuredItem]:
    return {each.key: each for each in all_items}


class TestFilter:
    """Only measured items whose distribution the root filesystem has are carried over, edges contracted."""

    def test_items_of_absent_distributions_are_dropped_and_counted(self, site: Path) -> None:
        """Dropped items go with one counted warning; what they pulled in, their dependents keep."""
        install(site, "kept", "1", ["a.py"])
        measured = items(
            item("a", needs=["gone", "b"]),
            item("gone", "absent", needs=["gone.x", "c"]),
            item("gone.x", "absent", needs=["d", "a"]),
            *(item(key) for key in "bcd"),
        )
        filtered = filter_measured(measured, listed(site))

        assert {key: sorted(kept.dependencies) for key, kept in filtered.items.items()} == {
            "a": ["b", "c", "d"],
            "b": [],
            "c": [],
            "d": [],
        }
        assert filtered.warnings == (
            "2 measured items left out, of distributions that the root filesystem does not have: absent (2)",
        )

    def test_datasets_models_and_tokenizers_are_always_carried(self, site: Path) -> None:
        """They belong to no distribution; what they need of dropped items is contracted too."""
        install(site, "kept", "1", ["a.py"])
        measured = items(
            item("model:m", needs=["gone"], kind="model"),
            item("dataset:d", kind="dataset"),
            item("tokenizer:t", kind="tokenizer"),
            item("gone", "absent", needs=["a"]),
            item("a"),
        )
        filtered = filter_measured(measured, listed(site))

        assert sorted(filtered.items) == ["a", "dataset:d", "model:m", "tokenizer:t"]
        assert filtered.items["model:m"].dependencies == {"a"}

    def test_implied_parents_are_contracted(self, site: Path) -> None:
        """Importing `a.b` imports `a`: where `a` is dropped, `a.b` keeps what `a` needs."""
        install(site, "kept", "1", ["a.py"])
        measured = items(item("a", "absent", needs=["z"]), item("a.b"), item("z"))

        assert filter_measured(measured, listed(site)).items["a.b"].dependencies == {"z"}

    def test_packages_of_no_distribution_are_dropped(self, site: Path) -> None:
        """A package that nobody owns cannot be in a catalogue; it is counted by itself."""
        install(site, "kept", "1", ["a.py"])
        filtered = filter_measured(items(item("google", ""), item("a")), listed(site))

        assert list(filtered.items) == ["a"]
        assert filtered.warnings == ("1 measured item of no distribution left out: google",)

    def test_unlisted_root_filesystem_filters_nothing(self) -> None:
        """Where it cannot be listed, there is one warning, and every item stays as it is."""
        measured = items(item("a", "anything", needs=["b"]), item("b", ""))
        filtered = filter_measured(measured, None, "/rootfs: it has no bin/python")

        assert filtered.items == measured
        assert filtered.warnings == (
            "the root filesystem cannot be listed (/rootfs: it has no bin/python): nothing was filtered",
        )

    def test_plan_filters_against_the_root_filesystem_it_is_given(self, site: Path) -> None:
        """What was measured is carried over by what that one has; one that has no Python filters nothing, and says so."""
        install(site, "kept", "2", ["a.py"])
        head = Host("fork", "1", "3.11.7", 1, "f" * 64, "d" * 64, "c" * 64)
        info = MeasurementInfo(
            flavor=Flavor.CPU, host=head, memory_source="RssAnon", rootfs="/measured", repeats=1, roots=2
        )
        measured = Measurements(info, [item("a", needs=["gone"]), item("gone", "absent", needs=["b"]), item("b")], {})
        carried = carry_over(measured, site.parents[2])
        unfiltered = carry_over(measured, site)

        assert {each.key: set(each.dependencies) for each in carried.items} == {"a": {"b"}, "b": set()}
        assert carried.distributions == {"kept": "2"}
        assert [each.key for each in unfiltered.items] == ["a", "b", "gone"]
        assert unfiltered.warnings == [
            f"the root filesystem cannot be listed ({site}: it has no bin/python): nothing was filtered"
        ]

    @given(st.integers(0, 2**32))
    def test_contraction_keeps_what_is_reached(self, seed: int) -> None:
        """For random graphs with cycles: a kept item reaches exactly the kept items that it reached before."""
        chance = random.Random(seed)
        keys = [f"k{n}" for n in range(chance.randint(1, 9))]
        measured = items(*(item(key, needs=chance.sample(keys, chance.randint(0, min(3, len(keys))))) for key in keys))
        dropped = set(chance.sample(keys, chance.randint(0, len(keys))))
        contracted = contract_items(measured, dropped)

        assert contracted.keys() == measured.keys() - dropped
        for key in contracted:
            assert reached(contracted, key) == reached(measured, key) - dropped


def reached(graph: dict[str, MeasuredItem], key: str) -> set[str]:
    seen, waiting = {key}, [key]
    while waiting:
        new = graph[waiting.pop()].dependencies - seen
        seen |= new
        waiting += new
    return seen
