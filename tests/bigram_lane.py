"""The same lane: what runs. The logits of a token are its row of the table."""

from types import SimpleNamespace

import torch

from penstock.attention.backend import ForwardInputs
from penstock.lanes.lane import Lane
from penstock.lanes.loading import LoadedLane, Loading
from penstock.models.files import ModelFiles
from penstock.models.weights import open_weights


class BigramLane(Lane):
    def __init__(self, table_VV: torch.Tensor, loading: Loading) -> None:
        self.table_VV = table_VV
        self.facts = loading.place.lane
        self.shape = loading.memory.shape

    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        return self.table_VV[inputs.ids_T[inputs.logit_rows]].float()


class BigramLoader:
    def __init__(self, files: ModelFiles) -> None:
        self.vocab_size = files.config["vocab_size"]

    def load(self, loading: Loading) -> LoadedLane:
        table_VV = torch.empty(self.vocab_size, self.vocab_size, dtype=loading.dtype, device=loading.device)
        open_weights(loading.place.files).copy_into(table_VV, "table")
        spec = SimpleNamespace(
            vocab_size=self.vocab_size, depends_on_prompt_length=False, rotary_variant=lambda num_tokens: "default"
        )
        return LoadedLane(
            lane=BigramLane(table_VV, loading),
            spec=spec,
            memory=loading.memory,
            num_tokens=loading.num_tokens(loading.memory),
        )
