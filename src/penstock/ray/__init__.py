"""Penstock on Ray: replicas behind one server, and readers of datasets. Needs `penstock[ray]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import InvalidSetting

if TYPE_CHECKING:
    from penstock.ray.fleet import app
    from penstock.ray.reader import DatasetReader as Reader

__all__ = ["Reader", "app"]


def require_ray() -> None:
    """Refuses to go on where Ray is not installed."""
    try:
        import ray.serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise InvalidSetting(f"Several replicas need {error.name}. Install penstock[ray].") from None


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'penstock.ray' has no attribute {name!r}")
    require_ray()
    if name == "app":
        from penstock.ray.fleet import app

        return app
    from penstock.ray.reader import DatasetReader

    return DatasetReader
