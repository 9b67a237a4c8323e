"""`HintedCommand`: what others call a flag, and a text that stands where a model should."""

from __future__ import annotations

import os
import shlex
from typing import Any

from typer.core import TyperCommand

from penstock.errors import InvalidPrompt

# Flags of llama.cpp, ollama and vLLM, by what they are here.
OTHER_NAMES = {
    "--max-tokens": ("-n", "--predict", "--n-predict", "--num-predict", "--max-new-tokens"),
    "--context": ("-c", "--ctx-size", "--num-ctx", "--max-model-len", "--max-seq-len"),
    "--chunk-size": ("-b", "-ub", "--batch-size", "--ubatch-size", "--num-batch", "--max-num-batched-tokens"),
    "--memory": ("--gpu-memory-utilization",),
    "--threads": ("-t", "--num-thread"),
    "--device": ("-ngl", "--gpu-layers", "--n-gpu-layers", "--num-gpu"),
    "--temperature": ("--temp",),
    "--repetition-penalty": ("--repeat-penalty",),
    "--seed": ("-s",),
    "--system": ("-sys", "--system-prompt"),
    "--max-running": ("-np", "--parallel", "--max-num-seqs"),
    "--prompt-tokens": ("--input-len",),
}
OUR_NAMES = {other: ours for ours, others in OTHER_NAMES.items() for other in others}
MOST_LETTERS_SHOWN = 80


class HintedCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # the parser takes them out
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hint := self._hint(error, given):
                vars(error).update(message=hint, possibilities=None)
            raise

    def _hint(self, error: Exception, given: list[str]) -> str | None:
        """Says more than a usage error does; None where there is nothing to add. The error's class is typer's own."""
        flags = {flag for parameter in self.params for flag in parameter.opts}
        if (name := getattr(error, "option_name", None)) is not None:
            written = {arg.partition("=")[0] for arg in given if arg.startswith(name)}
            name = next((one for one in sorted(written, key=len, reverse=True) if one in OUR_NAMES), name)
            if name in ("-m", "--model") and "MODEL" in [parameter.metavar for parameter in self.params]:
                return f"No such option {name}. Penstock takes the model without a flag: penstock {self.name} MODEL."
            if (ours := OUR_NAMES.get(name)) in flags:
                return f"No such option {name}. Penstock calls it {ours}."
        elif "unexpected extra argument" in (message := getattr(error, "message", "")) and "-p" in flags:
            return f"{message}. Text goes after -p: penstock {self.name} MODEL -p TEXT."
        return None


def refuse_text_for_model(model: str) -> None:
    """Refuses a text or its file in the place of the model: a name has no spaces, unless it is a path that is there."""
    if os.path.isfile(model) and not model.endswith(".gguf"):
        raise InvalidPrompt(
            f"{model!r} is not a model: that is a folder, a .gguf file or a name. A text to read goes after -f: "
            f"penstock run -f {shlex.quote(model)} -p TEXT"
        )
    if any(letter.isspace() for letter in model) and not os.path.exists(model):
        text = shlex.quote(model) if len(model) <= MOST_LETTERS_SHOWN else "TEXT"
        raise InvalidPrompt(
            f"{model[:MOST_LETTERS_SHOWN]!r} is not a model. Text goes after -p: penstock run -p {text}"
        )
