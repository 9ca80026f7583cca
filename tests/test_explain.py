"""Why this checkpoint (DESIGN §4): the whole ranking, with what is missing, what matched, and what is no option."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.markers import default_environment

from app import explain as explaining
from app import scoring
from app.catalogue import find_catalogue, import_catalogue
from app.database import Database
from app.explain import explain, explain_calls
from app.scoring import Answers
from app.tables import workers
from readie.errors import BadRequirement, UnknownCatalogue, UnknownCheckpoint
from readie.flavor import Flavor
from readie.wire import ExplainRequest, Explanation
from tests.catalogues import MODULES, documents, make_worked_example, read
from tests.test_scoring import add_worker, counted


@pytest.fixture(autouse=True)
def own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered yet."""
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was explained and priced before is asked for anew."""
    monkeypatch.setattr(explaining, "answers", Answers(10**6))
    monkeypatch.setattr(scoring, "prices", Answers(10**6))
    monkeypatch.setattr(scoring, "checkpoints", Answers(10**6))


class TestExplain:
    """The whole ranking, with what matched, what is missing, and what is no option and why."""

    def test_every_option_is_listed_cheapest_first_with_its_terms(self, database: Database) -> None:
        """Size and missing seconds add up to the total; the winner's missing items are named."""
        catalogue = read(make_worked_example())
        import_catalogue(database, catalogue)
        explanation = self._explain(database, modules=["pandas.core", "nothing"], items_of="A")

        assert explanation.catalogue == catalogue.sha256
        assert explanation.generation == catalogue.generation
        assert [(found.module, found.item) for found in explanation.matches] == [
            ("pandas.core", "pandas"),
            ("nothing", None),
        ]
        assert [
            (option.checkpoint_id, option.size, option.missing, option.total) for option in explanation.options
        ] == [
            ("B", 0.48, 0.0, 0.48),
            ("A", 0.042, 0.5, 0.542),
            (None, 0.0, 0.7, 0.7),
            ("C", 1.2, 0.0, 1.2),
        ]
        itemised = {
            option.checkpoint_id: [(item.item, item.seconds) for item in option.items]
            for option in explanation.options
            if option.items is not None
        }
        assert itemised == {"B": [], "A": [("pandas", 0.5)]}

    def test_items_of_the_cold_start_are_all_that_is_needed(self, database: Database) -> None:
        """`cold` names the cold start; the most expensive item comes first."""
        import_catalogue(database, read(make_worked_example()))
        explanation = self._explain(database, modules=["pandas"], items_of="cold")
        cold = next(option for option in explanation.options if option.checkpoint_id is None)

        assert [(item.item, item.seconds) for item in cold.items or []] == [("pandas", 0.5), ("numpy", 0.2)]

    def test_what_is_no_option_comes_last_and_says_why(self, database: Database) -> None:
        """Too large for the budget; holding a distribution that is installed anew."""
        document = make_worked_example()
        document["distributions"] = {"dist": "1.0", "torch": "2.1"}
        document["items"]["torch"]["distribution"] = "torch"
        import_catalogue(database, read(document))
        explanation = self._explain(database, modules=["pandas"], memory=50_000_000, packages=["Torch<2", "dist"])

        reasons = {option.checkpoint_id: option.excluded for option in explanation.options}
        assert list(reasons) == ["A", None, "B", "C"]
        assert reasons["A"] is reasons[None] is None
        assert reasons["B"] == "needs 80000000 bytes, more than the budget of 50000000"
        assert reasons["C"] == "holds modules of torch, which is installed anew: the loaded ones would win"
        assert [kept.installed for kept in explanation.kept] == ["2.1"]
        assert [(skipped.requirement, skipped.installed) for skipped in explanation.skipped] == [("dist", "1.0")]

    def test_markers_are_those_of_a_worker_of_the_flavor(self, database: Database) -> None:
        """A requirement whose marker is false on the workers is not kept."""
        import_catalogue(database, read(make_worked_example()))
        requirement = "tomli>=2; python_version < '3.11'"
        assert self._explain(database, modules=[], packages=[requirement]).kept == []
        with database.transaction() as connection:
            add_worker(connection, {}, markers='{"python_version": "3.10"}')

        assert len(self._explain(database, modules=[], packages=[requirement]).kept) == 1

    def test_a_catalogue_can_be_named_that_is_not_active(self, database: Database) -> None:
        """Its SHA-256 says which, and its flavor is the answer's."""
        catalogue = read(make_worked_example(flavor="gpu"))
        import_catalogue(database, catalogue)
        import_catalogue(database, read(make_worked_example(0.02, flavor="gpu")))
        explanation = self._explain(database, modules=["pandas"], catalogue=catalogue.sha256)

        assert (explanation.flavor, explanation.options[0].checkpoint_id) == (Flavor.GPU, "B")

    def test_a_flavor_without_a_catalogue_has_the_cold_start_only(self, database: Database) -> None:
        """Nothing matches, nothing is priced."""
        explanation = self._explain(database, modules=["numpy"], packages=["numpy"])

        assert explanation.catalogue is None
        assert [(option.checkpoint_id, option.total_ns) for option in explanation.options] == [(None, 0)]
        assert [found.item for found in explanation.matches] == [None]
        assert [kept.requirement for kept in explanation.kept] == ["numpy"]

    @pytest.mark.parametrize(
        ("fields", "problem"),
        [
            ({"catalogue": "0" * 64}, UnknownCatalogue),
            ({"items_of": "checkpoint_9"}, UnknownCheckpoint),
            ({"packages": ["numpy =="]}, BadRequirement),
        ],
    )
    def test_what_is_not_there_is_named(
        self, database: Database, fields: dict[str, Any], problem: type[Exception]
    ) -> None:
        """An unknown catalogue, an unknown checkpoint, a malformed requirement."""
        import_catalogue(database, read(make_worked_example()))
        with pytest.raises(problem):
            self._explain(database, modules=["numpy"], **fields)

    def _explain(self, database: Database, **fields: Any) -> Explanation:
        with database.reading() as connection:
            return explain(connection, ExplainRequest(**fields))


class TestRemembered:
    """What was explained is kept: a catalogue never changes, and what is another question is asked anew."""

    def test_the_second_time_only_the_active_catalogue_is_asked_for(self, database: Database) -> None:
        """One statement, the same answer."""
        import_catalogue(database, read(make_worked_example()))
        first = self._explain(database)
        with counted(database) as executed:
            assert self._explain(database) == first

        assert len(executed) == 1

    def test_another_catalogue_is_another_question(self, database: Database) -> None:
        """The answer after a switch is that of the new one, and after the next switch that of the old one again."""
        documents = [make_worked_example(), make_worked_example(alpha=0.02)]
        totals = []
        for document in documents * 2:
            import_catalogue(database, read(document))
            totals.append(self._explain(database).options[0].total)

        assert totals == [0.48, 0.64] * 2

    def test_whatever_is_asked_counts(self, database: Database) -> None:
        """Modules, budget and listed items."""
        import_catalogue(database, read(make_worked_example()))
        asked: list[dict[str, Any]] = [{}, {"modules": ["numpy"]}, {"memory": 50_000_000}, {"items_of": "cold"}]
        first = [self._explain(database, **fields) for fields in asked]

        assert len(set(map(str, first))) == len(asked)
        assert [self._explain(database, **fields) for fields in asked] == first

    def test_packages_are_looked_at_each_time(self, database: Database) -> None:
        """A worker that has come since may say otherwise about a marker."""
        import_catalogue(database, read(make_worked_example()))
        packages = ["other; python_version < '3'"]
        with database.transaction() as connection:
            worker_id = add_worker(connection, {}, markers=json.dumps(default_environment()))
        assert self._explain(database, packages=packages).kept == []
        with database.transaction() as connection:
            connection.execute(workers.delete().where(workers.c.worker_id == worker_id))
            add_worker(connection, {}, markers=json.dumps(default_environment() | {"python_version": "2.7"}))

        assert len(self._explain(database, packages=packages).kept) == 1

    def _explain(self, database: Database, **fields: Any) -> Explanation:
        with database.reading() as connection:
            return explain(connection, ExplainRequest(**{"modules": ["pandas"]} | fields))


class TestTogether:
    """Requests that come together are answered together."""

    @settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(data=st.data())
    def test_each_gets_what_it_gets_alone(
        self, database: Database, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
    ) -> None:
        """By two catalogues, with budgets and listed items, some asked twice."""
        imported = []
        for document in [data.draw(documents()) for _ in range(2)]:
            catalogue = read(document)
            import_catalogue(database, catalogue)
            imported.append(catalogue.sha256)
        request = st.builds(
            ExplainRequest,
            modules=st.lists(st.sampled_from(MODULES), max_size=4),
            catalogue=st.sampled_from([None, *imported]),
            memory=st.sampled_from([None, 10**6, 10**9]),
            items_of=st.sampled_from([None, "cold"]),
        )
        requests = data.draw(st.lists(request, min_size=1, max_size=6))
        with database.reading() as connection:  # one of an earlier example may be too old to stay
            gone = {sha256 for sha256 in imported if not find_catalogue(connection, sha256)}
        requests = [
            msgspec.structs.replace(each, catalogue=None) if each.catalogue in gone else each for each in requests
        ]
        forget(monkeypatch)
        with database.reading() as connection:
            together = explain_calls(connection, requests)
            forget(monkeypatch)
            assert together == [explain(connection, request) for request in requests]

    def test_their_number_does_not_count(self, database: Database) -> None:
        """As many statements for 20 as for two."""
        import_catalogue(database, read(make_worked_example()))
        executed = []
        for first, last in [(0, 2), (2, 22)]:
            requests = [ExplainRequest(modules=["pandas", f"other{number}"]) for number in range(first, last)]
            with counted(database) as statements, database.reading() as connection:
                explain_calls(connection, requests)
            executed.append([each for each in statements if "checkpoints" not in each])

        assert len(executed[0]) == len(executed[1])
