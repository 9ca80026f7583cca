"""Keys of calls: a client that does not know whether its call was placed sends it again, and it is placed once.

The header is that of the IETF's draft "The Idempotency-Key HTTP Header Field". The answer to the first request is kept
with the key; who refuses a call keeps nothing, so that it may be sent again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec
from sqlalchemy import Connection

from app.rows import write_rows
from app.sql import statement
from readie.errors import KeyReused, ReadieError
from readie.wire import CallPlaced, CallRequest


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A call that is to be placed: the id that it gets, what it asks for, and the client's key for it."""

    call_id: str
    request: CallRequest
    key: str | None = None

    @property
    def sha256(self) -> str:
        """Of the request, whichever way it was encoded."""
        return sha256(msgspec.msgpack.encode(self.request)).hexdigest()


def answer_again(connection: Connection, asked: Mapping[int, Asked]) -> dict[int, CallPlaced | ReadieError]:
    """The answers to those whose key has come before: as then, or `KeyReused` where it came with another request.

    The caller holds `PLACEMENTS`.
    """
    keys = {"call_keys": [each.key for each in asked.values() if each.key is not None]}
    if not keys["call_keys"]:
        return {}
    known = {row.call_key: row for row in connection.execute(statement("answers_to_keys"), keys)}
    return {
        number: msgspec.msgpack.decode(known[each.key].answer, type=CallPlaced)
        if known[each.key].request_sha256 == each.sha256
        else KeyReused(f"{each.key} came before, with another call")
        for number, each in asked.items()
        if each.key in known
    }


def remember_answers(connection: Connection, answered: Sequence[tuple[Asked, CallPlaced | ReadieError]]) -> None:
    """Keeps the answers to calls that have a key and were placed."""
    rows = [
        {
            "call_key": asked.key,
            "call_id": answer.call_id,
            "request_sha256": asked.sha256,
            "answer": msgspec.msgpack.encode(answer),
        }
        for asked, answer in answered
        if asked.key is not None and isinstance(answer, CallPlaced)
    ]
    write_rows(connection, "insert_call_keys", rows)
