"""Things that are done while requests run, between the same two steps each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from piecework.engine.outputs import Delta
from piecework.engine.request import Listener
from piecework.engine.service import Service

LIMIT = 120  # seconds, for a machine that has other things to do


@contextmanager
def asked_after(service: Service, then: Mapping[int, Callable[[], Any]]) -> Iterator[None]:
    """In the block `then[k]`, which asks for an order, has done so before the step behind delta k begins.

    Whoever reads deltas may be any number of steps late; the engine's thread, which tells them, waits. What
    was asked for has ended when the block has; its error is raised then.
    """
    submit, count = service.submit, itertools.count(1)
    asked: list[Future[Any]] = []

    def ordered() -> bool:
        return bool(service._intake._orders)

    with ThreadPoolExecutor(1) as pool:

        def watched(*prompt: Any, listener: Listener, **options: Any) -> str:
            def listen(delta: Delta) -> None:
                listener(delta)
                if (what := then.get(next(count))) is not None:
                    wait(asked, LIMIT)  # the one before may look at what it made
                    asked.append(pool.submit(what))
                    with service._intake._changed:
                        assert service._intake._changed.wait_for(ordered, LIMIT)

            return submit(*prompt, listener=listen, **options)

        service.submit = watched  # type: ignore[method-assign]
        try:
            yield
        finally:
            del service.submit
    for one in asked:
        one.result()
    assert len(asked) == len(then), "the requests ended before"
