"""Finds the installed plugins and fills the registries of policies, predictors, drafters and suites.

The order is pluggy's usual one: hook specifications, then entry points, then the built-ins, which are
plugins like any other. A plugin that does not work is named in a warning and left out, so that it
cannot stop a run that does not use it; asking for it is an error that says what is wrong with it.

`ECOSPEC_PLUGINS` limits the entry points to a comma-separated list of their names; set but empty, it
allows none, as under test.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final, TypeVar

import pluggy

import ecospec.harness.drafters.hookspecs
import ecospec.policies.hookspecs
import ecospec.predictors.acceptance.hookspecs
import ecospec.predictors.hookspecs
import ecospec.suites.hookspecs
from ecospec.errors import UserError, nearest, one_line
from ecospec.harness.drafters.contract import Drafter
from ecospec.policies import AcceptanceNeed, ExpertNeed, Policy, Registry, parse_spec
from ecospec.predictors.acceptance.contract import AcceptanceEstimator
from ecospec.predictors.contract import Predictor
from ecospec.suites.task_file import SUFFIXES, InstalledSuites, TaskFile, find_task_file, read_task_file

ENTRY_POINT_GROUP: Final = "ecospec"
ENVIRONMENT_VARIABLE: Final = "ECOSPEC_PLUGINS"
BUILTIN_PROVIDER: Final = "ecospec"
BUILTIN_MODULES: Final = (
    "ecospec.policies.builtin",
    "ecospec.predictors.builtin",
    "ecospec.predictors.acceptance.builtin",
    "ecospec.harness.drafters.builtin",
)

T = TypeVar("T")
Found = TypeVar("Found")

logger = logging.getLogger("ecospec.plugins")


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin, or one class of a plugin, that was left out."""

    name: str
    """The entry point's name."""
    provider: str
    """The distribution that installed it, with its version."""
    error: str
    """What is wrong, in one line."""
    claims: frozenset[str]
    """What a user may type who means it."""
    kind: str = ""
    """A registry's kind, such as policy, or suite; empty when the plugin as a whole does not load."""
    part: str = ""
    """The class or file that was left out; empty when it was more than one."""

    def __str__(self) -> str:
        what = f"{self.part} of plugin" if self.part else "plugin"
        return f"{what} {self.name!r} ({self.provider}) was left out: {self.error}"


@dataclass(frozen=True)
class Plugins:
    """All that is installed, by name."""

    policies: Registry[Policy] = field(default_factory=lambda: Registry("policy", Policy))
    predictors: Registry[Predictor] = field(default_factory=lambda: Registry("predictor", Predictor))
    drafters: Registry[Drafter] = field(default_factory=lambda: Registry("drafter", Drafter))
    estimators: Registry[AcceptanceEstimator] = field(
        default_factory=lambda: Registry("acceptance estimator", AcceptanceEstimator)
    )
    suites: InstalledSuites = field(default_factory=InstalledSuites)
    broken: list[BrokenPlugin] = field(default_factory=list)

    def find_suite(self, name: str) -> TaskFile:
        """The task file of the suite of this name or path.

        Raises:
            UserError: there is none, it does not fit, or a broken plugin claims the name.
        """
        if name.endswith(SUFFIXES):  # a path belongs to no plugin
            return find_task_file(name)
        return self._found("suite", name, lambda: find_task_file(name, self.suites.paths), name in self.suites)

    def create_policy(self, spec: str) -> Policy:
        """The policy that a spec such as `marginal:epsilon=0.5` describes.

        Raises:
            UserError: see `Registry.create`; also when a broken plugin claims the name.
        """
        return self._create(self.policies, spec)

    def create_predictor(self, spec: str) -> Predictor:
        """The predictor that a spec describes; raises as `create_policy` does."""
        return self._create(self.predictors, spec)

    def create_drafter(self, spec: str) -> Drafter:
        """The drafter that a spec describes; raises as `create_policy` does."""
        return self._create(self.drafters, spec)

    def create_estimator(self, spec: str) -> AcceptanceEstimator:
        """The acceptance estimator that a spec describes; raises as `create_policy` does."""
        return self._create(self.estimators, spec)

    def _create(self, registry: Registry[T], spec: str) -> T:
        name, _ = parse_spec(spec)
        self._found(registry.kind, name, lambda: registry.get(name), name in registry)
        return registry.create(spec)

    def _found(self, kind: str, name: str, find: Callable[[], Found], known: bool) -> Found:
        """What `find` gives; raises what it raises, or that a broken plugin claims the name."""
        claimants = [
            plugin
            for plugin in self.broken
            if plugin.kind in ("", kind) and (name in plugin.claims or (name == plugin.name and not known))
        ]
        if claimants:
            raise UserError(
                f"{kind} {name!r}: {claimants[0]}; mend or uninstall it, or leave it out of {ENVIRONMENT_VARIABLE}"
            )
        try:
            return find()
        except UserError as error:
            if not self.broken:
                raise
            reasons = "; ".join(map(str, self.broken))
            raise UserError(f"{error}; it may belong to a broken plugin: {reasons}") from None


def load_plugins() -> Plugins:
    """Load every allowed plugin, warning about each that does not work.

    Raises:
        UserError: `ECOSPEC_PLUGINS` names a plugin that is not installed.
    """
    manager = pluggy.PluginManager("ecospec")
    manager.add_hookspecs(ecospec.policies.hookspecs)
    manager.add_hookspecs(ecospec.predictors.hookspecs)
    manager.add_hookspecs(ecospec.predictors.acceptance.hookspecs)
    manager.add_hookspecs(ecospec.harness.drafters.hookspecs)
    manager.add_hookspecs(ecospec.suites.hookspecs)

    plugins = Plugins()
    providers: list[tuple[str, str]] = []
    for entry_point in _allowed_entry_points():
        provider = _provider(entry_point)
        try:
            _register(manager, entry_point.load(), entry_point.name)
        except KeyboardInterrupt:  # the user's
            raise
        except BaseException as error:
            _leave_out(plugins, entry_point.name, provider, error)
        else:
            providers.append((entry_point.name, provider))

    for module in BUILTIN_MODULES:
        manager.register(importlib.import_module(module), module)

    # The built-ins' classes come first, so that it is the newcomer who is refused a taken name.
    for name, provider in [*((module, BUILTIN_PROVIDER) for module in BUILTIN_MODULES), *providers]:
        _collect(manager, plugins, name, provider)
    return plugins


def _allowed_entry_points() -> list[EntryPoint]:
    """Those that `ECOSPEC_PLUGINS` allows, in an order that does not depend on the installation."""
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    ordered = sorted(found, key=lambda each: (each.name, each.value, _provider(each)))
    allowed = os.environ.get(ENVIRONMENT_VARIABLE)
    if allowed is None:
        return ordered
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    for name in names:
        if name not in found.names:
            raise UserError(
                f"{ENVIRONMENT_VARIABLE} names {name!r}, which is not an installed plugin: {nearest(name, found.names)}"
            )
    return [entry_point for entry_point in ordered if entry_point.name in names]


def _provider(entry_point: EntryPoint) -> str:
    distribution = entry_point.dist
    return f"{distribution.name} {distribution.version}" if distribution else "unknown distribution"


def _register(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    """Register one plugin, or raise and leave the manager as it was.

    A misspelt hook or a forgotten `hookimpl` would otherwise be a plugin that does nothing, silently.
    """
    if isinstance(plugin, type):
        raise TypeError(f"the entry point names the class {plugin.__name__}; expected the module around it")
    if getattr(plugin, "__name__", "") in BUILTIN_MODULES:
        raise TypeError("the entry point names a built-in module; expected one of its own package")
    manager.register(plugin, name)
    try:
        manager.check_pending()
        if not manager.get_hookcallers(plugin):
            raise TypeError("it implements no hook; mark ecospec_policies with @ecospec.policies.hookimpl")
    except Exception:
        manager.unregister(plugin)
        raise


def _collect(manager: pluggy.PluginManager, plugins: Plugins, name: str, provider: str) -> None:
    """Call the hooks of one plugin, and register the classes and task files that it returns."""
    plugin = manager.get_plugin(name)
    others = [other for other in manager.get_plugins() if other is not plugin]
    registries: dict[str, Registry[Any] | InstalledSuites] = {
        "ecospec_policies": plugins.policies,
        "ecospec_predictors": plugins.predictors,
        "ecospec_estimators": plugins.estimators,
        "ecospec_drafters": plugins.drafters,
        "ecospec_suites": plugins.suites,
    }
    for hook, registry in registries.items():
        call = manager.subset_hook_caller(hook, remove_plugins=others)
        try:
            returned = call()
            if not returned and hasattr(plugin, hook):  # pluggy drops a None
                raise TypeError(f"{hook} returned nothing; expected a list of {_items(hook)}")
            classes = [cls for each in returned for cls in _as_list(hook, each)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            _leave_out(plugins, name, provider, error, kind=registry.kind)
            continue
        for cls in classes:
            try:
                _check_needs(cls)
                registry.register(cls, provider)
            except Exception as error:
                _leave_out(plugins, name, provider, error, claims=_names_of(cls), kind=registry.kind, part=_part(cls))


def _as_list(hook: str, returned: object) -> Iterable[Any]:
    if not isinstance(returned, list | tuple):
        raise TypeError(f"{hook} returned a {type(returned).__name__}, expected a list of {_items(hook)}")
    return returned


def _items(hook: str) -> str:
    return "paths of task files" if hook == "ecospec_suites" else "classes"


def _check_needs(cls: object) -> None:
    """A wrong kind of `needs` would otherwise show in the middle of a run, one of `acceptance` not at all."""
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        return
    defaults = {"needs": ExpertNeed.NONE, "acceptance": AcceptanceNeed.DRAFT, "needs_cost_model": False}
    for name, default in defaults.items():
        found, kind = getattr(cls, name, default), type(default)
        if not isinstance(found, kind):
            article = "an" if kind.__name__[0] in "AE" else "a"
            raise TypeError(f"{getattr(cls, '__name__', cls)}.{name} is {found!r}; expected {article} {kind.__name__}")


def _part(cls: object) -> str:
    """What to call a class or task file that is refused."""
    if isinstance(cls, str | Path):
        return " ".join(str(cls).split())
    return str(getattr(cls, "__name__", f"an object of type {type(cls).__name__}"))


def _names_of(cls: object) -> Iterator[str]:
    """The names that a refused class or task file gives itself; an inherited name is not meant."""
    if isinstance(cls, str | Path):
        try:
            yield read_task_file(Path(cls)).name
        except Exception:  # whatever it was refused for; by custom the file is named after the suite
            yield Path(cls).stem
    own = vars(cls) if isinstance(cls, type) else {}
    aliases = own.get("aliases", ())
    candidates = (own.get("name"), *(aliases if isinstance(aliases, tuple | list) else ()))
    yield from (name for name in candidates if isinstance(name, str))


def _leave_out(
    plugins: Plugins,
    name: str,
    provider: str,
    error: BaseException,
    claims: Iterable[str] = (),
    kind: str = "",
    part: str = "",
) -> None:
    if provider == BUILTIN_PROVIDER:
        raise error  # a bug of ours keeps its traceback
    message = one_line(error)
    reason = message if isinstance(error, UserError) else f"{type(error).__name__}: {message}"
    # A class claims the names it gives itself; what does not load at all may have had the plugin's own.
    claimed = frozenset(claims) or (frozenset[str]() if part else frozenset({name}))
    broken = BrokenPlugin(name, provider, reason, claimed, kind, part)
    plugins.broken.append(broken)
    logger.warning("%s", broken)
