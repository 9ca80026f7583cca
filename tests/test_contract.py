"""The router keeps to its OpenAPI document: requests that it describes, and requests that it does not, get answers that
it describes. A real router process over each database, and requests made up by schemathesis.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from litestar.serialization import decode_json, encode_json
from schemathesis import Case, GenerationMode, Response
from schemathesis.specs.openapi import checks
from sqlalchemy import create_engine

from app.api import PROBLEM
from app.application import create_app
from app.database import Database
from app.settings import RouterSettings
from readie.errors import PREFIX, problems
from readie.wire import Problem
from tests.catalogues import make_worked_example
from tests.conftest import KINDS, Cluster
from tests.routers import ask, serving

#: Requests of each kind (described, and not) for each operation.
EXAMPLES = 12

NOWHERE = Database(create_engine("postgresql+psycopg://127.0.0.1:1/readie"))  # nobody asks it for anything
DOCUMENT: dict[str, Any] = decode_json(encode_json(create_app(RouterSettings(), NOWHERE).openapi_schema.to_schema()))
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {
    operation["operationId"]: SCHEMA[path][method]
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}


TOKEN = "token"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
STATUS = {"flavor": "cpu", "state": "ready", "python": "3.11.7", "runtime": "fork"}
CALL = {"payload": "", "python": "3.11", "session_id": "s"}


class Served(NamedTuple):
    """A router, and what its paths may name that is there."""

    url: str
    known: dict[str, str]


@pytest.fixture(scope="module", params=KINDS)
def router(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A router with a catalogue, a worker, a call and a session."""
    tokens = {"AUTH_TOKEN": TOKEN, "WORKER_TOKEN": TOKEN}
    patience = {"WORKER_TTL": "3600", "SESSION_WAIT_TIMEOUT": "0.01"}
    with ExitStack() as stack:
        database_url = f"duckdb:///{tmp_path_factory.mktemp('contract') / 'readie.duckdb'}"
        if request.param == "postgresql":
            cluster: Cluster = request.getfixturevalue("cluster")
            database_url = stack.enter_context(cluster.lend())
        _, url, _ = stack.enter_context(serving(DATABASE_URL=database_url, **patience, **tokens))
        ask("POST", f"{url}/v1/catalogues", json=make_worked_example(), headers=AUTHORIZED)
        ask("PUT", f"{url}/v1/workers/w", json=STATUS, headers=AUTHORIZED)
        placed = ask("POST", f"{url}/v1/calls", json=CALL, headers=AUTHORIZED).json()
        known = {"worker_id": "w", "session_id": "s", "flavor": "cpu", "key": "numpy", "checkpoint_id": "A"}
        known |= {"call_id": placed["call_id"], "placement_id": placed["placement"]["placement_id"]}
        yield Served(url, known)


def ask_nothing_that_takes_long(case: Case[Any]) -> None:
    """Long polls, and calls that wait for room, would take their time."""
    for asked, longest in ((case.query, {"wait": 0}), (case.body, {"queue_timeout": 0, "seconds": 1})):
        if isinstance(asked, dict):
            asked |= {name: most for name, most in longest.items() if type(asked.get(name)) in {int, float}}


def check_answer(case: Case[Any], answer: Response) -> None:
    """It is one that the document has for this operation; what is no success is a problem of the table."""
    case.validate_response(answer, checks=CHECKS)
    assert answer.status_code != 500, answer.text
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == [PROBLEM]
        problem = msgspec.json.decode(answer.content, type=Problem)
        assert problem.status == answer.status_code
        assert problem.type.removeprefix(PREFIX) in problems()


CHECKS = [
    checks.negative_data_rejection,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["described", "other"])
@pytest.mark.parametrize("operation_id", OPERATIONS)
def test_answers_are_those_of_the_document(router: Served, operation_id: str, mode: GenerationMode) -> None:
    """Whatever is asked, as the document describes it or not: never an error of the router itself."""
    operation = OPERATIONS[operation_id]

    @settings(
        max_examples=EXAMPLES,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode, headers=AUTHORIZED), named=st.booleans())
    def ask_and_check(case: Case[Any], named: bool) -> None:
        ask_nothing_that_takes_long(case)
        if named and mode is GenerationMode.POSITIVE:
            case.path_parameters |= {name: router.known[name] for name in case.path_parameters if name in router.known}
        check_answer(case, case.call(base_url=router.url, timeout=30))

    try:
        ask_and_check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # nothing can be wrong about it


def test_answers_to_requests_that_follow_from_one_another(router: Served) -> None:
    """What an answer names is asked for next: a call that was placed is read and cancelled, a session ended."""
    followed: list[str] = []

    class Story(SCHEMA.as_state_machine()):  # type: ignore[misc]
        def before_call(self, case: Case[Any]) -> None:
            ask_nothing_that_takes_long(case)

        def get_call_kwargs(self, case: Case[Any]) -> dict[str, Any]:
            return {"base_url": router.url, "headers": AUTHORIZED, "timeout": 30}

        def validate_response(self, response: Response, case: Case[Any], **_: Any) -> None:
            followed.append(case.operation.label)
            check_answer(case, response)

    Story.run(
        settings=settings(
            max_examples=8,
            stateful_step_count=6,
            database=None,
            derandomize=True,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
    )

    assert len(set(followed)) >= 5
