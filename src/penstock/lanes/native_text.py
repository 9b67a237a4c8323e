"""The lane `optimized-native-text`: our decoder over our pages."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import torch

from penstock.attention.backend import AttentionBackend, ForwardInputs
from penstock.attention.cpu import KEY_ROWS, QUERY_ROWS
from penstock.attention.pick import attention_backend, attention_on_card
from penstock.cache.storage import KvStorage, StateStorage
from penstock.config import TILE_TOKENS
from penstock.kernels import build
from penstock.kernels.calls import c_kernels
from penstock.lanes.graphs import DecodeGraphs
from penstock.lanes.lane import Lane, LaneFacts
from penstock.lanes.loading import LoadedLane, Loading
from penstock.lanes.native_text_kind import streaming_plan
from penstock.lanes.pieces import StepPieces
from penstock.lanes.place import CPU_TILING, Place
from penstock.lanes.sweep import Sweep
from penstock.models.cpu_steps import CompiledSteps, compiled_steps
from penstock.models.decoder import Decoder
from penstock.models.files import ModelFiles
from penstock.models.layer_packs import PackFolder
from penstock.models.layer_stream import LayerStream
from penstock.models.merging import AdaptedWeights
from penstock.models.spec import DecoderSpec, decoder_spec
from penstock.models.stored_names import stored_spec
from penstock.models.weights import WeightSource, open_weights
from penstock.plan.memory import ModelShape
from penstock.plan.waves import Waves

assert (CPU_TILING.query_rows, CPU_TILING.key_rows) == (QUERY_ROWS, KEY_ROWS), "the plan and the kernel disagree"


@dataclass(eq=False)
class NativeTextLane(Lane):
    decoder: Decoder
    attention: AttentionBackend
    _: KW_ONLY
    shape: ModelShape
    facts: LaneFacts
    graphs: DecodeGraphs | None = None  # None: every decode is launched kernel by kernel
    pieces: StepPieces | None = None  # None: and every other step
    steps: CompiledSteps | None = None  # None: every step runs layer by layer
    states: StateStorage | None = None  # None: the model has no recurrent state
    sweep: Sweep | None = None  # None: wide steps are not cut
    stream: LayerStream | None = None
    num_stops: int = 0

    @torch.inference_mode()
    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        hidden_TM = self._hidden(inputs)
        if inputs.layers is not None and inputs.layers.end < len(self.decoder.layers):
            return torch.empty(0, self.decoder.spec.vocab_size)
        if inputs.take_hidden is not None:
            inputs.take_hidden(self.decoder.final_norm(hidden_TM, self.decoder.dtype))
        return self.decoder.logits(hidden_TM[inputs.logit_rows])

    def release(self, sequence_id: int) -> None:
        if self.sweep is not None:
            self.sweep.release(sequence_id)

    @property
    def captures_steps(self) -> bool:
        return self.pieces is not None

    @property
    def recorded_bytes(self) -> int:
        return sum(way.kept_bytes for way in (self.graphs, self.pieces) if way is not None)

    @property
    def waves(self) -> Waves | None:
        """Tells the waves in which FlashInfer reads chunks; None where it does not."""
        on_card = attention_on_card(self.attention)
        return None if on_card is None or on_card.reader is None else on_card.reader.waves

    def use_products(self, num_tokens: int) -> None:
        self.decoder.use_products(num_tokens)

    def capture(self) -> None:
        """Captures steps ahead of time, so that no request waits for it."""
        if self.graphs is not None:
            self.graphs.capture_all()
            self._use_head(self.graphs.attention.max_rows)
        if self.pieces is not None:
            self.pieces.capture_all()

    @torch.inference_mode()
    def _use_head(self, most_rows: int) -> None:
        """A matrix kernel that is used for the first time is loaded first, and that waits for the step that runs."""
        hidden_TM = torch.zeros(
            most_rows, self.decoder.spec.hidden_size, dtype=self.decoder.dtype, device=self.decoder.device
        )
        for num_rows in reversed(range(1, most_rows + 1)):  # each takes the memory of the one before
            self.decoder.logits(hidden_TM[:num_rows])

    def _hidden(self, inputs: ForwardInputs) -> torch.Tensor:
        if self.states is None:
            return self._through_layers(inputs)
        for source, target in inputs.state_loads:
            self.states.copy(source, target)
        hidden_TM = self._through_layers(inputs)
        for source, target in inputs.state_saves:
            self.states.copy(source, target)
        return hidden_TM

    def _through_layers(self, inputs: ForwardInputs) -> torch.Tensor:
        if self.sweep is not None and self.sweep.takes(inputs):
            return self.sweep.forward(inputs)
        for way in (self.graphs, self.pieces, self.steps):
            if way is not None and inputs.media is None and way.fits(inputs):
                return way.forward(inputs)
        self.attention.begin_step(inputs)
        return self.decoder.forward(inputs, self.attention, self.states)


class NativeTextLoader:
    def __init__(self, files: ModelFiles) -> None:
        self.spec = decoder_spec(files.config)

    def load(self, loading: Loading) -> LoadedLane:
        num_tokens = loading.num_tokens(loading.memory)
        files = loading.place.files
        weights = loading.weights or open_weights(files)
        spec = stored_spec(self.spec, weights, files.folder) if files.why_text_only else _prefixed(self.spec, weights)
        lane = native_lane(spec, weights, loading, num_tokens)
        streaming = streaming_plan(loading.place, loading.memory)
        return LoadedLane(
            lane=lane,
            spec=spec,
            memory=loading.memory,
            num_tokens=num_tokens,
            adjustments=[*([] if streaming is None else [streaming.summary()]), *_slow_quantization(loading.place)],
            attention=lane.attention,
            states=lane.states,
        )


def _prefixed(spec: DecoderSpec, weights: WeightSource) -> DecoderSpec:
    """Names the decoder as this checkpoint does: those of Nemotron-H have a prefix that its class does not."""
    if not any(name.startswith("backbone.") for name in weights.names):
        return spec
    return replace(spec, renames=(*spec.renames, ("model.", "backbone.")))


def native_lane(
    spec: DecoderSpec, weights: WeightSource, loading: Loading, num_tokens: int, facts: LaneFacts | None = None
) -> NativeTextLane:
    """Our decoder with its weights, over pages for as many tokens as were counted."""
    place, memory, device, dtype = loading.place, loading.memory, loading.device, loading.dtype
    quantization, stream = place.quantization, None
    if memory.placement.streamed:
        stays = memory.placement.streams_experts_alone
        packs = PackFolder(place.files if loading.weights is None else None, spec, place.dtype, quantization, stays)
        stream = LayerStream(memory.placement, packs)
    decoder = Decoder(spec, dtype=dtype, device=device, quantization=quantization, stream=stream)
    if place.files.adapter is not None:
        weights = AdaptedWeights.of(weights, place.files.adapter, spec)
    decoder.load(weights)
    if isinstance(weights, AdaptedWeights):
        weights.merge.require_all_used(place.lane.id)
    block_size = place.config.block_size
    storage = KvStorage(
        num_layers=len(spec.keeping_layers),
        num_slots=-(-num_tokens // block_size) * block_size,
        num_kv_heads=[layer.num_kv_heads for layer in spec.keeping_layers],
        head_size=[layer.head_size for layer in spec.keeping_layers],
        dtype=dtype,
        device=device,
        values_are_keys=spec.latent is not None,
    )
    attention = attention_backend(storage, block_size, spec.num_heads)
    steps, states = compiled_steps(decoder, attention), _state_storage(spec, loading)
    graphs, pieces = _captured_steps(decoder, attention, states, loading)
    sweep = None
    if device.type == "cpu":
        width = memory.tile_tokens or TILE_TOKENS
        sweep = Sweep(decoder, attention, width=width, steps=steps, states=states)
    return NativeTextLane(
        decoder,
        attention,
        shape=memory.shape,
        facts=facts or place.lane,
        graphs=graphs,
        pieces=pieces,
        steps=steps,
        states=states,
        sweep=sweep,
        stream=stream,
        # What stays in memory, and keeps nothing but keys and values of what it read.
        num_stops=len(decoder.layers) if sweep is not None and stream is None and states is None else 0,
    )


def _state_storage(spec: DecoderSpec, loading: Loading) -> StateStorage | None:
    """None where no layer is recurrent."""
    if spec.recurrent is None:
        return None
    return StateStorage(
        layers=spec.recurrent_layers,
        num_slots=loading.memory.num_running_states + loading.memory.num_checkpoints,
        matrix_shape=spec.recurrent.matrix_shape,
        tail_shape=spec.recurrent.tail_shape,
        dtype=loading.dtype,
        device=loading.device,
    )


def _captured_steps(
    decoder: Decoder, attention: AttentionBackend, states: StateStorage | None, loading: Loading
) -> tuple[DecodeGraphs | None, StepPieces | None]:
    """None on a CPU, which has nothing to capture, and where the host takes part in a layer: experts without gates."""
    on_card, experts = attention_on_card(attention), decoder.spec.experts
    if on_card is None or (experts is not None and not experts.is_gated):
        return None, None
    decodes = on_card.for_decodes(max_rows=loading.place.most_captured, max_context=loading.max_context)
    in_pieces = on_card.for_pieces(max_rows=loading.place.most_captured_tokens)
    return DecodeGraphs(decoder, decodes, states), StepPieces(decoder, in_pieces, states)


def _slow_quantization(place: Place) -> list[str]:
    """What to say where no kernels multiply weights in few bits."""
    is_half = place.dtype == "bfloat16"
    if place.quantize == "none" or place.device == "cuda" or (is_half and c_kernels() is not None):
        return []
    reason = build.kernels().reason if is_half else f"they are for bfloat16, not {place.dtype}"
    return [f"weights in few bits are unpacked in Python for every step, slowly; no C kernels: {reason}"]
