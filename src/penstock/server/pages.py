"""What pages of other sites may not do to a server without a key, through the browser of somebody who reaches it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from penstock.server.problems import Refused
from penstock.server.settings import ServerSettings

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
READING = frozenset({"GET", "HEAD", "OPTIONS"})
JSON, MULTIPART = "application/json", "multipart/form-data"


class OwnPages:
    """Tells requests of our own pages, and of programs, from those that a foreign page made a browser send."""

    def __init__(self, settings: ServerSettings) -> None:
        self._origins = settings.cors_origins
        self._hosts: frozenset[str] | None = None  # None: any, because names of a network are not known here
        is_loopback = settings.host in ("localhost", "::1") or settings.host.startswith("127.")
        if settings.allowed_hosts or is_loopback:
            given = (*LOOPBACK_NAMES, settings.host, *settings.allowed_hosts)
            self._hosts = frozenset(_name(host) for host in given)

    def check_host(self, headers: Headers) -> None:
        """Refuses a name that somebody else may have pointed here: to a browser, its pages would be ours."""
        name = _name(headers.get("host", ""))
        if self._hosts is not None and name and name not in self._hosts:
            raise Refused(
                f"The host {name[:80]!r} is not one that this server answers to without a key. "
                "Ask at localhost, or start it with --allowed-host or --api-key.",
                status=403,
            )

    def check_sender(self, method: str, headers: Headers, expected: str = JSON) -> None:
        """Refuses what a page of another site may send without being asked about it first.

        A form is such a thing too, but browsers name the site that it comes from.
        """
        if method in READING:
            return
        if self._is_foreign(headers):
            raise Refused(
                f"A page of another site ({headers.get('origin', 'unknown')[:80]!r}) sent this to a server without a "
                "key. Start it with --cors-origin to let that site ask, or with --api-key.",
                status=403,
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != expected:
            raise Refused(f"The content type is {kind[:80]!r}. Send the header 'Content-Type: {expected}'.", status=415)

    def _is_foreign(self, headers: Headers) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if "*" in self._origins or origin in self._origins:
            return False
        if site is not None:
            return site not in ("same-origin", "none")
        return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()


def _name(host: str) -> str:
    """Gives a host without its port; an address of IPv6 stands in brackets."""
    host = host.strip().lower()
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else re.sub(r":\d*$", "", host)
