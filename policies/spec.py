"""What a user types to name a policy or predictor, and the registry that it names a class in.

    marginal                      the name or an alias
    marginal:epsilon=0.5          with a parameter; more of them are separated by commas
    marginal:epsilon=0.5,oracle   two specs, where a list of them is expected

The registry knows nothing of policies: the classes bring their own names and parameters.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar, Union

from ecospec.errors import UserError, nearest, one_line

T = TypeVar("T")


def parse_spec(text: str) -> tuple[str, dict[str, str]]:
    """Split `name:key=value,key=value` into the name and its parameters, values still text.

    Raises:
        UserError: a name, key or value is missing, or a key is repeated.
    """
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if not name:
        raise UserError(f"{text!r} has no name; expected name or name:key=value")
    parameters: dict[str, str] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise UserError(f"{item.strip()!r} in {text!r} is not a parameter; expected key=value")
        if key in parameters:
            raise UserError(f"{text!r} sets {key!r} twice")
        parameters[key] = value
    return name, parameters


def split_specs(text: str) -> list[str]:
    """Split a comma-separated list of specs; `key=value` belongs to the spec before it.

    Raises:
        UserError: an entry is empty, or a parameter has no spec with a colon before it.
    """
    specs: list[str] = []
    for segment in (segment.strip() for segment in text.split(",")):
        before_equals, equals, _ = segment.partition("=")
        if not segment:
            raise UserError(f"{text!r} has an empty entry; expected names separated by commas")
        if not equals or ":" in before_equals:
            specs.append(segment)
        elif specs and ":" in specs[-1]:
            specs[-1] += f",{segment}"
        else:
            owner = specs[-1] if specs else "name"
            raise UserError(f"{segment!r} in {text!r} is a parameter of no name; expected {owner}:{segment}")
    return specs


@dataclass(frozen=True)
class Parameter:
    """One value that a user may set, from a field of a registered dataclass."""

    name: str
    types: tuple[type, ...]
    """What it may be; more than one for a union, in the order in which they are tried."""
    default: object
    """The default, or `dataclasses.MISSING` for a value that must be given."""
    help: str

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def type_name(self) -> str:
        return " or ".join("none" if kind is type(None) else kind.__name__ for kind in self.types)

    def parse(self, text: str) -> object:
        """The value that `text` stands for.

        Raises:
            ValueError: it stands for no value of these types.
        """
        for kind in self.types:
            try:
                return _CONVERTERS[kind](text)
            except ValueError:
                continue
        raise ValueError(f"{self.name} is {text!r}, expected {self.type_name}")


@dataclass(frozen=True)
class Registered:
    """One row of the list of plugins."""

    name: str
    aliases: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    provider: str
    doc: str


class Registry(Generic[T]):
    """Classes by name, created from specs.

    A class brings its own `name` and, optionally, `aliases`; the fields of a dataclass are its
    parameters, converted from text by their type: int, float, bool, str, Path, or one of those or None.

    Args:
        kind: what the classes are, in the singular, for messages ("policy").
        base: what they must derive from.
    """

    def __init__(self, kind: str, base: type = object) -> None:
        self.kind = kind
        self.base = base
        self._classes: dict[str, type[T]] = {}
        self._rows: dict[str, Registered] = {}

    def register(self, cls: type[T], provider: str = "ecospec") -> type[T]:
        """Add a class under its name and aliases; returns it.

        Raises:
            UserError: it is not a concrete class of the base, has no usable name, a name of its is
                taken (both providers are named), or it needs a parameter that no text can express.
        """
        self._check_class(cls)
        name: str = vars(cls)["name"]
        aliases: tuple[str, ...] = vars(cls).get("aliases", ())
        for taken in (name, *aliases):
            if taken in self._rows:
                raise UserError(
                    f"the {self.kind} name {taken!r} of {provider} is already taken by {self._rows[taken].provider}"
                )
        parameters = tuple(_parameters(cls))
        row = Registered(name, tuple(aliases), parameters, provider, doc=summary(cls))
        for known in (name, *aliases):
            self._classes[known] = cls
            self._rows[known] = row
        return cls

    def names(self) -> list[str]:
        """The names, without aliases, in the order of registration."""
        return [name for name, row in self._rows.items() if name == row.name]

    def describe(self) -> list[Registered]:
        """A row per class, in the order of registration."""
        return [self._rows[name] for name in self.names()]

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def get(self, name: str) -> type[T]:
        """The class with that name or alias.

        Raises:
            UserError: there is none; the text gives the nearest name.
        """
        if name not in self._classes:
            raise UserError(f"unknown {self.kind} {name!r}: {nearest(name, self._classes)}")
        return self._classes[name]

    def create(self, spec: str) -> T:
        """The instance that a spec such as `marginal:epsilon=0.5` describes.

        Raises:
            UserError: the name or a parameter is unknown, a required parameter is missing, or a value
                cannot be converted or is refused by the class.
        """
        name, given = parse_spec(spec)
        cls = self.get(name)
        row = self._rows[name]
        settable = {parameter.name: parameter for parameter in row.parameters}
        for key in given:
            if key not in settable:
                raise UserError(f"{self.kind} {name!r} has no parameter {key!r}: {nearest(key, settable)}")
        missing = [key for key, parameter in settable.items() if parameter.required and key not in given]
        if missing:
            example = ",".join(f"{key}=<{settable[key].type_name}>" for key in missing)
            raise UserError(f"{self.kind} {name!r} needs {', '.join(missing)}: write {name}:{example}")
        try:
            return cls(**{key: settable[key].parse(text) for key, text in given.items()})
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.kind} {name!r}: {error}") from error
        except KeyboardInterrupt:  # the user's
            raise
        except BaseException as error:  # a class of somebody else's may raise anything
            raise UserError(f"{self.kind} {name!r}: {type(error).__name__}: {one_line(error)}") from error

    def _check_class(self, cls: object) -> None:
        if not isinstance(cls, type):
            raise UserError(f"{cls!r} is not a class; return {self.kind} classes, not instances")
        label = f"{cls.__module__}.{cls.__qualname__}"
        if not issubclass(cls, self.base):
            raise UserError(f"{label} does not derive from {self.base.__module__}.{self.base.__qualname__}")
        if inspect.isabstract(cls):
            missing: frozenset[str] = vars(cls)["__abstractmethods__"]
            raise UserError(f"{label} does not define {', '.join(sorted(missing))}")
        # Names are not inherited: a subclass of another policy is another policy.
        name, aliases = vars(cls).get("name"), vars(cls).get("aliases", ())
        if name is None:
            raise UserError(f"{label} has no name of its own; set name = '...' in the class")
        if not isinstance(aliases, tuple | list):
            raise UserError(f"{label} has aliases {aliases!r}, expected a tuple of names")
        for known in (name, *aliases):
            if not isinstance(known, str) or not known or any(c in ":,=" or c.isspace() for c in known):
                raise UserError(f"{label} has the name {known!r}, expected text without spaces or any of :,=")
        if len({name, *aliases}) != 1 + len(aliases):
            raise UserError(f"{label} repeats a name: {name!r} and {aliases!r}")


def spec_of(instance: Any) -> str:
    """The spec that creates an instance again: its name and the parameters that are not at their default."""
    changed = [
        f"{parameter.name}={getattr(instance, parameter.name)}"
        for parameter in _parameters(type(instance))
        if getattr(instance, parameter.name) != parameter.default
    ]
    name: str = instance.name
    return f"{name}:{','.join(changed)}" if changed else name


def summary(cls: type) -> str:
    """The first paragraph of the class's own docstring, on one line; empty if it has none.

    An inherited docstring describes another class, and the one that `@dataclass` writes is a signature.
    """
    doc = inspect.cleandoc(vars(cls).get("__doc__") or "")
    return "" if doc.startswith(f"{cls.__name__}(") else " ".join(doc.partition("\n\n")[0].split())


def _parameters(cls: type) -> Iterator[Parameter]:
    if not dataclasses.is_dataclass(cls):
        return
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        types = _expressible_types(hints[field.name])
        if types:
            yield Parameter(field.name, types, default, help=str(field.metadata.get("help", "")))
        elif default is dataclasses.MISSING:
            raise UserError(
                f"{cls.__module__}.{cls.__qualname__} needs {field.name}, which no text can express; "
                "give it a default, or the type int, float, bool, str, Path, or one of those or None"
            )


def _bool(text: str) -> bool:
    values = {"true": True, "yes": True, "on": True, "1": True}
    values |= {"false": False, "no": False, "off": False, "0": False}
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


def _none(text: str) -> None:
    if text.lower() != "none":
        raise ValueError(text)


# The strictest first: every text is also a str.
_CONVERTERS: Mapping[type, Callable[[str], object]] = {
    type(None): _none,
    bool: _bool,
    int: int,
    float: float,
    Path: Path,
    str: str,
}


def _expressible_types(hint: Any) -> tuple[type, ...]:
    """The members of a type hint in the order to try them; none if text cannot express them all."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, UnionType) else (hint,)
    if not all(member in _CONVERTERS for member in members):
        return ()
    return tuple(kind for kind in _CONVERTERS if kind in members)
