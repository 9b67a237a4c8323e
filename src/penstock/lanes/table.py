"""The table of lanes, in the order of preference: a model goes to the first lane that claims it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import InvalidSetting, UnknownLane, UnsupportedModel
from penstock.kernels import build
from penstock.lanes.generic_images_kind import GENERIC_IMAGES
from penstock.lanes.generic_text_kind import GENERIC_TEXT, generic_obstacle
from penstock.lanes.lane import LaneFacts, LaneKind
from penstock.lanes.native_images_kind import NATIVE_IMAGES
from penstock.lanes.native_text_kind import NATIVE_TEXT
from penstock.lanes.place import Place
from penstock.lanes.seq2seq_kind import SEQ2SEQ
from penstock.lanes.text_part import part_to_read
from penstock.models.adapter import with_adapter
from penstock.models.families import FAMILIES
from penstock.models.files import ModelFiles, reading_config
from penstock.models.gguf_tower import with_tower
from penstock.plan.devices import choose_dtype, require_device

LANES: dict[str, LaneKind] = {
    kind.id: kind for kind in (NATIVE_TEXT, NATIVE_IMAGES, GENERIC_TEXT, GENERIC_IMAGES, SEQ2SEQ)
}


def pick_lane(config: Mapping[str, Any], requested: str | None) -> LaneFacts:
    """The lane for a model, from its own config, and why."""
    if requested is not None:
        return _asked_for(config, requested)
    reasons: list[str] = []
    for kind in LANES.values():
        claim = kind.claim(config)
        if claim.eligible:
            reason = claim.reason if kind.is_own_kind else "; ".join([*reasons[:1], claim.reason])
            return replace(kind.facts, reason=reason, gains_from_width=claim.gains_from_width)
        reasons.append(claim.reason)
    architectures = ", ".join(config.get("architectures") or []) or "unnamed"
    if obstacle := generic_obstacle(config):  # it stands in the way of every lane but the native one
        reasons = [reasons[0], obstacle]
    raise UnsupportedModel(
        f"The architecture {config.get('model_type')!r} ({architectures}) is not supported by any lane: "
        f"{'; '.join(dict.fromkeys(reversed(reasons)))}. Native decoders are {', '.join(sorted(FAMILIES))}."
    )


def _asked_for(config: Mapping[str, Any], requested: str) -> LaneFacts:
    if requested not in LANES:
        raise UnknownLane(f"Lane {requested!r} does not exist; lanes are {', '.join(LANES)}.")
    kind = LANES[requested]
    claim = kind.claim(config)
    if not claim.eligible:
        raise UnknownLane(f"Lane {requested!r} cannot run this model: {claim.reason}. Leave --lane out.")
    reason = f"{claim.reason}; asked for by --lane"
    return replace(kind.facts, reason=reason, gains_from_width=claim.gains_from_width)


def settle(files: ModelFiles, config: EngineConfig, *, has_cuda: bool) -> Place:
    """Picks lane, device and dtype of a model; settings that its lane cannot honour are refused."""
    if config.adapter:
        files = with_adapter(files, config.adapter)
    with reading_config(files.name):
        if not config.text_only:
            files = with_tower(files, config.mmproj)
        is_for_images = config.lane in LANES and LANES[config.lane].facts.reads_images
        files = part_to_read(files, config, is_for_images=is_for_images)
        lane = pick_lane(files.config, config.lane)
    if files.why_text_only:
        reason = f"{lane.reason}; only the text part is read: {files.why_text_only}"
        lane = replace(lane, reason=reason, why_text_only=files.why_text_only)
    device = require_device(config.device, has_cuda=has_cuda)
    if device != "cpu" and config.lane is None and lane.id == NATIVE_TEXT.id and files.config.get("kv_lora_rank"):
        lane = pick_lane(files.config, GENERIC_TEXT.id)  # compressed keys are attended to on processors so far
    if config.quantize not in ("auto", "none") and not lane.keeps_codes:
        names = ", ".join(kind.id for kind in LANES.values() if kind.facts.keeps_codes)
        raise InvalidSetting(f"--quantize {config.quantize} is for lane {names}, not {lane.id}; leave it out.")
    return Place(
        files=files,
        lane=lane,
        config=config.on_device(device, gains_from_width=lane.gains_from_width),
        device=device,
        dtype=choose_dtype(
            config.dtype,
            files.config,
            device,
            lambda: LANES[lane.id].claim(files.config).runs_in_c and build.can_run(config.cpu_kernels),
        ),
    )
