"""Logs: one JSON object a line, on standard error."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def write_json_lines(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, least in (("penstock", level), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(least)
