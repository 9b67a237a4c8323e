"""A chat template in a process of its own, where a hostile one keeps nobody from anything and can be ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.apart import Apart, Bounds
from penstock.errors import InvalidPrompt
from penstock.prompt.render import ChatTemplate

BOUNDS = Bounds(cpu_s=10.0, max_bytes=2 << 30)


class TemplateApart(ChatTemplate):
    """Renders as the template that it is made of does; what its process does keeps Python from nobody here."""

    def __init__(self, template: ChatTemplate, bounds: Bounds = BOUNDS) -> None:
        super().__init__(template.source, special_tokens=template.special_tokens)
        refusal = InvalidPrompt(
            f"The chat template takes more than {bounds.cpu_s:g} s of processor time, or {bounds.max_bytes:,} bytes, "
            "for these messages. Send fewer of them, or serve the model with another template."
        )
        given = {"source": self.source, "special_tokens": self.special_tokens}
        self._apart = Apart(f"{__name__}:rendering", lambda: given, bounds=bounds, refusal=refusal)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        return self._apart.ask([None, messages, variables])

    def split(self, messages: Sequence[Mapping[str, Any]], content_at: int, **variables: Any) -> tuple[str, str] | None:
        found = self._apart.ask([content_at, messages, variables])
        return found and tuple(found)

    def close(self) -> None:
        self._apart.close()


def rendering(given: dict[str, Any]) -> Callable[[list[Any]], Any]:
    template = ChatTemplate(given["source"], special_tokens=given["special_tokens"])

    def answer(asked: list[Any]) -> Any:
        content_at, messages, variables = asked
        if content_at is None:
            return template.render(messages, **variables)
        return template.split(messages, content_at, **variables)

    return answer
