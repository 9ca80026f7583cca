"""Wake-ups across routers: what one of them rings, the others ring too, by PostgreSQL's NOTIFY.

Transactions that notify are committed one at a time, under one lock of the whole server. So topics are gathered for some
milliseconds, and told in a transaction of their own. One that is lost costs whoever waits DATABASE_POLL seconds.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import structlog

from app.database import Database
from app.waiting import WakeUps
from readie.errors import DatabaseUnavailable

GATHER_SECONDS = 0.003
RETRY_SECONDS = 1.0  # while the database is away
STOP_SECONDS = 5.0  # they end with the process, if nothing comes from the database meanwhile
MOST_BYTES = 7_000  # of one notice; PostgreSQL carries less than 8,000

log = structlog.get_logger(__name__)


@contextmanager
def relaying(database: Database, wake_ups: WakeUps) -> Iterator[None]:
    """Has the routers of one database wake each other, while it lasts. Nothing to do where a single process has it."""
    if not database.is_shared:
        yield
        return
    origin = uuid4().hex
    told: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
    over = threading.Event()
    threads = [
        threading.Thread(target=_tell, args=[database, origin, told, over], name="tell", daemon=True),
        threading.Thread(target=_hear, args=[database, origin, wake_ups, over], name="hear", daemon=True),
    ]
    for thread in threads:
        thread.start()
    wake_ups.relay = told.put
    try:
        yield
    finally:
        wake_ups.relay = None
        over.set()
        told.put(())
        for thread in threads:
            thread.join(STOP_SECONDS)


def _tell(database: Database, origin: str, told: "queue.SimpleQueue[tuple[str, ...]]", over: threading.Event) -> None:
    while not over.is_set():
        topics = dict.fromkeys(told.get())
        over.wait(GATHER_SECONDS)
        while not told.empty():
            topics |= dict.fromkeys(told.get())
        try:
            # The last one may say nothing: this process hears it too, and so that it is over.
            database.notify(list(_notices(origin, topics)) or [origin])
        except DatabaseUnavailable:  # those who hear look into it once it is back
            over.wait(RETRY_SECONDS)
        except Exception:  # a thread that has ended would tell nothing any more
            log.exception("other routers are not told")
            over.wait(RETRY_SECONDS)


def _notices(origin: str, topics: dict[str, None]) -> Iterator[str]:
    """Topics in notices, each with the router that tells them."""
    notice = origin
    for topic in topics:
        if len(notice) + len(topic) > MOST_BYTES:
            yield notice
            notice = origin
        notice += f"\n{topic}"
    if notice != origin:
        yield notice


def _hear(database: Database, origin: str, wake_ups: WakeUps, over: threading.Event) -> None:
    while not over.is_set():
        try:
            for notice in database.notices():
                if over.is_set():
                    return
                if notice is None:  # nobody was listening before
                    wake_ups.ring_all()
                elif notice:
                    teller, *topics = notice.split("\n")
                    if teller != origin:
                        wake_ups.hear(*topics)
        except DatabaseUnavailable as error:
            log.warning("other routers are not heard", reason=error.detail)
            over.wait(RETRY_SECONDS)
        except Exception:
            log.exception("other routers are not heard")
            over.wait(RETRY_SECONDS)
