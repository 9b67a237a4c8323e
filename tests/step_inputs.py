"""Steps of chunks of given lengths, each over a sequence of its own, without a model."""

from itertools import accumulate

import torch

from penstock.attention.backend import ForwardInputs


def inputs_of(*lengths: int) -> ForwardInputs:
    starts = tuple(accumulate(lengths, initial=0))
    return ForwardInputs(
        ids_T=torch.arange(starts[-1]),
        positions_T=torch.arange(starts[-1]),
        query_starts=starts,
        context_lens=tuple(100 * index + length for index, length in enumerate(lengths)),
        block_table=tuple((index,) for index in range(len(lengths))),
        rotary_variants=("default",) * len(lengths),
        sequence_ids=tuple(range(len(lengths))),
        logit_rows=torch.empty(0),
        state_slots=tuple(range(len(lengths))),
    )
