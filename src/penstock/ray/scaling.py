"""How many replicas a backlog needs. Ray sends this file to its controller by value: it imports nothing of ours."""

from __future__ import annotations

from typing import Any

BACKLOG = "backlog_s"
# A replica fewer must be enough for so long before one is ended, with half of the target left.
PATIENCE_S, ROOM = 30.0, 0.5


class BacklogScaling:
    """Wants so many replicas that the predicted backlog of each is a number of seconds at most."""

    def __init__(self, target_s: float, patience_s: float = PATIENCE_S) -> None:
        self.target_s, self.patience_s = target_s, patience_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        told = (context.aggregated_metrics or {}).get(BACKLOG, {})
        return self.wanted(sum(told.values()), context.target_num_replicas, context.policy_state, context.current_time)

    def wanted(self, backlog_s: float, current: int, state: dict[str, Any], now: float) -> tuple[int, dict[str, Any]]:
        """Gives (replicas, since when fewer are enough): more at once, fewer one by one and with patience."""
        more = -int(-backlog_s // self.target_s)
        if more > current:
            return more, {}
        if current <= 1 or backlog_s > ROOM * self.target_s * (current - 1):
            return max(1, current), {}
        since = state.get("few_since", now)
        return (current - 1, {}) if now - since >= self.patience_s else (current, {"few_since": since})
