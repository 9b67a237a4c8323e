"""The lane `transformers-generic-seq2seq-source`: a source read in exact tiles, then answered token by token.

A request's positions are work: the encoder's passes over the source, one more for the decoder's keys and values of
it, then the decoder's own tokens. So every unit of work is a chunk like any other.
"""

# S source tokens, V vocabulary

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.attention.backend import ForwardInputs
from penstock.errors import InvalidModelFile, InvalidSetting, PromptTooLong, counted
from penstock.foreign.pretrained import load_causal, quiet_library, seq2seq_class
from penstock.foreign.source_decoder import CrossStates, SourceDecoder
from penstock.foreign.source_encoder import SourceState, TiledEncoder, encoder_of, position_limit, read_whole
from penstock.lanes.lane import Asked, Lane, LaneFacts, PromptLimits, TextPrompt
from penstock.lanes.loading import LoadedLane, Loading, require_folder
from penstock.models.files import ModelFiles
from penstock.models.seq2seq_spec import seq2seq_spec
from penstock.plan.memory import ModelShape
from penstock.proof.source import check_real_encoder
from penstock.request import SourceReading

# What generation_config.json may ask for and is not done here: name -> the value that asks for nothing.
NOT_DONE: Mapping[str, Any] = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "repetition_penalty": 1.0,
    "do_sample": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """How an answer begins and what it never holds, by the model's generation config."""

    start_tokens: tuple[int, ...]
    first_token: int | None  # forced: the language of a translation
    never: tuple[int, ...]
    not_done: tuple[str, ...]  # what the config asks for and the lane does not do

    @classmethod
    def of(cls, generation_config: Any) -> AnswerRules:
        start = getattr(generation_config, "decoder_start_token_id", None)
        start = getattr(generation_config, "bos_token_id", None) if start is None else start
        if start is None:
            raise InvalidModelFile(
                "The model says no decoder_start_token_id, so no answer can begin; add it to generation_config.json."
            )
        words = getattr(generation_config, "bad_words_ids", None) or []
        never = {word[0] for word in words if len(word) == 1} | set(
            getattr(generation_config, "suppress_tokens", None) or []
        )
        asked = {name: getattr(generation_config, name, None) for name in NOT_DONE}
        return cls(
            start_tokens=tuple(start) if isinstance(start, Sequence) else (start,),
            first_token=getattr(generation_config, "forced_bos_token_id", None),
            never=tuple(sorted(never)),
            not_done=tuple(
                f"generation_config asks for {name} {value}; it is not applied"
                for name, value in asked.items()
                if value is not None and value != NOT_DONE[name]
            ),
        )

    def apply(self, logits_1V: torch.Tensor, num_written: int) -> torch.Tensor:
        if num_written == 0 and self.first_token is not None:
            logits_1V = torch.full_like(logits_1V, -torch.inf)
            logits_1V[:, self.first_token] = 0
        elif self.never:
            logits_1V[:, list(self.never)] = -torch.inf
        return logits_1V


@dataclass(slots=True, kw_only=True)
class _Reading:
    """All that a request keeps: the source's states, the decoder's view of them, its cache."""

    source: SourceState
    cross: CrossStates
    cache: Any = None  # None until the source is read


class Seq2SeqLane(Lane):
    """`why_no_start`: why an answer that is begun cannot be read in chunks; empty where it can."""

    def __init__(
        self, model: Any, *, facts: LaneFacts, shape: ModelShape, max_source: int, why_no_start: str = ""
    ) -> None:
        self.why_no_start = why_no_start
        self.model = model
        self.shape = shape
        self.decoder = SourceDecoder(model)
        self.rules = AnswerRules.of(model.generation_config)
        self.facts = facts
        self.encoder = None if facts.reads_whole else TiledEncoder(encoder_of(model))
        self.num_positions = position_limit(encoder_of(model))
        self._max_source = max_source if self.num_positions is None else min(max_source, self.num_positions)
        self.max_prompt = self._max_source
        self._readings: dict[int, _Reading] = {}

    @property
    def num_passes(self) -> int:
        """Counts passes over the source: the encoder's, and one for the decoder's keys and values; read whole, one."""
        return 1 if self.encoder is None else self.encoder.num_passes + 1

    def refuse_too_long(self, num_tokens: int, *, is_all: bool = True) -> None:
        has = f"The source has {counted(num_tokens, is_all=is_all)}"
        if self.num_positions is not None and num_tokens > self.num_positions:
            raise PromptTooLong(f"{has}; the model has positions for {self.num_positions}. Shorten the source.")
        if num_tokens > self._max_source:
            enough = f" to {num_tokens}" if is_all else ""
            raise PromptTooLong(
                f"{has}; the model was trained for {self._max_source}. Shorten it or, to go past that, raise "
                f"--context{enough}."
            )

    def prompt(self, ask: Asked, limits: PromptLimits) -> TextPrompt:
        """The positions of a request: source tokens in the first pass, nothing new in the others, then the answer's
        start, which is read in chunks like any tokens."""
        if ask.images:
            super().prompt(ask, limits)  # refuses them
        limits.refuse_too_long(len(ask.tokens))
        if ask.answer_start and self.why_no_start:
            raise InvalidSetting(f"A begun answer is not exact on this model: {self.why_no_start}. Leave it out.")
        start = (*self.rules.start_tokens, *ask.answer_start)
        if (limit := self.decoder.max_positions) is not None and len(start) >= limit:
            raise PromptTooLong(
                f"The answer begins with {len(start)} tokens; the decoder has positions for {limit}. Shorten its start."
            )
        source = SourceReading(
            num_tokens=len(ask.tokens), num_passes=self.num_passes, max_answer_tokens=self.decoder.max_positions
        )
        filler = (0,) * (source.num_positions - len(ask.tokens))
        why = "An encoder gives its source no log-probabilities. Leave prompt_logprobs out."
        return TextPrompt(positions=(*ask.tokens, *filler, *start), source=source, why_no_logprobs=why)

    @torch.no_grad()
    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        wanted = set(inputs.logit_rows.tolist())
        logits: list[torch.Tensor] = []
        for index, sequence_id in enumerate(inputs.sequence_ids):
            rows = slice(inputs.query_starts[index], inputs.query_starts[index + 1])
            end = inputs.context_lens[index]
            result = self._advance(sequence_id, inputs.ids_T[rows], end, inputs.source_lens[index])
            if rows.stop - 1 in wanted:
                assert result is not None
                logits.append(result)
        return torch.cat(logits) if logits else inputs.ids_T.new_empty((0, self.shape.vocab_size)).float()

    def release(self, sequence_id: int) -> None:
        self._readings.pop(sequence_id, None)

    def _advance(self, sequence_id: int, ids_T: torch.Tensor, end: int, num_source: int) -> torch.Tensor | None:
        """Positions up to `end` of one request; logits of the last where it is the decoder's."""
        start = end - len(ids_T)
        num_positions = self.num_passes * num_source
        if start == 0:
            source = SourceState(ids_BS=ids_T.new_zeros(1, num_source), is_padding_BS=None)
            self._readings[sequence_id] = _Reading(source=source, cross=CrossStates(num_tokens=num_source))
        reading = self._readings[sequence_id]
        if start < num_source:
            num_ids = min(end, num_source) - start
            reading.source.ids_BS[0, start : start + num_ids] = ids_T[:num_ids]
        if start < num_positions:
            self._read(reading, start, min(end, num_positions))
        if end <= num_positions:
            return None
        answer_T = ids_T[max(0, num_positions - start) :]
        assert reading.source.hidden_BSM is not None
        logits_1V = self.decoder.logits(answer_T[None], reading.source.hidden_BSM, reading.cache)
        return self.rules.apply(logits_1V, end - num_positions - len(self.rules.start_tokens))

    def _read(self, reading: _Reading, start: int, end: int) -> None:
        source, encoder = reading.source, self.encoder
        num_tokens = source.num_tokens
        if encoder is None:
            if end == num_tokens:
                source.hidden_BSM = read_whole(encoder_of(self.model), source.ids_BS)
                reading.cache = self.decoder.cache(reading.cross)
            return
        num_encoding = encoder.num_passes * num_tokens
        if start < num_encoding:
            encoder.read(source, start, min(end, num_encoding))
        if end > num_encoding:
            rows = slice(max(start, num_encoding) - num_encoding, end - num_encoding)
            assert source.hidden_BSM is not None
            self.decoder.add_keys(reading.cross, source.hidden_BSM[:, rows], rows.start)
        if end == num_encoding + num_tokens:
            reading.cache = self.decoder.cache(reading.cross)


class Seq2SeqLoader:
    library_class = staticmethod(seq2seq_class)

    def __init__(self, files: ModelFiles) -> None:
        require_folder(files, "Encoder-decoder")
        self.model_class, self.model_config = self.library_class(files)
        self.spec = seq2seq_spec(files.config)

    @quiet_library()
    def load(self, loading: Loading) -> LoadedLane:
        place, memory, max_source = loading.place, loading.memory, loading.max_context
        model = load_causal(place.files, self.model_class, self.model_config, loading.dtype, loading.device)
        checks = loading.checks.with_real_weights(model, lambda: check_real_encoder(model))
        chunked = checks.verdict.answer_chunks
        end = getattr(model.generation_config, "eos_token_id", None)
        lane = Seq2SeqLane(
            model,
            facts=checks.facts(model),
            shape=memory.shape,
            max_source=max_source,
            why_no_start="" if chunked is None or chunked.exact else chunked.reason,
        )
        return LoadedLane(
            lane=lane,
            spec=self.spec,
            memory=memory,
            num_tokens=min(place.room(memory), 2 * max_source * place.config.max_running),
            max_context=2 * max_source,
            adjustments=lane.rules.not_done,
            eos_ids=frozenset(end if isinstance(end, list) else [] if end is None else [end]),
        )
