"""The `ecospec` package; in a checkout its parts are the repository's top-level folders."""

from pathlib import Path

__version__ = "0.1.0"

_here = Path(__file__).resolve().parent
if _here.parent.name == "src":
    __path__.append(str(_here.parents[1]))
