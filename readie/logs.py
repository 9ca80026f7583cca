"""Logs of router and worker on stderr: lines for people, or one JSON object a line. Stdout is for results."""

import logging
import os
import re
import sys
from typing import Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogFormat = Literal["text", "json"]

_DETAIL = re.compile(r"\nDETAIL: .*")


def log_to_stderr(level: int, log_format: LogFormat = "text") -> None:
    """Sends the logs of this process, and the warnings of its libraries, to stderr; each with its request's id."""
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        # plain: other tracebacks show the values of variables, and secrets may be among them
        structlog.processors.format_exc_info,
        _leave_rows_out,
    ]
    if log_format == "json":
        renderer: Processor = structlog.processors.JSONRenderer()
        logging.captureWarnings(capture=True)
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"),
            exception_formatter=structlog.dev.plain_traceback,
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *processors],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _leave_rows_out(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """PostgreSQL repeats the values of a row that it refuses, and payloads may be among them."""
    if "exception" in event:
        event["exception"] = _DETAIL.sub("", event["exception"])
    return event
