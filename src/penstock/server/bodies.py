"""What a body may hold, counted as it arrives: parsing and checking keep Python from everybody else."""

from __future__ import annotations

from penstock.server.problems import Refused

MAX_STRINGS = 32_768  # names of fields among them: a quarter of a second, where each four are a message
BYTES_PER_VALUE = 32  # a value may have fewer, where it is not the only thing in a large body


class BodyMeter:
    """Refuses a body once it is too large, or has more in it than is read in a moment.

    What stands in a text does not count as a string: quotes are escaped there. Its commas and brackets count as values.
    Of a body that is not parsed only the size counts.
    """

    def __init__(self, max_bytes: int, *, is_parsed: bool = True) -> None:
        self._max_bytes = max_bytes
        self._is_parsed = is_parsed
        self._max_values = max_bytes // BYTES_PER_VALUE
        self._num_bytes = self._num_values = self._num_quotes = 0

    def take(self, content: bytes) -> None:
        self._num_bytes += len(content)
        if not self._is_parsed:
            self.refuse_size(self._num_bytes)
            return
        self._num_values += sum(content.count(one) for one in (b",", b"[", b"{"))
        self._num_quotes += content.count(b'"') - content.count(b'\\"')
        self.refuse_size(self._num_bytes)
        if self._num_values > self._max_values:
            raise self._refusal(
                f"holds more than {self._max_values:,} commas and brackets", ", or raise --max-body-mib"
            )
        if self._num_quotes > 2 * MAX_STRINGS:
            raise self._refusal(f"holds more than {MAX_STRINGS:,} strings, names of fields among them")

    def refuse_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise Refused(f"The body is larger than {self._max_bytes:,} bytes, the most that is taken.", status=413)

    def _refusal(self, what: str, way_out: str = "") -> Refused:
        return Refused(f"The body {what}, the most that is read. Send less at once{way_out}.", status=413)
