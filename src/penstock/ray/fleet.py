"""Replicas of models as Ray Serve deployments, and the ingress before them: of this process, or one of Ray's."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from penstock.config import DEFAULT_MODEL, EngineConfig, load_config
from penstock.errors import InvalidSetting
from penstock.models.files import resolve
from penstock.plan.machine import FREE_MEMORY_MARGIN, available_bytes
from penstock.ray.front import Front, make_front
from penstock.ray.replica import EngineReplica
from penstock.ray.routing import FirstTokenRouter
from penstock.ray.scaling import BacklogScaling
from penstock.server.process import serve as serve_until_told
from penstock.server.settings import ServerSettings

MAX_CALLS = 10_000  # of a replica at once: its own queue has the limits
NEWS_PERIOD_S = 1.0
OBJECT_STORE_BYTES = 200_000_000  # answers go from process to process; the store holds next to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """How many replicas a model has, and when there are more."""

    min_replicas: int = 2
    max_replicas: int = 2
    backlog_s: float = 5.0  # predicted seconds of reading, of each replica, above which there are more
    patience_s: float = 30.0  # for so long fewer must be enough before one is drained

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise InvalidSetting(
                f"The replicas are {self.min_replicas} to {self.max_replicas}; give 1 or more, the fewer first, such "
                "as 1-3."
            )
        if self.backlog_s <= 0:
            raise InvalidSetting(f"backlog_s is {self.backlog_s}; it must be above 0.")

    @classmethod
    def of(cls, replicas: str, **others: Any) -> FleetSettings:
        """Reads a number of replicas, or two with a dash between them."""
        fewest, _, most = replicas.partition("-")
        if not fewest.isdecimal() or (most and not most.isdecimal()):
            raise InvalidSetting(f"--replicas is {replicas!r}; give a number, or two such as 1-3.")
        return cls(min_replicas=int(fewest), max_replicas=int(most or fewest), **others)


def join(num_actors: int) -> None:
    """Joins the cluster that RAY_ADDRESS names, or starts a small one here."""
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
        return
    ray.init(
        num_cpus=max(os.cpu_count() or 1, num_actors + 2),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )


def share_of_memory(num_actors: int) -> int:
    """Gives the budget of an actor on a node: free memory, less a margin, shared by those that may be there."""
    num_nodes = max(1, sum(node["Alive"] for node in ray.nodes()))
    return int(available_bytes() * (1 - FREE_MEMORY_MARGIN) / math.ceil(num_actors / num_nodes))


def _deployment(settings: ServerSettings, config: EngineConfig, fleet: FleetSettings) -> Any:
    is_fixed = fleet.min_replicas == fleet.max_replicas
    scaling = AutoscalingConfig(
        min_replicas=fleet.min_replicas,
        max_replicas=fleet.max_replicas,
        policy=AutoscalingPolicy(
            policy_function=BacklogScaling, policy_kwargs={"target_s": fleet.backlog_s, "patience_s": fleet.patience_s}
        ),
        metrics_interval_s=1.0,
        look_back_period_s=2.0,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
    )
    return serve.deployment(EngineReplica).options(
        name=_safe(settings.served_name),
        num_replicas=fleet.min_replicas if is_fixed else None,
        autoscaling_config=None if is_fixed else scaling,
        max_ongoing_requests=MAX_CALLS,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2.0,
        request_router_config=RequestRouterConfig(
            request_router_class=FirstTokenRouter, request_routing_stats_period_s=NEWS_PERIOD_S
        ),
        ray_actor_options={"num_cpus": config.threads or 1, "num_gpus": 1 if config.device == "cuda" else 0},
    )


def _bound(models: Sequence[ServerSettings], config: EngineConfig, fleet: FleetSettings) -> list[Any]:
    num_actors = len(models) * fleet.max_replicas
    config = replace(config, memory=config.memory or share_of_memory(num_actors), threads=config.threads or 1)
    return [_deployment(settings, config, fleet).bind(settings, config) for settings in models]


def serve_fleet(
    models: Sequence[ServerSettings], config: EngineConfig, fleet: FleetSettings, *, is_quiet: bool = True
) -> int:
    """Runs replicas of each model behind a server in this process, until a signal ends it."""
    for settings in models:
        resolve(settings.model)  # refused here, before anything is started
    join(len(models) * fleet.max_replicas)
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"} if is_quiet else None)
        handles = {
            settings.served_name: _started(_safe(settings.served_name), bound)
            for settings, bound in zip(models, _bound(models, config, fleet), strict=True)
        }
        return serve_until_told(models[0], lambda: _front(models, config, handles))
    finally:
        serve.shutdown()
        ray.shutdown()


def _started(name: str, bound: Any) -> DeploymentHandle:
    """Waits until the replicas of a model are there; what one of them refused is refused here."""
    try:
        return serve.run(bound, name=name, route_prefix=None)
    except RuntimeError as error:
        told = serve.status().applications[name].deployments.values()
        lines = [line for one in told for line in one.message.splitlines() if "penstock.errors." in line]
        why = lines[-1].partition(": ")[2] if lines else str(error)
        raise InvalidSetting(f"The replicas of {name} did not start: {why}") from None


def _front(models: Sequence[ServerSettings], config: EngineConfig, handles: Mapping[str, DeploymentHandle]) -> FastAPI:
    return make_front({one.served_name: Front(one, config, handles[one.served_name]) for one in models})


def app(arguments: Mapping[str, Any] | None = None) -> Any:
    """Makes the application that `serve run penstock.ray:app model=smollm2 replicas=1-3` runs.

    `model` may be several names with commas between them; `api_key`, `replicas` and `backlog_s` are as for
    `penstock serve --ray`. Everything else is a setting of the engine, such as memory or context.
    """
    given = dict(arguments or {})
    names = str(given.pop("model", DEFAULT_MODEL)).split(",")
    keys = tuple(filter(None, [given.pop("api_key", None)]))
    fleet = FleetSettings.of(str(given.pop("replicas", 2)), backlog_s=float(given.pop("backlog_s", 5.0)))
    models = [ServerSettings(model=name, api_keys=keys) for name in names]
    config = load_config(given)
    join(len(models) * fleet.max_replicas)

    def build() -> FastAPI:
        found = {one.served_name: serve.get_deployment_handle(_safe(one.served_name)) for one in models}
        return _front(models, config, found)

    ingress = serve.deployment(serve.ingress(build)())
    return ingress.options(name="penstock-ingress", max_ongoing_requests=MAX_CALLS).bind(*_bound(models, config, fleet))


def _safe(name: str) -> str:
    """Makes a name that Ray takes of a model's, which may have slashes."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)
