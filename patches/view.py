"""Proxies through which a framework's own function sees an object with other members."""

from typing import Any


class View:
    """Proxy of ``base``. Reading an attribute named in ``instead`` gives the value in ``instead``. Writes go to ``base``."""

    def __init__(self, base: Any, **instead: Any) -> None:
        vars(self).update(instead, _base=base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._base, name, value)
