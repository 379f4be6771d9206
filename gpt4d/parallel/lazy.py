"""torch for modules that the planner imports: it is imported at the first use of an attribute.

The first use replaces both names in all modules that have imported them from here, so that a later use takes no longer
than with an ordinary import.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any


class _LazyModule:
    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        for alias, lazy in _MODULES.items():
            module = import_module(lazy.name)
            for user in [*sys.modules.values()]:
                if getattr(user, "__dict__", {}).get(alias) is lazy:
                    setattr(user, alias, module)
        return getattr(sys.modules[self.name], attribute)


_MODULES = {"torch": _LazyModule("torch"), "F": _LazyModule("torch.nn.functional")}

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:
    torch, F = _MODULES.values()
