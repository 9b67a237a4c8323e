"""Stop strings: text is held back only as long as it may be the beginning of one."""

from __future__ import annotations


class StopText:
    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """What may be shown now. After a stop string nothing more is."""
        if self.is_stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [index for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        num_kept = self._num_possible()
        shown, self._held = self._held[: len(self._held) - num_kept], self._held[len(self._held) - num_kept :]
        return shown

    def flush(self) -> str:
        shown, self._held = self._held, ""
        return shown

    def _num_possible(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
