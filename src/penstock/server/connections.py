"""Connections: how many there may be, and how long each may be silent. What asks nothing makes room for what asks."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.server.settings import ServerSettings

RESERVED_FILES = 64  # of the process, for all but connections
MAX_BACKLOG = 2048
AHEAD_PERIOD_S = 0.004  # in which one request is taken that came together with an earlier one of its connection


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    most: int
    most_per_client: int
    backlog: int  # connections that are accepted in one go, before any of them can be counted

    @classmethod
    def of(cls, settings: ServerSettings) -> ConnectionLimits:
        """Lowers what was asked for to what the open files of the process allow; one client never gets all of it."""
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = max(num_files - RESERVED_FILES, 16) if num_files != resource.RLIM_INFINITY else 4 * MAX_BACKLOG
        most = min(settings.max_connections, room * 3 // 4)
        most_per_client = min(settings.max_connections_per_client, most - most // 4)
        return cls(most=most, most_per_client=most_per_client, backlog=min(room // 4, MAX_BACKLOG))


class BoundedProtocol(H11Protocol):
    """A connection that is ended when it takes too long to ask or to read, and refused when there are too many.

    It notes when the first bytes of a request arrive, before they are parsed and before its task gets a turn. Requests
    that came together with an earlier one wait in `ahead`, from which few are taken: whoever sends thousands in one go
    keeps nobody waiting who asks one thing at a time.
    """

    def __init__(
        self, settings: ServerSettings, limits: ConnectionLimits, ahead: deque[BoundedProtocol], **given: Any
    ) -> None:
        super().__init__(**given)
        self._ahead = ahead
        self._settings = settings
        self._limits = limits
        self._silent_since = self.loop.time()
        self._has_begun = False
        self._request_deadline: asyncio.TimerHandle | None = None
        self._reading_deadline: asyncio.TimerHandle | None = None

    @property
    def is_silent(self) -> bool:
        """Tells whether no request of it is being answered; one whose headers are not whole does not count."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_request()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        if self.is_silent:
            self.app_state = self.app_state | {"arrived_at": time.perf_counter()}
            self._has_begun = True
            self._await_request()
        super().data_received(data)
        if not self.is_silent:
            self._has_begun = False
            self._request_deadline = _cancelled(self._request_deadline)

    def on_response_complete(self) -> None:
        self._silent_since = self.loop.time()
        if self.conn.trailing_data[0]:
            self._ahead.append(self)
            if len(self._ahead) == 1:
                self.loop.call_later(AHEAD_PERIOD_S, self._take_ahead)
        super().on_response_complete()

    def handle_events(self) -> None:
        if self in self._ahead:
            self.flow.pause_reading()
        else:
            super().handle_events()

    def _take_ahead(self) -> None:
        taken = self._ahead.popleft()
        if self._ahead:
            self.loop.call_later(AHEAD_PERIOD_S, self._take_ahead)
        if not taken.transport.is_closing():
            taken.flow.resume_reading()
            taken.handle_events()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_deadline = _cancelled(self._request_deadline)
        self._reading_deadline = _cancelled(self._reading_deadline)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._reading_deadline = _cancelled(self._reading_deadline)
        super().resume_writing()

    def _await_request(self) -> None:
        """Starts the time that headers may take; what drips in does not start it again."""
        if self._request_deadline is None:
            self._silent_since = self.loop.time()
            self._request_deadline = self.loop.call_later(self._settings.header_timeout_s, self._end_silence)

    def _end_silence(self) -> None:
        if self._has_begun and self.cycle is None:
            seconds = self._settings.header_timeout_s
            self._refuse("408 Request Timeout", f"The headers did not come within {seconds:g} s.")
        self.transport.close()

    def _await_reader(self, num_unread: int) -> None:
        self._reading_deadline = self.loop.call_later(self._settings.body_timeout_s, self._check_reader, num_unread)

    def _check_reader(self, num_unread: int) -> None:
        """Ends a connection that read nothing of its answer for as long as a body may pause."""
        num_left = self.transport.get_write_buffer_size()
        if num_left >= num_unread:
            self.transport.abort()
        else:
            self._await_reader(num_left)

    def _make_room(self) -> None:
        """Ends the connection that was silent the longest where there are too many; if none is, refuses this one."""
        known = [one for one in self.connections if isinstance(one, BoundedProtocol) and one is not self]
        others = [one for one in known if not one.transport.is_closing()]
        address = self.client and self.client[0]
        own = [one for one in others if one.client and one.client[0] == address]
        if len(own) >= self._limits.most_per_client:
            crowd, limit = own, f"{self._limits.most_per_client} connections of one client"
        elif len(others) >= self._limits.most:
            crowd, limit = others, f"{self._limits.most} connections"
        else:
            return
        if silent := [one for one in crowd if one.is_silent]:
            min(silent, key=lambda one: one._silent_since).transport.abort()
        else:
            self._refuse("503 Service Unavailable", f"There are {limit} already, the most. Try again soon.")
            self.transport.close()

    def _refuse(self, status: str, message: str) -> None:
        """Answers beside the parser, which has no request to answer."""
        body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}})
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(f"{head}Connection: close\r\nRetry-After: 1\r\n\r\n{body}".encode())


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
