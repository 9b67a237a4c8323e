"""What a grammar may take before it is used, and whether one keeps to it. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from penstock.apart import Apart, Bounds
from penstock.errors import InvalidSetting, UnsupportedModel, first_line

# Its first step, prepared beside the steps of others, takes 0.2 s and 40 MB; the mask of each later one up to 14 ms,
# on one core. Schemas and patterns of people take a tenth of that.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,  # of 1 to 2 kB
}
# What those limits do not reach, such as numbers that are multiples of a large prime, is ended from outside.
BOUNDS = Bounds(cpu_s=2.0, max_bytes=1 << 30, niceness=5)
TOO_HARD = (
    "The grammar or schema cannot be used: it takes more than {bounds.cpu_s:g} s of processor time, or "
    "{bounds.max_bytes:,} bytes, to compile. Simplify its patterns and repetitions, and leave out multipleOf."
)
MAX_PROVEN = 1024  # grammars that are remembered, by their digest
# The masks of strings without quotes and escapes are made ahead. The library's other sets make none faster, and take a
# quarter of the memory and a sixth of the time of opening, in which Python does nothing else.
SLICES = [r"[^\"\\\x00-\x1F\x7F]{1,30}"]


class GrammarProof:
    """Compiles grammars in a process that can be ended, before anybody compiles them in this one."""

    def __init__(self, given: Callable[[], dict[str, Any]], bounds: Bounds = BOUNDS) -> None:
        """`given`: what `open_guide` takes."""
        refusal = InvalidSetting(TOO_HARD.format(bounds=bounds))
        self._apart = Apart(f"{__name__}:proving", given, bounds=bounds, refusal=refusal)
        self._proven: OrderedDict[bytes, None] = OrderedDict()

    def knows(self, grammar: str) -> bool:
        return _digest(grammar) in self._proven

    def require(self, grammar: str) -> None:
        """Refuses a grammar that does not compile, or not within its bounds."""
        if not self.knows(grammar):
            self._apart.ask(grammar)
            self._proven[_digest(grammar)] = None
            while len(self._proven) > MAX_PROVEN:
                self._proven.popitem(last=False)

    def close(self) -> None:
        self._apart.close()


def proving(given: dict[str, Any]) -> Callable[[str], None]:
    guide = open_guide(**given)

    def prove(grammar: str) -> None:
        compile_grammar(guide, grammar)

    return prove


def open_guide(tokenizer: str, vocab_size: int, eos_ids: list[int]) -> Any:
    """Reads a vocabulary, by which grammars of letters become grammars of tokens."""
    try:
        import llguidance
    except ImportError:
        raise UnsupportedModel("Grammars need llguidance. Install penstock[serve].") from None
    try:
        return llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_ids or None, slices=SLICES)
    except Exception as error:  # a tokenizer that the library cannot read
        raise UnsupportedModel(
            f"This model's tokenizer cannot be held to a grammar: {first_line(error, 300)}. Leave JSON mode out."
        ) from error


def compile_grammar(guide: Any, grammar: str) -> Any:
    """Makes a matcher, does the work of its first step ahead, and goes one token further on a copy: most of what
    passes the limits does so there."""
    import llguidance

    matcher = llguidance.LLMatcher(guide, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise InvalidSetting(
            f"The grammar or schema cannot be used: {first_line(matcher.get_error() or 'unknown', 300)}."
        )
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    refuse_error(matcher)
    if allowed:
        further = matcher.deep_copy()
        further.consume_token((allowed & -allowed).bit_length() - 1)
        refuse_error(further)
    return matcher


def refuse_error(matcher: Any) -> None:
    """A matcher that gave up allows nothing but the end: an answer cut there would look complete."""
    if matcher.is_error():
        raise InvalidSetting(
            f"The answer cannot be held to its grammar or schema any further: "
            f"{first_line(matcher.get_error() or 'unknown', 300)}. Simplify its patterns and repetitions."
        )


def _digest(grammar: str) -> bytes:
    return sha256(grammar.encode("utf-8", "surrogatepass")).digest()
