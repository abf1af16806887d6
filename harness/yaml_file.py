"""A YAML file of keys and values that a user has written, each key once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ecospec.errors import UserError, one_line


def read_yaml(said: str, path: Path, name_of: Callable[[str], str] = str) -> Any:
    """What a file holds.

    Args:
        said: what messages call the file.
        name_of: keys that it gives one name are one key.

    Raises:
        UserError: it cannot be read, is no YAML, or gives a key more than once at its top.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        found, tree = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"{said}: not readable ({error.strerror})") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{said}: not YAML ({one_line(error)})") from error
    # A dict has already merged them.
    keys = [str(key.value) for key, _ in tree.value] if isinstance(tree, yaml.MappingNode) else []
    names = [name_of(key) for key in keys]
    for key, name in zip(keys, names, strict=True):
        if names.count(name) > 1:
            raise UserError(f"{said}: {key} is given {names.count(name)} times, expected once")
    return found
