"""A process that is killed while it writes, without a process: the `os` of `ecospec.harness.writing` stops working."""

from __future__ import annotations

import os
from typing import Any


class Killed(BaseException):
    """The process is gone: nothing it would still do happens."""


class DyingOs:
    """The `os` of a process that is killed in its ``last`` call that changes anything; a write gets half way."""

    def __init__(self, last: int) -> None:
        self.calls, self.last = 0, last

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("open", "write", "fsync", "replace", "unlink"):
            return real

        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls == self.last and name == "write":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if self.calls >= self.last:
                raise Killed
            return real(*arguments)

        return call
