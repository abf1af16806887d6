"""Loading plugins from (fake) installed distributions."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecospec.errors import UserError
from ecospec.harness.plugins import load_plugins
from ecospec.policies import MarginalCost

Install = Callable[..., None]

FINE = """
from dataclasses import dataclass
from typing import ClassVar
from ecospec.policies import Policy, hookimpl

@dataclass(frozen=True)
class RootOnly(Policy):
    '''The root and nothing else.'''
    name: ClassVar[str] = "{name}"
    aliases: ClassVar[tuple[str, ...]] = ({aliases})
    strength: int = 1

    def select(self, request):
        return [0]

@hookimpl
def ecospec_policies():
    return [RootOnly]
"""


def fine(name: str, aliases: str = "") -> str:
    return FINE.format(name=name, aliases=aliases)


def returning(expression: str) -> str:
    return (
        "from ecospec.policies import Confidence, Policy, hookimpl\n\n"
        f"@hookimpl\ndef ecospec_policies():\n    return {expression}\n"
    )


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution `<name>-dist 1.0` on the path, with one module and one entry point."""
    monkeypatch.delenv("ECOSPEC_PLUGINS")
    monkeypatch.syspath_prepend(tmp_path)
    modules: list[str] = []

    def install(name: str, source: str, attribute: str = "") -> None:
        module = f"fake_{name.replace('-', '_')}_plugin"
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        metadata = tmp_path / f"{name.replace('-', '_')}_dist-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[ecospec]\n{name} = {module}{attribute}\n")
        importlib.invalidate_caches()

    yield install
    for module in modules:
        sys.modules.pop(module, None)


def test_built_ins_are_plugins_and_are_all_there_without_any_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugins = load_plugins()
    assert plugins.policies.names() == [
        *("confidence", "global-cost", "marginal-cost", "oracle"),
        *("adaptive", "throughput", "optimal", "clairvoyant"),
    ]
    assert plugins.estimators.names() == ["draft", "isotonic", "learned"]
    assert plugins.broken == []
    assert plugins.create_policy("marginal:epsilon=0.5") == MarginalCost(epsilon=0.5)
    assert caplog.records == []


def test_an_installed_plugin_is_listed_and_created(install: Install) -> None:
    install("acme", fine("root-only", aliases="'ro',"))
    plugins = load_plugins()
    assert plugins.broken == []
    row = plugins.policies.describe()[-1]
    assert (row.name, row.aliases, row.provider) == ("root-only", ("ro",), "acme-dist 1.0")
    assert row.doc == "The root and nothing else."
    assert plugins.create_policy("ro:strength=3").strength == 3  # type: ignore[attr-defined]


def test_plugins_load_in_the_order_of_their_names(install: Install) -> None:
    for name in ("zeta", "alpha", "mid"):
        install(name, fine(f"{name}-policy"))
    assert load_plugins().policies.names()[-3:] == ["alpha-policy", "mid-policy", "zeta-policy"]


def test_the_environment_limits_which_plugins_load(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("alpha", fine("alpha-policy"))
    install("beta", "raise RuntimeError('must not be imported')")
    monkeypatch.setenv("ECOSPEC_PLUGINS", " alpha ,")
    plugins = load_plugins()
    assert plugins.policies.names()[8:] == ["alpha-policy"]
    assert plugins.broken == []
    monkeypatch.setenv("ECOSPEC_PLUGINS", "")
    assert load_plugins().policies.names()[8:] == []
    monkeypatch.setenv("ECOSPEC_PLUGINS", "alpa")
    with pytest.raises(UserError, match=r"ECOSPEC_PLUGINS names 'alpa'.*did you mean 'alpha'\?"):
        load_plugins()


BROKEN = {
    "import": ("import no_such_module", "", "ModuleNotFoundError: No module named 'no_such_module'"),
    "hook": (
        "from ecospec.policies import hookimpl\n\n"
        "@hookimpl\ndef ecospec_policies():\n    raise KeyError('two\\nlines')\n",
        "",
        "KeyError: 'two",
    ),
    "no list": (returning("Confidence"), "", "TypeError: ecospec_policies returned a ABCMeta, expected a li"),
    "instance": (returning("[Confidence()]"), "", "is not a class; return policy classes, not instances"),
    "no policy": (returning("[int]"), "", "builtins.int does not derive from ecospec.policies.contract.Pol"),
    "nameless": (
        returning("[type('Mine', (Confidence,), {})]"),
        "",
        "Mine has no name of its own; set name",
    ),
    "no select": (returning("[type('Mine', (Policy,), {'name': 'mine'})]"), "", "does not define select"),
    "no hookimpl": ("def ecospec_policies():\n    return []\n", "", "it implements no hook; mark"),
    "misspelt hook": (
        "from ecospec.policies import hookimpl\n\n@hookimpl\ndef ecospec_policy():\n    return []\n",
        "",
        "PluginValidationError: unknown hook 'ecospec_policy'",
    ),
    "leaves": ("import sys\nsys.exit(0)", "", "SystemExit: 0"),
    "base exception": ("raise BaseException('odd')", "", "BaseException: odd"),
    "speechless": (
        "class E(Exception):\n    def __str__(self):\n        raise SystemExit(0)\nraise E",
        "",
        "E: an error without a text",
    ),
    "leaves in the hook": (
        "from ecospec.policies import hookimpl\n\n@hookimpl\ndef ecospec_policies():\n    raise SystemExit('no')\n",
        "",
        "SystemExit: no",
    ),
    "no return": (
        "from ecospec.policies import hookimpl\n\n@hookimpl\ndef ecospec_policies():\n    []\n",
        "",
        "ecospec_policies returned nothing; expected a list of classes",
    ),
    "wrong needs": (
        returning("[type('Mine', (Confidence,), {'name': 'mine', 'needs': ['predicted']})]"),
        "",
        "Mine.needs is ['predicted']; expected an ExpertNeed",
    ),
    "wrong acceptance": (
        returning("[type('Mine', (Confidence,), {'name': 'mine', 'acceptance': 'estimated'})]"),
        "",
        "Mine.acceptance is 'estimated'; expected an AcceptanceNeed",
    ),
    "class": (fine("mine"), ":RootOnly", "names the class RootOnly; expected the module around it"),
}


@pytest.mark.parametrize(("source", "attribute", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_plugin_is_named_once_and_left_out(
    install: Install, caplog: pytest.LogCaptureFixture, source: str, attribute: str, reason: str
) -> None:
    install("a-broken", source, attribute)
    install("b-fine", fine("fine-policy"))
    plugins = load_plugins()
    assert plugins.policies.names()[8:] == ["fine-policy"]
    (broken,) = plugins.broken
    assert (broken.name, broken.provider) == ("a-broken", "a-broken-dist 1.0")
    assert reason in broken.error
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert re.match(r"([\w ]+ of )?plugin 'a-broken' \(a-broken-dist 1\.0\) was left out: ", message)
    assert "\n" not in message

    for unaffected in ("fine-policy", "confidence"):
        assert plugins.create_policy(unaffected).name == unaffected
    with pytest.raises(UserError, match=r"policy 'a-broken': .*plugin 'a-broken' .* was left out"):
        plugins.create_policy("a-broken")
    with pytest.raises(UserError, match=r"unknown policy 'else': .*; it may belong to a broken plugin: .*'a-broken'"):
        plugins.create_policy("else")


@pytest.mark.parametrize(("name", "aliases"), [("marginal", ""), ("mine", "'confidence',")])
def test_a_plugin_cannot_take_a_built_in_name(
    install: Install, caplog: pytest.LogCaptureFixture, name: str, aliases: str
) -> None:
    install("thief", fine(name, aliases))
    plugins = load_plugins()
    assert plugins.policies.names()[8:] == []
    assert "of thief-dist 1.0 is already taken by ecospec" in plugins.broken[0].error
    assert len(caplog.records) == 1
    # Which of the two did the user mean? Running either in silence could report the wrong numbers.
    with pytest.raises(
        UserError, match=f"policy '{name}': RootOnly of plugin 'thief'.*leave it out of ECOSPEC_PLUGINS"
    ):
        plugins.create_policy(name)
    assert plugins.create_policy("global-cost").name == "global-cost"


def test_the_first_of_two_plugins_keeps_a_name_and_asking_for_it_is_an_error(install: Install) -> None:
    install("beta", fine("same"))
    install("alpha", fine("same"))
    plugins = load_plugins()
    assert plugins.policies.describe()[-1].provider == "alpha-dist 1.0"
    assert "of beta-dist 1.0 is already taken by alpha-dist 1.0" in plugins.broken[0].error
    with pytest.raises(UserError, match="plugin 'beta'"):
        plugins.create_policy("same")


def test_one_bad_class_does_not_take_the_good_ones_with_it(install: Install) -> None:
    install("mixed", fine("good").replace("[RootOnly]", "[int, RootOnly]"))
    plugins = load_plugins()
    assert plugins.policies.names()[8:] == ["good"]
    assert len(plugins.broken) == 1
    assert str(plugins.broken[0]).startswith("int of plugin 'mixed' (mixed-dist 1.0) was left out: ")
    assert plugins.create_policy("good").name == "good"


def test_a_bad_class_does_not_block_a_good_one_of_the_plugins_name(install: Install) -> None:
    install("good", fine("good").replace("[RootOnly]", "[type('Nameless', (RootOnly,), {}), RootOnly]"))
    plugins = load_plugins()
    assert "Nameless has no name of its own" in plugins.broken[0].error
    assert plugins.create_policy("good").name == "good"


PREDICTOR = """
from ecospec.policies import hookimpl
from ecospec.predictors.contract import Predictor

class Guess(Predictor):
    name = "{name}"

    def bind(self, target):
        raise NotImplementedError

@hookimpl
def ecospec_predictors():
    return [Guess]
"""


def test_predictors_come_through_the_same_door(install: Install) -> None:
    install("guess", PREDICTOR.format(name="guess"))
    plugins = load_plugins()
    assert plugins.broken == []
    assert plugins.predictors.names() == ["learned", "feature", "token-frequency", "oracle", "noisy-oracle", "guess"]
    assert type(plugins.create_predictor("guess")).__name__ == "Guess"


def test_a_refused_predictor_does_not_stand_in_the_way_of_a_policy_of_that_name(install: Install) -> None:
    install("thief", PREDICTOR.format(name="oracle"))
    plugins = load_plugins()
    with pytest.raises(UserError, match=r"predictor 'oracle': .* of plugin 'thief'"):
        plugins.create_predictor("oracle")
    assert plugins.create_policy("oracle").name == "oracle"
