"""The lane `transformers-generic-multimodal`: any image-text model of transformers, its prompts read in exact chunks.

One sequence per call, over our pages where that is exact, else with the model's own cache. Images are encoded when
their request comes, each once.
"""

from __future__ import annotations

from dataclasses import asdict

from penstock.attention.pick import attention_backend
from penstock.errors import UnsupportedModel
from penstock.foreign.forward import CachedForward
from penstock.foreign.images import MediaModel
from penstock.foreign.own_cache import OwnCaches, PagedPrompts
from penstock.foreign.pages import CannotJoin, attention_calls, pages_of, use_paged_attention
from penstock.foreign.pretrained import image_text_class, load_causal, quiet_library
from penstock.lanes.generic_images_kind import price
from penstock.lanes.lane import LaneFacts
from penstock.lanes.loading import LoadedLane, Loading, require_folder, with_boundary
from penstock.lanes.media_intake import ImageReader, MediaIntake
from penstock.models.files import ModelFiles
from penstock.models.generic_spec import generic_spec
from penstock.plan.memory import ModelShape
from penstock.proof.images import check_picture, check_real_media
from penstock.proof.verdict import Way


class MultimodalLane(MediaIntake):
    def __init__(
        self, media: MediaModel, *, reader: ImageReader, encoder_bytes: int, shape: ModelShape, facts: LaneFacts
    ) -> None:
        super().__init__(media, reader=reader, encoder_bytes=encoder_bytes)
        self.shape = shape
        self.facts = facts
        self.own_attention: str = media.model.config.get_text_config()._attn_implementation
        self.use(OwnCaches(CachedForward(media.model, self.signature)))

    def use(self, caches: OwnCaches) -> None:
        """Reads with these from now on."""
        self._caches = caches
        self.begin, self.run, self.release = caches.expect, caches.run, caches.release

    @property
    def num_kept(self) -> int:
        return self._caches.num_kept

    def cache_bytes(self) -> tuple[int, int]:
        """Measures (bytes of a sequence whatever its length, bytes per token) of the model's own cache."""
        return self._caches.cache_bytes(lambda length: self.text_prompt([1] * length))


class GenericImagesLoader:
    library_class = staticmethod(image_text_class)

    def __init__(self, files: ModelFiles) -> None:
        require_folder(files, "Image-text")
        self.model_class, self.model_config = self.library_class(files)
        self.reader = ImageReader.of(files)

    @quiet_library()
    def load(self, loading: Loading) -> LoadedLane:
        place, memory, checks = loading.place, loading.memory, loading.checks
        model = load_causal(place.files, self.model_class, self.model_config, loading.dtype, loading.device)
        media, encoder_bytes = self.reader.media(model, loading, memory)
        lane = MultimodalLane(
            media, reader=self.reader, encoder_bytes=encoder_bytes, shape=memory.shape, facts=place.lane
        )
        if lane.signature.cache_name is None:
            raise UnsupportedModel(f"{type(model).__name__} takes no cache, so its prompts cannot be continued.")
        if checks.verdict.exact and checks.verdict.picture is None and (found := check_picture(lane)) is not None:
            checks = checks.with_finding("picture", found)
            if checks.has_pages and not _is_exact_in_pages(lane):
                checks = checks.with_changes({"way": Way.OWN_CACHE})
        over_pages = attention_backend if checks.has_pages else None
        checks = checks.with_real_weights(model, lambda: check_real_media(lane, over_pages))
        lane.facts = with_boundary(checks.facts(model), media.sight)
        rows = memory.shape.state_bytes_per_token  # of images
        memory, calls, attention = price(place, checks.verdict), (), None
        measured: dict[str, int]
        if checks.has_pages:
            use_paged_attention(model)
            calls = attention_calls(model, lane.signature)
            measured = {"state_bytes": 0, "state_bytes_per_token": rows, "num_layers": len(calls), **asdict(calls[0])}
        else:
            fixed, per_token = lane.cache_bytes()
            counted = memory.shape.kv_bytes_per_token - rows
            measured = {"state_bytes": fixed, "state_bytes_per_token": rows + max(0, per_token - counted)}
        is_eager = not calls and model.config.get_text_config()._attn_implementation == "eager"
        memory = loading.measured(memory, model, attends_through_scores=is_eager, **measured)
        lane.shape = memory.shape
        num_tokens = loading.num_tokens(memory, memory.num_running_states)
        if calls:
            block_size = place.config.block_size
            storage = pages_of(model, calls, -(-num_tokens // block_size) * block_size)
            attention = attention_backend(storage, block_size, calls[0].num_heads)
            lane.use(PagedPrompts(CachedForward(model, lane.signature), attention, len(calls)))
        return LoadedLane(
            lane=lane,
            spec=generic_spec(self.model_config.to_dict()),
            memory=memory,
            num_tokens=num_tokens,
            attention=attention,
            chat_template=self.reader.chat_template,
        )


def _is_exact_in_pages(lane: MultimodalLane) -> bool:
    """Tells by a picture; without a processor there are none, and text was checked before."""
    if lane.processor is None:
        return True
    try:
        found = check_picture(lane, attention_backend)
    except CannotJoin:
        return False
    return found is not None and found.exact
