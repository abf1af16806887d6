"""What a request holds, and how a policy's selection is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from ecospec.errors import UserError
from ecospec.policies import (
    DraftTree,
    ExpertNeed,
    ExpertSets,
    Policy,
    SelectionError,
    SelectionRequest,
    run_policy,
    validate_selection,
)

# 0 is the root, 1 and 2 are its children, 3 is 1's and 4 is 3's.
TREE = DraftTree(np.arange(5), np.array([-1, 0, 0, 1, 3]), np.array([1.0, 0.5, 0.4, 0.5, 0.5]))
REQUEST = SelectionRequest(TREE, budget=3)


@dataclass(frozen=True)
class Scripted(Policy):
    """Returns, or raises, what it is told.

    The rest of its docstring is not part of the description.
    """

    name: ClassVar[str] = "scripted"
    answer: Callable[[], Any]

    def select(self, request: SelectionRequest) -> Any:
        return self.answer()


@pytest.mark.parametrize(
    "selection",
    [[1, 0, 3], (0, 1, 3), np.array([3, 1, 0]), np.array([0, 1, 3], dtype=np.uint8), [np.int32(0), 3, 1]],
)
def test_a_valid_selection_comes_back_sorted(selection: Any) -> None:
    nodes = validate_selection("mine", REQUEST, selection)
    assert nodes.dtype == np.int64
    assert nodes.tolist() == [0, 1, 3]


def test_fewer_nodes_than_the_budget_are_fine() -> None:
    assert validate_selection("mine", REQUEST, [0]).tolist() == [0]


VIOLATIONS = [
    (None, r"selected nothing \(None\); expected a flat sequence"),
    (3, "selected something of type int; expected a flat sequence"),
    ("01", "selected something of type str; expected"),
    ({0, 1}, "selected something of type set; expected"),
    ((node for node in [0, 1]), "selected something of type generator; expected"),
    ([], "selected an empty selection; select at least the root"),
    (np.array([]), "selected an empty selection"),
    ([0, 1.0], "selected 1.0, a float; expected .*integers"),
    ([0, True], "selected True, a bool; expected"),
    ([0, np.True_], "selected np.True_, a bool; expected"),
    ([0, None], "selected None, a NoneType; expected"),
    ([[0, 1]], r"selected \[0, 1\], a list; expected a flat"),
    (np.array([0.0, 1.0]), "selected an array of float64; expected"),
    (np.array([True, True]), "selected an array of bool; expected"),
    (np.array([[0, 1]]), r"selected an array of shape \(1, 2\); expected"),
    (np.array(0), r"selected an array of shape \(\); expected"),
    ([0, 1, 1], r"selected node 1 more than once: \[0, 1, 1\]"),
    ([0, 5], "selected unknown node 5; the tree's nodes are 0 to 4"),
    ([0, -1], "selected unknown node -1; the tree's nodes are 0 to 4"),
    ([0, 10**30], "selected unknown node 10+; the"),
    ([0, 1, 2, 3], r"selected 4 nodes, over the budget of 3 \(root included\): \[0, 1, 2, 3\]"),
    ([1, 3], r"selected \[1, 3\] without the root, node 0"),
    ([0, 3], r"selected node 3 without its parent, node 1: \[0, 3\]"),
    ([4, 0, 1], r"selected node 4 without its parent, node 3: \[0, 1, 4\]"),
]


@pytest.mark.parametrize(("selection", "message"), VIOLATIONS)
def test_each_violation_names_the_policy_and_the_reason(selection: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=f"^policy 'mine' {message}"):
        validate_selection("mine", REQUEST, selection)


def test_running_a_policy_validates_what_it_returns() -> None:
    assert run_policy(Scripted(lambda: [1, 0]), REQUEST).tolist() == [0, 1]
    with pytest.raises(SelectionError, match="policy 'scripted' selected node 3 without its parent, node 1"):
        run_policy(Scripted(lambda: [0, 3]), REQUEST)


def test_a_raising_policy_is_named_with_the_error_its_place_and_its_cause() -> None:
    def fail() -> None:
        raise IndexError("two\nlines")

    pattern = r"^policy 'scripted' raised IndexError \(test_contract\.py, line \d+\): two lines$"
    with pytest.raises(SelectionError, match=pattern) as caught:
        run_policy(Scripted(fail), REQUEST)
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, MemoryError, RecursionError])
def test_whatever_a_policy_raises_is_its_error(kind: type[BaseException]) -> None:
    def leave() -> None:
        raise kind(0)

    with pytest.raises(SelectionError, match=rf"^policy 'scripted' raised {kind.__name__} \(test_contract\.py"):
        run_policy(Scripted(leave), REQUEST)


def test_a_policy_cannot_lift_its_own_budget() -> None:
    request = SelectionRequest(REQUEST.tree, budget=2)

    def lift() -> list[int]:
        object.__setattr__(request, "budget", 99)
        return [0, 1, 2]

    with pytest.raises(SelectionError, match="policy 'scripted' changed its request"):
        run_policy(Scripted(lift), request)


class Unreadable(list[int]):
    """A sequence that is there until it is read."""

    def __iter__(self) -> Any:
        raise KeyError("gone")


class Unspeakable(Exception):
    """An error whose text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "selection",
    [[0, 10**5000], np.ma.array([0, 1], mask=[False, True]), Unreadable([0, 1])],
    ids=["huge", "masked", "unreadable"],
)
def test_a_selection_that_cannot_be_read_is_refused_in_one_line(selection: Any) -> None:
    with pytest.raises(SelectionError, match=r"^policy 'mine' selected ") as caught:
        validate_selection("mine", REQUEST, selection)
    assert "\n" not in str(caught.value)


def test_messages_are_of_bearable_length_and_need_no_words() -> None:
    with pytest.raises(SelectionError) as caught:
        validate_selection("mine", REQUEST, [0] * 100_000)
    assert len(str(caught.value)) < 600

    def fail() -> None:
        raise Unspeakable

    with pytest.raises(SelectionError, match=r"raised Unspeakable .*: an error without a text"):
        run_policy(Scripted(fail), REQUEST)


def test_an_interrupt_is_not_the_policys_error() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_policy(Scripted(interrupt), REQUEST)


def test_the_description_is_the_first_paragraph_of_the_docstring() -> None:
    @dataclass(frozen=True)
    class Undocumented(Scripted):
        name: ClassVar[str] = "undocumented"

    assert Scripted.description == "Returns, or raises, what it is told."
    assert Undocumented.description == ""


def test_a_policy_is_abstract_and_needs_no_experts_unless_it_says_so() -> None:
    assert Scripted.needs is ExpertNeed.NONE
    with pytest.raises(TypeError, match="abstract"):
        Policy()  # type: ignore[abstract]


def test_node_scores_are_path_probabilities_unless_estimated() -> None:
    assert REQUEST.node_scores.tolist() == TREE.path_probs.tolist()
    estimate = np.array([1.0, 0.1, 0.2, 0.3, 0.4])
    assert SelectionRequest(TREE, 3, acceptance=estimate).node_scores.tolist() == estimate.tolist()


def test_the_initial_buffer_is_a_fresh_copy_of_what_is_covered() -> None:
    experts = ExpertSets.from_topk(np.zeros((1, 5, 1), dtype=int), num_experts=8)
    assert SelectionRequest(TREE, 3, experts).initial_buffer().tolist() == [0]
    request = SelectionRequest(TREE, 3, experts, covered=np.array([5], dtype=np.uint64))
    buffer = request.initial_buffer()
    buffer |= np.uint64(2)
    assert request.initial_buffer().tolist() == [5]


def test_reading_experts_that_were_not_asked_for_says_what_to_declare() -> None:
    for read in (REQUEST.path_footprints, REQUEST.initial_buffer):
        with pytest.raises(ValueError, match=r"declare needs = ExpertNeed\.PREDICTED"):
            read()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"budget": 0}, "at least 1, got 0"),
        ({"budget": True}, "at least 1, got True"),
        ({"experts": ExpertSets(np.zeros((4, 1), np.uint64), 1, 8)}, "for 4 nodes, but the tree has 5"),
        (
            {"experts": ExpertSets(np.zeros((5, 1), np.uint64), 1, 8), "covered": np.zeros(2, np.uint64)},
            "covered has 2 words, expected 1",
        ),
        ({"covered": np.zeros(1)}, "covered has dtype float64, expected uint64"),
        ({"acceptance": np.ones(4)}, "acceptance for 4 nodes, but the tree has 5"),
        ({"acceptance": np.array([1.0, 0.5, 0.5, 0.5, np.nan])}, "probabilities from 0 to 1"),
        ({"acceptance": np.array([1.0, 0.5, 0.5, 0.5, 1.1])}, "probabilities from 0 to 1"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelectionRequest(**{"tree": TREE, "budget": 3, **parts})
