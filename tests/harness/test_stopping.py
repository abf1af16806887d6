"""Where an output ends, token by token and inside a block."""

from __future__ import annotations

import pytest
from tiny_models import Letters

from ecospec.errors import UserError
from ecospec.harness.stopping import EXTRA_TOKENS, StopRule, token_limit


def ids(text: str) -> list[int]:
    return [Letters.alphabet.index(letter) for letter in text]


def rule(limit: int = 20, *, eos: str = "", stop: tuple[str, ...] = ()) -> StopRule:
    return StopRule(Letters(), limit, frozenset(ids(eos)), stop)


def test_a_block_is_cut_behind_its_eos() -> None:
    ends = rule(eos="Z")
    assert ends.take(ids("AB")) == 2
    assert ends.reason is None
    assert ends.take(ids("CZDE")) == 2
    assert (ends.reason, ends.tokens, ends.text(), ends.remaining) == ("eos", ids("ABCZ"), "ABC", 0)


def test_a_block_is_cut_behind_the_token_that_completes_a_stop_sequence() -> None:
    ends = rule(stop=("CD", "EF"))
    ends.take(ids("AB"))
    assert ends.take(ids("CDEF")) == 2
    assert (ends.reason, ends.tokens, ends.text()) == ("stop", ids("ABCD"), "AB")


def test_a_stop_sequence_across_blocks_is_found() -> None:
    ends = rule(stop=("BCD",))
    assert [ends.take(ids("AB")), ends.take(ids("C")), ends.take(ids("DEF"))] == [2, 1, 1]
    assert ends.text() == "A"


def test_a_stop_sequence_longer_than_the_block_window_is_found() -> None:
    stop = "A" * 12
    ends = rule(limit=60, stop=(stop,))
    ends.take(ids("B" * (EXTRA_TOKENS + 20)))
    assert ends.take(ids(stop + "C")) == 12
    assert ends.text() == "B" * (EXTRA_TOKENS + 20)


@pytest.mark.parametrize("stop", [("CD", "BCD"), ("BCD", "CD")])
def test_the_text_is_cut_before_the_first_of_stop_sequences_that_end_together(stop: tuple[str, str]) -> None:
    ends = rule(stop=stop)
    ends.take(ids("ABCDE"))
    assert (ends.tokens, ends.text()) == (ids("ABCD"), "A")


def test_a_token_can_complete_a_stop_sequence_inside_itself() -> None:
    class Words(Letters):
        def decode(self, tokens):  # type: ignore[no-untyped-def]
            return "".join(("Hello", " wor.\n\nld", "!")[token] for token in tokens)

    ends = StopRule(Words(), 9, frozenset(), ("\n\n",))
    assert ends.take([0, 1, 2]) == 2
    assert (ends.tokens, ends.text()) == ([0, 1], "Hello wor.")


def test_the_limit_cuts_a_block() -> None:
    ends = rule(limit=3)
    assert ends.take(ids("AB")) == 2
    assert ends.remaining == 1
    assert ends.take(ids("CDE")) == 1
    assert (ends.reason, ends.text(), ends.remaining) == ("length", "ABC", 0)


@pytest.mark.parametrize(("eos", "stop", "reason"), [("C", (), "eos"), ("", ("BC",), "stop")])
def test_a_better_reason_at_the_limit_is_given(eos: str, stop: tuple[str, ...], reason: str) -> None:
    ends = rule(limit=3, eos=eos, stop=stop)
    ends.take(ids("ABC"))
    assert ends.reason == reason


def test_an_output_that_runs_to_the_limit_keeps_its_text() -> None:
    ends = rule(limit=2, eos="Z", stop=("XY",))
    ends.take(ids("AX"))
    assert ends.text() == "AX"


def test_prompt_and_output_together_stay_within_the_context() -> None:
    assert token_limit(90, 40, 96, "p") == 6
    assert token_limit(50, 40, 96, "p") == 40
    assert token_limit(95, 40, 96, "p") == 1
    for tokens in (96, 97):
        with pytest.raises(UserError, match=rf"prompt 'p' has {tokens} tokens; expected fewer than .* of 96"):
            token_limit(tokens, 40, 96, "p")
