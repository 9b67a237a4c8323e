"""The self-check of encoder-decoder models: do tiles of a source and chunks of an answer give what the whole gives?"""

# S source tokens, T tokens of the answer, M hidden size, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from penstock.errors import UnsupportedModel, first_line
from penstock.foreign.forward import TextCall
from penstock.foreign.source_decoder import CrossStates, SourceDecoder
from penstock.foreign.source_encoder import TiledEncoder, encoder_of
from penstock.proof.comparison import Case, compared, exact_limit, held_to_float32, spans
from penstock.proof.forward import forward_case
from penstock.proof.verdict import Finding, Verdict, Way

SOURCE_LENGTHS = (37, 29, 41)
TILINGS: tuple[tuple[int, ...], ...] = ((7,), (5, 1, 17, 2, 31))
NUM_ANSWERED = 9
NOT_PACKED = Finding.unmeasured("one sequence per call: a source is read layer by layer")


@torch.no_grad()
def check_source(model: Any) -> Verdict:
    """Checks a small copy in float32: the encoder's states, then the decoder's logits over a source read in tiles."""
    found, chunked = check_encoder(model), None
    if found.exact:
        encoder, decoder = TiledEncoder(encoder_of(model)), SourceDecoder(model)
        singly = compared(_answers(encoder, decoder), TILINGS, what="logits over tiles", against="the plain ones")
        found = found if singly.exact else singly
        chunked = check_decoder(model)
    return Verdict(way=Way.TILES, packing=NOT_PACKED, answer_chunks=chunked, **found.model_dump())


@torch.no_grad()
def check_encoder(model: Any, *, is_loaded: bool = False) -> Finding:
    """`is_loaded`: real weights, of which one source is enough if it is exact."""
    plain = encoder_of(model)
    try:
        encoder = TiledEncoder(plain)
    except UnsupportedModel as error:
        return Finding.unmeasured(str(error).rstrip("."))
    except Exception as error:  # a foreign forward may fail in any way when it is looked at
        return Finding.unmeasured(f"its encoder cannot be run in tiles: {first_line(error)}")
    return compared(
        _cases(plain, encoder),
        TILINGS[:1] if is_loaded else TILINGS,
        what="states of tiles",
        against="the whole source's",
        first_may_decide=is_loaded,
    )


@torch.no_grad()
def check_decoder(model: Any) -> Finding:
    """An answer that is begun, in chunks."""
    ids_1S = next(_sources(encoder_of(model), TiledEncoder(encoder_of(model))))
    output = encoder_of(model)(input_ids=ids_1S, attention_mask=torch.ones_like(ids_1S))
    inputs = {"decoder_input_ids": ids_1S, "encoder_outputs": output}
    case = forward_case(model, inputs, TextCall.of(inputs))
    return compared([case], TILINGS, what="chunked logits", against="the whole decoder prompt's")


@torch.no_grad()
def check_real_encoder(model: Any) -> Finding:
    """The loaded encoder in its own dtype. A float32 copy of it exists meanwhile."""
    plain = encoder_of(model)
    exact = copy.deepcopy(plain).float()
    encoder = TiledEncoder(plain)
    sources = zip(_cases(plain, encoder), (_states(exact, ids) for ids in _sources(plain, encoder)), strict=True)
    return held_to_float32(sources, TILINGS[1], next(plain.parameters()).dtype)


def _sources(plain: Any, encoder: TiledEncoder) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for length in SOURCE_LENGTHS:
        length = min(length, encoder.max_positions or length)
        ids_1S = torch.randint(3, plain.get_input_embeddings().num_embeddings, (1, length), generator=generator)
        yield ids_1S.to(next(plain.parameters()).device)


def _cases(plain: Any, encoder: TiledEncoder) -> Iterator[Case]:
    for ids_1S in _sources(plain, encoder):
        whole_1SM = _states(plain, ids_1S)
        read = partial(_states_in_tiles, encoder, ids_1S)
        yield Case(whole=whole_1SM, read=read, allowed=exact_limit(whole_1SM, whole_1SM.dtype))


def _states(plain: Any, ids_1S: torch.Tensor) -> torch.Tensor:
    return plain(input_ids=ids_1S, attention_mask=torch.ones_like(ids_1S)).last_hidden_state


def _states_in_tiles(encoder: TiledEncoder, ids_1S: torch.Tensor, sizes: Iterator[int]) -> torch.Tensor:
    state = encoder.new_state(ids_1S)
    for start, end in spans(encoder.num_passes * ids_1S.shape[1], sizes):
        encoder.read(state, start, end)
    assert state.hidden_BSM is not None
    return state.hidden_BSM


def _answers(encoder: TiledEncoder, decoder: SourceDecoder) -> Iterator[Case]:
    """Token by token, as `generate` writes: over plain states, and over tiles."""
    for ids_1S in _sources(encoder.encoder, encoder):
        answer = ids_1S[:, :NUM_ANSWERED].split(1, dim=1)
        hidden_1SM, cache = _states(encoder.encoder, ids_1S), decoder.new_cache()
        plain_TV = torch.cat([decoder.logits(token, hidden_1SM, cache) for token in answer])
        read = partial(_answer_over_tiles, encoder, decoder, ids_1S, answer)
        yield Case(whole=plain_TV, read=read, allowed=exact_limit(plain_TV))


def _answer_over_tiles(
    encoder: TiledEncoder,
    decoder: SourceDecoder,
    ids_1S: torch.Tensor,
    answer: Sequence[torch.Tensor],
    sizes: Iterator[int],
) -> torch.Tensor:
    hidden_1SM, cross = _states_in_tiles(encoder, ids_1S, sizes), CrossStates(num_tokens=ids_1S.shape[1])
    for start, end in spans(ids_1S.shape[1], sizes):
        decoder.add_keys(cross, hidden_1SM[:, start:end], start)
    cache = decoder.cache(cross)
    return torch.cat([decoder.logits(token, hidden_1SM, cache) for token in answer])
