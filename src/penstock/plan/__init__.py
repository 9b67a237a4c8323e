"""The planning room. The package itself can be called: `penstock.plan("smollm2", prompt_tokens=100_000)`."""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    """`penstock.plan` is a function of the public API and the name of this room; both meanings hold."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from penstock.engine.planning import plan

        return plan(*arguments, **settings)


sys.modules[__name__].__class__ = _CallablePackage
