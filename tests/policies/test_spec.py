"""What a user types, and the registry that turns it into an instance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Optional

import pytest

from ecospec.errors import UserError
from ecospec.policies import MarginalCost, Policy, Registry, parse_spec, split_specs
from ecospec.policies.builtin import ecospec_policies


class Thing(ABC):
    """What the test's registry holds; nothing to do with policies."""

    name: ClassVar[str]

    @abstractmethod
    def act(self) -> None: ...


class Concrete(Thing):
    def act(self) -> None: ...


@dataclass(frozen=True)
class Widget(Concrete):
    """A widget with one parameter
    of each type.

    More about it.
    """

    name: ClassVar[str] = "widget"
    aliases: ClassVar[tuple[str, ...]] = ("w",)

    size: int
    scale: float = field(default=0.5, metadata={"help": "how large"})
    fast: bool = False
    label: str = "plain"
    folder: Path = Path(".")
    limit: int | None = None
    note: Optional[str] = None  # noqa: UP045 - the older spelling works as well
    cache: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must not be negative, got {self.size}")


def registry_of(*classes: type[Any]) -> Registry[Thing]:
    registry: Registry[Thing] = Registry("thing", Thing)
    for cls in classes:
        registry.register(cls, provider="test 1.0")
    return registry


@pytest.fixture
def registry() -> Registry[Thing]:
    return registry_of(Widget)


# --- parsing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("marginal", ("marginal", {})),
        (" marginal : epsilon = 0.5 , other=1 ", ("marginal", {"epsilon": "0.5", "other": "1"})),
        ("learned:path=C:/models/a=b", ("learned", {"path": "C:/models/a=b"})),
    ],
)
def test_a_spec_is_a_name_and_its_parameters(text: str, expected: tuple[str, dict[str, str]]) -> None:
    assert parse_spec(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no name"),
        (":epsilon=1", "has no name"),
        ("marginal:", "'' in 'marginal:' is not a parameter; expected key=value"),
        ("marginal:epsilon", "'epsilon' in .* is not a parameter"),
        ("marginal:epsilon=", "'epsilon=' in .* is not a parameter"),
        ("marginal:=1", "'=1' in .* is not a parameter"),
        ("marginal:a=1,a=2", "sets 'a' twice"),
    ],
)
def test_a_malformed_spec_says_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_spec(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("oracle", ["oracle"]),
        ("confidence, marginal,oracle", ["confidence", "marginal", "oracle"]),
        ("marginal:epsilon=0.5,oracle", ["marginal:epsilon=0.5", "oracle"]),
        ("marginal:epsilon=0.5,other=1,oracle", ["marginal:epsilon=0.5,other=1", "oracle"]),
        ("a:x=1,b:y=2,z=3", ["a:x=1", "b:y=2,z=3"]),
        ("a:x=1,path=C:/y,b", ["a:x=1,path=C:/y", "b"]),
    ],
)
def test_a_list_of_specs_keeps_parameters_with_their_name(text: str, expected: list[str]) -> None:
    assert split_specs(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has an empty entry"),
        ("a,,b", "has an empty entry"),
        ("epsilon=1,a", "parameter of no name; expected name:epsilon=1"),
        ("marginal,epsilon=1", "parameter of no name; expected marginal:epsilon=1"),
    ],
)
def test_a_malformed_list_says_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_specs(text)


# --- creating ---------------------------------------------------------------------------------------


def test_values_are_converted_by_the_type_of_the_field(registry: Registry[Thing]) -> None:
    spec = "w:size=3,scale=1e-3,fast=yes,label=7,folder=a/b,limit=5,note=hello"
    assert registry.create(spec) == Widget(3, 1e-3, True, "7", Path("a/b"), 5, "hello")


def test_parameters_left_out_keep_their_defaults(registry: Registry[Thing]) -> None:
    assert registry.create("widget:size=1,limit=none,note=None") == Widget(size=1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("widgt:size=1", r"unknown thing 'widgt': did you mean 'widget'\?"),
        ("widget:siez=1", r"thing 'widget' has no parameter 'siez': did you mean 'size'\?"),
        ("widget:cache=1", "thing 'widget' has no parameter 'cache'"),
        ("widget", "thing 'widget' needs size: write widget:size=<int>"),
        ("widget:size=1.5", "thing 'widget': size is '1.5', expected int"),
        ("widget:size=1,scale=big", "scale is 'big', expected float"),
        ("widget:size=1,fast=maybe", "fast is 'maybe', expected bool"),
        ("widget:size=1,limit=few", "limit is 'few', expected none or int"),
        ("widget:size=-1", "thing 'widget': size must not be negative, got -1"),
    ],
)
def test_what_cannot_be_created_says_why(registry: Registry[Thing], spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        registry.create(spec)


def test_a_refusal_by_the_class_itself_reaches_the_user() -> None:
    registry: Registry[Policy] = Registry("policy", Policy)
    registry.register(MarginalCost)
    assert registry.create("marginal:epsilon=0.5") == MarginalCost(epsilon=0.5)
    with pytest.raises(UserError, match=r"epsilon must be a finite number above 0, got 0\.0"):
        registry.create("marginal:epsilon=0")


@pytest.mark.parametrize("error", [KeyError("k"), ZeroDivisionError("by zero"), SystemExit(0)])
def test_whatever_a_class_raises_is_one_line(error: BaseException) -> None:
    @dataclass(frozen=True)
    class Sour:
        name: ClassVar[str] = "sour"

        def __post_init__(self) -> None:
            raise error

    registry: Registry[Sour] = Registry("thing")
    registry.register(Sour)
    with pytest.raises(UserError, match=f"^thing 'sour': {type(error).__name__}: "):
        registry.create("sour")


# --- registering ------------------------------------------------------------------------------------


def test_a_row_describes_what_the_user_may_set(registry: Registry[Thing]) -> None:
    (row,) = registry.describe()
    assert (row.name, row.aliases, row.provider) == ("widget", ("w",), "test 1.0")
    assert row.doc == "A widget with one parameter of each type."
    size, scale, *rest = row.parameters
    assert (size.name, size.type_name, size.required) == ("size", "int", True)
    assert (scale.name, scale.type_name, scale.default, scale.help) == ("scale", "float", 0.5, "how large")
    assert [each.name for each in rest] == ["fast", "label", "folder", "limit", "note"]


def test_names_come_in_the_order_of_registration_without_aliases() -> None:
    registry: Registry[Policy] = Registry("policy", Policy)
    for cls in ecospec_policies():
        registry.register(cls)
    assert registry.names()[:4] == ["confidence", "global-cost", "marginal-cost", "oracle"]
    assert registry.get("marginal") is registry.get("marginal-cost") is MarginalCost
    assert "marginal" in registry
    assert "nothing" not in registry


@pytest.mark.parametrize("taken", [{"name": "widget"}, {"name": "w"}, {"name": "new", "aliases": ("x", "widget")}])
def test_a_taken_name_or_alias_is_refused_naming_both_providers(
    registry: Registry[Thing], taken: dict[str, Any]
) -> None:
    newcomer = type("Newcomer", (Concrete,), taken)
    with pytest.raises(UserError, match=r"of other 2\.0 is already taken by test 1\.0"):
        registry.register(newcomer, provider="other 2.0")
    assert registry.names() == ["widget"]
    assert "x" not in registry


@dataclass
class Inexpressible(Concrete):
    """Needs what no text can give."""

    name: ClassVar[str] = "inexpressible"
    weights: list[float]


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Widget(1), "is not a class; return thing classes, not instances"),
        (int, r"builtins\.int does not derive from .*Thing"),
        (type("Unfinished", (Thing,), {"name": "unfinished"}), r"Unfinished does not define act"),
        (type("Nameless", (Concrete,), {}), "Nameless has no name of its own"),
        (type("Heir", (Widget,), {}), "Heir has no name of its own"),
        (type("Spaced", (Concrete,), {"name": "a b"}), "has the name 'a b', expected text without spaces"),
        (type("Colon", (Concrete,), {"name": "a:b"}), "has the name 'a:b'"),
        (type("Number", (Concrete,), {"name": 3}), "has the name 3"),
        (type("Aliased", (Concrete,), {"name": "a", "aliases": "b"}), "has aliases 'b', expected a tuple"),
        (type("Twice", (Concrete,), {"name": "a", "aliases": ("a",)}), "repeats a name"),
        (Inexpressible, "Inexpressible needs weights, which no text can express"),
    ],
)
def test_what_is_not_a_usable_class_is_refused(cls: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        registry_of(cls)
