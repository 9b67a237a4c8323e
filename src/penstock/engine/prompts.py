"""Turns what users give (text, files, messages, images) into what a lane is asked; streamed where that is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.feed import COUNTED_BYTES, ByteMeter, TokenFeed, count_tokens
from penstock.engine.image_messages import Message, bare, image_parts, images_of, in_parts, with_images
from penstock.errors import InvalidMedia, InvalidPrompt, PromptTooLong
from penstock.lanes.lane import Asked, LaneFacts
from penstock.models.files import ModelFiles
from penstock.prompt.load import TokenizerParts, tokenizer_from_folder, tokenizer_from_gguf
from penstock.prompt.render import ChatTemplate
from penstock.prompt.source import TextPart
from penstock.prompt.tokens import Tokenizer

# A text, token ids, chat messages, a feed that is still being read, or what `Engine.read` made of one.
Prompt = str | Sequence[int] | Sequence[Message] | TokenFeed | Asked
SEPARATOR = "\n\n"
LONG_TEXT = 65_536  # characters; a longer one is encoded piece by piece
MAX_CONTEXTS = 4  # that the tokens of a text could fill: the rest of it is not encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    tokenizer: Tokenizer
    vocab_size: int  # of the model, which may have fewer tokens than the tokenizer
    template: ChatTemplate | None
    bos_token: str | None
    reads_images: bool
    is_text_part: bool  # of an image-text model, whose template may know texts as parts of a message only
    needs_length: bool  # the rotary table or a strict plan depends on the prompt's length
    refuse_too_long: Callable[..., None]  # given a number of tokens, and whether that is all of them
    capacity: int

    def ask(self, prompt: Prompt, images: Sequence[Any], answer_start: str | Sequence[int], **variables: Any) -> Asked:
        """What the lane is asked. A text has a placeholder for each image; messages have image parts."""
        if isinstance(prompt, Asked):
            return prompt
        if isinstance(answer_start, str):
            start = self.tokenizer.encode(answer_start, add_special_tokens=False)
        else:
            start = self.known_ids(answer_start)
        if isinstance(prompt, TokenFeed):
            return Asked(images=tuple(images), answer_start=tuple(start))
        text, found, adds_special = self._text(prompt, images, variables)
        if found and (self.reads_images or text is None):
            return Asked(text=text or "", images=found, adds_special_tokens=adds_special, answer_start=tuple(start))
        if text is None:
            tokens = self.known_ids(prompt)
        else:
            tokens = self.known(self._encoded(text, add_special_tokens=adds_special))
        return Asked(tokens=tuple(tokens), images=found, answer_start=tuple(start))

    def _text(
        self, prompt: Any, images: Sequence[Any], variables: Mapping[str, Any]
    ) -> tuple[str | None, tuple[Any, ...], bool]:
        """Finds (the text of a prompt, its images in order, whether special tokens are added); no text of token ids."""
        if isinstance(prompt, str):
            return prompt, tuple(images), True
        messages = _messages(prompt)
        if messages and self.reads_images:
            return self._rendered_with_images(messages, images, **variables)
        if messages:
            found = tuple(images) or tuple(part for message in messages for part in image_parts(message))
            return (None if found else self.rendered(messages)), found, False
        if images and self.reads_images:
            raise InvalidMedia(f"{len(images)} image(s) given with token ids. Give a text or messages with them.")
        return None, tuple(images), False

    def text_tokens(self, text: str) -> list[int]:
        return self._encoded(text, add_special_tokens=True)

    def message_tokens(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """`variables`: what the template may know besides the messages, such as tools."""
        return self.rendered_tokens(self.rendered(messages, **variables))

    def rendered_tokens(self, text: str) -> list[int]:
        return self._encoded(text, add_special_tokens=self.reads_images and not self._begins_with_bos(text))

    def _begins_with_bos(self, text: str) -> bool:
        return bool(self.bos_token) and text.startswith(str(self.bos_token))

    def _encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes a text, and refuses one that is far too long before all of it is: 32 MiB take a minute and 6 GB."""
        if len(text) <= LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        tokens: list[int] = []
        for batch in self.tokenizer.stream([text], add_special_tokens=add_special_tokens):
            tokens += batch
            if len(tokens) > (limit := MAX_CONTEXTS * self.capacity):
                raise PromptTooLong(
                    f"The text has more than {limit} tokens, {MAX_CONTEXTS} times the {self.capacity} that fit here. "
                    "Shorten it."
                )
        return tokens

    def rendered(self, messages: Sequence[Message], **variables: Any) -> str:
        if self.template is None:
            raise InvalidPrompt("The model has no chat template, so messages cannot be rendered. Give a text instead.")
        alone = [{"role": "user", "content": ""}]
        if (self.is_text_part or self.reads_images) and self.template.split(alone, 0) is None:
            messages = [in_parts(message) for message in messages]
        return self.template.render(messages, **variables)

    def known(self, tokens: list[int]) -> list[int]:
        """The tokens of a text, refused where the tokenizer has more than the model."""
        if tokens and max(tokens) >= self.vocab_size:
            raise InvalidPrompt(
                f"The tokenizer gives token {max(tokens)}; the model has {self.vocab_size}. Take both from the same "
                "model."
            )
        return tokens

    def known_ids(self, prompt: Sequence[Any]) -> list[int]:
        # A long prompt is looked through without a line of Python for each token.
        if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < self.vocab_size:
            return list(prompt)
        limit = self.vocab_size - 1
        for item in prompt:
            if not isinstance(item, int) or not 0 <= item <= limit:
                raise InvalidPrompt(f"The prompt holds {item!r}; token ids are whole numbers from 0 to {limit}.")
        return [int(item) for item in prompt]

    def chat_feed(self, parts: Sequence[TextPart], *, system: str | None = None) -> TokenFeed:
        """One user message made of the parts. What cannot fit is refused here where its length can be known."""
        parts = _parts_with_text(parts)
        if self.template is None and system:
            raise InvalidPrompt("The model has no chat template, so a system message has no place. Leave it out.")
        if self.template is None:
            note = "the model has no chat template: the text is read as it is"
            return self._feed(parts, ("", ""), (note,), add_special_tokens=True)
        messages = [{"role": "system", "content": system}] if system else []
        split = None
        if not self.reads_images:  # templates of image-text models look into their content
            split = self.template.split([*messages, {"role": "user", "content": ""}], len(messages))
        if split is not None:
            return self._feed(parts, split, (), add_special_tokens=False)
        messages.append({"role": "user", "content": "".join(_joined_text(parts))})
        if self.reads_images:
            text, _, adds_special = self._rendered_with_images(messages, ())
            tokens = self.tokenizer.encode(text, add_special_tokens=adds_special)
            note = "the chat template of an image-text model inspects its content: rendered whole, not streamed"
            return TokenFeed(batches=iter([tokens]), num_total=len(tokens), adjustments=(note,))
        note = "the chat template inspects its content: the prompt was rendered whole, not streamed"
        rendered = self.rendered(messages)
        return self._feed([TextPart.of_text(rendered)], ("", ""), (note,), add_special_tokens=False)

    def _rendered_with_images(
        self, messages: Sequence[Message], images: Sequence[Any], **variables: Any
    ) -> tuple[str, tuple[Any, ...], bool]:
        """Renders messages to (text, its images in order, whether special tokens are to be added)."""
        opened = with_images(messages, images)
        text = self.rendered([bare(message) for message in opened], **variables)
        return text, tuple(images_of(opened)), not self._begins_with_bos(text)

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
            to_the_end = num_bytes <= COUNTED_BYTES
            feed.num_total = count_tokens(counted, refuse_past=self.refuse_too_long, to_the_end=to_the_end)
        elif self.needs_length:
            tokens = feed.take_all(self.refuse_too_long)
            feed = TokenFeed(batches=iter([tokens]), num_total=len(tokens), adjustments=notes)
        return feed

    def _surely_fits(self, num_bytes: int) -> bool:
        """No token is shorter than a byte, unless a normalizer adds text."""
        return not self.tokenizer.normalizes and num_bytes + len(self.text_tokens("")) < self.capacity


def load_tokenizer(files: ModelFiles) -> TokenizerParts:
    if files.gguf is not None:
        return tokenizer_from_gguf(files.gguf.metadata)
    assert files.folder is not None
    return tokenizer_from_folder(files.folder, files.config, files.generation_config)


def chat_template(parts: TokenizerParts, own: str | None = None) -> ChatTemplate | None:
    """Makes the template of a model's chats; `own`: one that the lane found, which comes before the tokenizer's."""
    template = own or parts.chat_template
    return None if template is None else ChatTemplate(template, special_tokens=parts.special_tokens)


def prompt_reader(files: ModelFiles, facts: LaneFacts, capacity: int = 0) -> PromptReader:
    """Makes a reader without the model; it refuses no length."""
    known = load_tokenizer(files)
    return PromptReader(
        tokenizer=Tokenizer(known.backend),
        vocab_size=known.backend.get_vocab_size(),
        template=chat_template(known),
        bos_token=known.special_tokens.get("bos_token"),
        reads_images=facts.reads_images,
        is_text_part=bool(facts.why_text_only),
        needs_length=True,
        refuse_too_long=lambda num_tokens, is_all=True: None,
        capacity=capacity,
    )


def _messages(prompt: object) -> list[Message]:
    """The messages of a chat; none where the prompt is something else."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return []
    messages = [item for item in prompt if isinstance(item, Mapping)]
    return messages if len(messages) == len(prompt) else []


def _parts_with_text(parts: Sequence[TextPart]) -> list[TextPart]:
    found = [part for part in parts if part.num_bytes != 0]
    if not found:
        raise InvalidPrompt("The prompt is empty: there is no text and no file with text. Give -p TEXT or -f FILE.")
    return found


def _framed(parts: Sequence[TextPart], frame: tuple[str, str]) -> Iterator[str]:
    yield frame[0]
    yield from _joined_text(parts)
    yield frame[1]


def _joined_text(parts: Sequence[TextPart]) -> Iterator[str]:
    is_empty = True
    for index, part in enumerate(parts):
        if index:
            yield SEPARATOR
        for piece in part.pieces():
            is_empty = False
            yield piece
    if is_empty:
        raise InvalidPrompt(f"The prompt is empty: {parts[0].name} holds no text. Give -p TEXT or another file.")
