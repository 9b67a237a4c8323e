"""Finds where a checkpoint keeps its decoder: the names before ours, and how it lays out mixtures. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.errors import InvalidModelFile
from penstock.models.layer_specs import ExpertsSpec
from penstock.models.spec import DecoderSpec

if TYPE_CHECKING:
    from penstock.models.weights import WeightSource

EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
FUSED_GATE, FUSED_DOWN = "gate_up_proj", "down_proj"
SCALES = "_scale_inv"  # after the name of a tensor in eight bits: what its blocks are multiplied with
BESIDE_WEIGHTS = (SCALES, ".activation_scale")
LAYERS = ".layers."
DRAFTING = "mtp."  # layers that guess tokens ahead; nothing here runs them


def decoder_prefix(names: Iterable[str], where: object) -> str:
    """Finds what stands before the names of the decoder's parts, such as `model.language_model.`."""
    found = [name for name in names if name.endswith(EMBEDDINGS) and not name.startswith(DRAFTING)]
    found = [name for name in found if LAYERS not in name]  # drafting layers may have a table of their own
    if len(found) != 1:
        raise InvalidModelFile(
            f"{where} has {len(found)} tensors named ...{EMBEDDINGS}; a text decoder has one. Download it again."
        )
    return found[0].removesuffix(EMBEDDINGS)


def stored_spec(spec: DecoderSpec, weights: WeightSource, where: object) -> DecoderSpec:
    """Takes the names under which this checkpoint keeps the decoder; releases of the library differ in them."""
    prefix = decoder_prefix(weights.names, where)
    heads = [name for name in weights.names if name.endswith(HEAD)]
    renames = [*spec.renames, ("model.", prefix), *((HEAD, name) for name in heads[:1])]
    return dataclasses.replace(
        spec,
        renames=tuple(renames),
        has_tied_embeddings=spec.has_tied_embeddings or not heads,
        experts=None if spec.experts is None else _stored_experts(spec.experts, weights, spec.hidden_size),
    )


def _stored_experts(experts: ExpertsSpec, weights: WeightSource, hidden_size: int) -> ExpertsSpec:
    """A mixture that is expected expert by expert may lie in one tensor for all, in either order of its sides."""
    down = min((name for name in weights.names if name.endswith(f"{experts.names.experts}.{FUSED_DOWN}")), default=None)
    if experts.names.layout != "one by one" or down is None:
        return experts
    layout = "outputs first" if weights.shape(down)[1] == hidden_size else "inputs first"
    names = dataclasses.replace(experts.names, layout=layout, gate=FUSED_GATE, down=FUSED_DOWN)
    return dataclasses.replace(experts, names=names)
