"""How the requests of an engine ended."""

from __future__ import annotations

from penstock.engine.engine import Engine
from penstock.request import Failed, Finished, Output


def run_all(engine: Engine) -> tuple[dict[int, Exception], dict[int, Output]]:
    """(why some failed, what finished) when nothing is left to do."""
    failed: dict[int, Exception] = {}
    finished: dict[int, Output] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Failed):
                failed[event.request_id] = event.error
            elif isinstance(event, Finished):
                finished[event.request_id] = event.output
    return failed, finished
