"""The counts of the sweep over causal classes, and each class that is not exact with the reason, as lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

PROPERTY = "causal sweep"
CALLS = ("selfcheck", "attach")


def sweep_lines(reports: Iterable[Any]) -> Iterator[str]:
    """Of pytest's reports, from any number of processes; nothing where no class was swept."""
    rows = sorted(value for report in reports for name, value in report.user_properties if name == PROPERTY)
    for call in CALLS:
        own = [row[1:] for row in rows if row[0] == call]
        if not own:
            continue
        counts = Counter(kind for _, kind, _ in own)
        yield f"{call}, {len(own)} causal types: {', '.join(f'{count} {kind}' for kind, count in counts.most_common())}"
        for model_type, kind, reason in own:
            if kind != "exact":
                yield f"  {model_type}: {kind}: {reason}"
