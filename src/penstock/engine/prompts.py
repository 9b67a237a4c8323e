"""From what users give (text, files, messages) to token ids, streamed where that is provably exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.feed import ByteMeter, TokenFeed, count_tokens
from penstock.errors import InvalidPrompt
from penstock.prompt.render import ChatTemplate
from penstock.prompt.source import TextPart
from penstock.prompt.tokens import Tokenizer

Message = Mapping[str, Any]
SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    tokenizer: Tokenizer
    template: ChatTemplate | None
    needs_length: bool  # the rotary table or a strict plan depends on the prompt's length
    refuse_too_long: Callable[[int], None]
    capacity: int

    def text_tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=True)

    def message_tokens(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """`variables`: what the template may know besides the messages, such as tools."""
        return self.tokenizer.encode(self.rendered(messages, **variables), add_special_tokens=False)

    def rendered(self, messages: Sequence[Message], **variables: Any) -> str:
        if self.template is None:
            raise InvalidPrompt("The model has no chat template, so messages cannot be rendered. Give a text instead.")
        return self.template.render(messages, **variables)

    def chat_feed(self, parts: Sequence[TextPart], *, system: str | None = None) -> TokenFeed:
        """One user message made of the parts. What cannot fit is refused here where its length can be known."""
        parts = parts_with_text(parts)
        if self.template is None and system:
            raise InvalidPrompt("The model has no chat template, so a system message has no place. Leave it out.")
        if self.template is None:
            note = "the model has no chat template: the text is read as it is"
            return self._feed(parts, ("", ""), (note,), add_special_tokens=True)
        messages = [{"role": "system", "content": system}] if system else []
        split = self.template.split([*messages, {"role": "user", "content": ""}], len(messages))
        if split is not None:
            return self._feed(parts, split, (), add_special_tokens=False)
        content = "".join(joined_text(parts))
        rendered = self.template.render([*messages, {"role": "user", "content": content}])
        note = "the chat template inspects its content: the prompt was rendered whole, not streamed"
        return self._feed([TextPart.of_text(rendered)], ("", ""), (note,), add_special_tokens=False)

    def _feed(
        self, parts: Sequence[TextPart], frame: tuple[str, str], notes: tuple[str, ...], *, add_special_tokens: bool
    ) -> TokenFeed:
        sizes = [part.num_bytes for part in parts]
        num_bytes = None if None in sizes else sum(size or 0 for size in sizes) + sum(map(len, frame))
        meter = ByteMeter(_framed(parts, frame), num_bytes)
        batches = self.tokenizer.stream(meter, add_special_tokens=add_special_tokens)
        if not self.tokenizer.streaming.cuttable:
            notes = (*notes, f"the tokenizer cannot be cut safely ({self.tokenizer.streaming.reason}): encoded whole")
        feed = TokenFeed(batches=batches, meter=meter, adjustments=notes)
        if num_bytes is not None and (self.needs_length or not self._surely_fits(num_bytes)):
            counted = self.tokenizer.stream(_framed(parts, frame), add_special_tokens=add_special_tokens)
            feed.num_total = count_tokens(counted, refuse_past=self.refuse_too_long)
        elif self.needs_length:
            tokens = [token for batch in batches for token in self._bounded(batch, feed)]
            feed = TokenFeed(batches=iter([tokens]), num_total=len(tokens), adjustments=notes)
        return feed

    def _surely_fits(self, num_bytes: int) -> bool:
        """No token is shorter than a byte, unless a normalizer adds text."""
        return not self.tokenizer.normalizes and num_bytes + len(self.text_tokens("")) < self.capacity

    def _bounded(self, batch: list[int], feed: TokenFeed) -> list[int]:
        feed.num_given += len(batch)
        self.refuse_too_long(feed.num_given)
        return batch


def parts_with_text(parts: Sequence[TextPart]) -> list[TextPart]:
    found = [part for part in parts if part.num_bytes != 0]
    if not found:
        raise InvalidPrompt("The prompt is empty: there is no text and no file with text. Give -p TEXT or -f FILE.")
    return found


def _framed(parts: Sequence[TextPart], frame: tuple[str, str]) -> Iterator[str]:
    yield frame[0]
    yield from joined_text(parts)
    yield frame[1]


def joined_text(parts: Sequence[TextPart]) -> Iterator[str]:
    is_empty = True
    for index, part in enumerate(parts):
        if index:
            yield SEPARATOR
        for piece in part.pieces():
            is_empty = False
            yield piece
    if is_empty:
        raise InvalidPrompt(f"The prompt is empty: {parts[0].name} holds no text. Give -p TEXT or another file.")
