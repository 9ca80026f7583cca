"""What a clone of a checkpoint must renew: hooks that run in every sandbox after it was restored, before any call.

The executor renews what it knows (random numbers, keys, names of temporary files); a library that keeps something else
that no two processes may share says so where it makes it:

    import readie

    @readie.after_restore
    def renew() -> None:
        global CONNECTION_ID
        CONNECTION_ID = uuid.uuid4()

Inside a sandbox this module is part of what the executor brings along, so it needs the standard library alone.
"""

from collections.abc import Callable
from typing import TypeVar

Hook = TypeVar("Hook", bound=Callable[[], object])

HOOKS: list[Callable[[], object]] = []  # in the order in which they were given


def after_restore(hook: Hook) -> Hook:
    """Has `hook` called in every sandbox that is restored from a checkpoint of this process; returns it.

    Hooks run in the order in which they were given, without arguments. One that raises ends the sandbox before a call
    comes to it: the call starts cold instead. Elsewhere, and in cold sandboxes, nothing calls them.
    """
    HOOKS.append(hook)
    return hook
