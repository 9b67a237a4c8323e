"""A conversation at a terminal: questions, answers, and the commands between them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.session import read_messages, write_messages
from penstock.errors import InvalidMedia, InvalidSetting, PenstockError

if TYPE_CHECKING:
    from rich.console import Console

HELP = (
    "An empty line, /bye or Ctrl-D ends the chat; Ctrl-C stops an answer. Flags: penstock chat --help.\n"
    "/retry answers the last question again, /image PATH shows a picture with the next one, "
    "/save FILE and /load FILE keep the conversation and go on with another."
)
ENDS = ("/bye", "/exit", "/quit")
Message = dict[str, Any]
Answer = Callable[[list[Message]], str]


class Conversation:
    """Talks until the user ends it. The document and the images belong to the next message that is answered."""

    def __init__(
        self,
        console: Console,
        answer: Answer,
        *,
        model: str,
        messages: Sequence[Message] = (),
        document: str = "",
        images: Sequence[str] = (),
        read_ahead: Callable[[list[Message]], AbstractContextManager[None]] | None = None,
        keep: Callable[[list[Message]], None] | None = None,
        why_no_images: Callable[[], PenstockError | None] = lambda: None,
    ) -> None:
        """`read_ahead`: reads the beginning of a message while the user writes the rest. `keep`: is given each turn."""
        self._console = console
        self._answer = answer
        self._model = model
        self.messages = list(messages)
        self._document = document
        self._images = list(images)
        self._read_ahead = read_ahead
        self._keep = keep
        self._why_no_images = why_no_images
        self._is_unread = bool(messages)  # by this process
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/?": self._help,
            "/retry": self._retry,
            "/image": self._show,
            "/save": self._save,
            "/load": self._load,
        }

    def run(self, who: str) -> None:
        self._console.print(f"{who}. An empty line ends the chat; /help says more.", style="dim")
        while True:
            known = [*self.messages, {"role": "user", "content": f"{self._document}\n\n" if self._document else ""}]
            is_ahead = self._read_ahead is not None and (self._document or self._is_unread) and not self._images
            with self._read_ahead(known) if self._read_ahead is not None and is_ahead else nullcontext():
                text = self._next_text()
            if not text:
                return
            self._ask(text)

    def _ask(self, text: str) -> None:
        content: Any = f"{self._document}\n\n{text}" if self._document else text
        if self._images:
            shown = [{"type": "image", "image": image} for image in self._images]
            content = [*shown, {"type": "text", "text": content}]
        if self._say({"role": "user", "content": content}):
            self._document, self._images = "", []

    def _say(self, question: Message) -> bool:
        """Answers a question; False where that is refused, and then it was not asked."""
        self.messages.append(question)
        try:
            said = self._answer(self.messages)
        except PenstockError as error:
            self._complain(error)
            self.messages.pop()
            return False
        self.messages.append({"role": "assistant", "content": said})
        self._is_unread = False
        if self._keep is not None:
            try:
                self._keep(self.messages)
            except PenstockError as error:
                self._complain(error)
        return True

    def _next_text(self) -> str:
        """Asks until there is a line for the model; an empty one ends the chat."""
        try:
            while (text := self._console.input("[bold]> [/bold]").strip()).startswith("/"):
                name, _, rest = text.partition(" ")
                if name in ENDS:
                    return ""
                if (command := self._commands.get(name)) is None:
                    return text  # a path, say, that a question begins with
                try:
                    command(rest.strip())
                except PenstockError as error:
                    self._complain(error)
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return ""
        return text

    def _help(self, rest: str) -> None:
        self._console.print(HELP, style="dim")

    def _retry(self, rest: str) -> None:
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            raise InvalidSetting("Nothing was answered yet; ask first.")
        *self.messages, question, before = self.messages
        if not self._say(question):
            self.messages += [question, before]

    def _show(self, path: str) -> None:
        if (why := self._why_no_images()) is not None:
            raise why
        if not Path(path).expanduser().is_file():
            raise InvalidMedia(f"The image {path or '(no path)'} does not exist. Check the path.")
        self._images.append(str(Path(path).expanduser().resolve()))
        self._console.print(f"{len(self._images)} with the next question.", style="dim")

    def _save(self, path: str) -> None:
        target = Path(path or "chat.json").expanduser()
        write_messages(target, self._model, self.messages, target.write_bytes)
        self._console.print(f"{len(self.messages)} messages are in {target}.", style="dim", markup=False)

    def _load(self, path: str) -> None:
        self.messages = read_messages(Path(path or "chat.json").expanduser())
        self._is_unread = True
        self._console.print(f"The conversation has {len(self.messages)} messages now.", style="dim")

    def _complain(self, error: PenstockError) -> None:
        self._console.print(f"penstock: {error}", style="red", markup=False)
