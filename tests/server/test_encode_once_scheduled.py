"""The encode-once model under a scheduler in need: prompts in chunks of 16 tokens, and a KV cache for half of what
runs, so that requests are preempted and begin again. Their tokens are those that the reference has for them alone.
"""

from collections.abc import Iterator
from typing import Any

import offline
import pytest

from pico import keywords, model

pytestmark = [pytest.mark.slow, pytest.mark.gpu]  # `make test` has preempted requests in test_drafter.py

AT_ONCE, CHUNK = 4, 16
CONTEXT = 192  # 11 s; of clips of 5 s, four do not fit


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with offline.crowded(CONTEXT, AT_ONCE, max_num_batched_tokens=CHUNK) as running:
        yield running


@pytest.fixture(scope="module")
def names() -> list[str]:
    return offline.varied(12)


@pytest.fixture(scope="module")
def expected(names: list[str]) -> dict[str, list[int]]:
    return dict(zip(names, offline.reference_tokens(names), strict=True))


def preemptions(llm: Any) -> float:
    return offline.counters(llm)["num_preemptions"]


def test_a_prompt_in_chunks(llm: Any, names: list[str], expected: dict[str, list[int]]) -> None:
    offline.steps(llm)
    assert offline.generate(llm, [offline.read(names[0])]) == [expected[names[0]]]
    first, second, third, *others = offline.steps(llm)
    assert (first, second, third) == (CHUNK, CHUNK, model.PROMPT_TOKENS - 2 * CHUNK)
    assert {*others} == {1}
    assert preemptions(llm) == 0


def test_more_requests_than_run_at_once_some_preempted(
    llm: Any, names: list[str], expected: dict[str, list[int]]
) -> None:
    before = preemptions(llm)
    assert offline.generate(llm, [offline.read(name) for name in names]) == [expected[name] for name in names]
    assert preemptions(llm) - before >= AT_ONCE


def test_custom_words_of_some(llm: Any, names: list[str], expected: dict[str, list[int]]) -> None:
    """Without drafts, as with them in test_drafter.py."""
    before = preemptions(llm)
    tables = [None if number % 3 else offline.table(*keywords.names()[:100]) for number in range(len(names))]
    audios = [offline.read(name) for name in names]
    preferred = offline.referred_preferring(audios, tables)
    assert sum(each != expected[name] for each, name in zip(preferred, names, strict=True)) >= 2
    assert offline.generate_preferring(llm, audios, tables) == preferred
    assert preemptions(llm) > before


def test_the_same_clip_in_every_place(llm: Any, names: list[str], expected: dict[str, list[int]]) -> None:
    longest = max(names, key=lambda name: len(expected[name]))
    before = preemptions(llm)
    assert offline.generate(llm, [offline.read(longest)] * (AT_ONCE + 2)) == [expected[longest]] * (AT_ONCE + 2)
    assert preemptions(llm) > before


def test_aborted_requests_leave_their_places_to_others(
    llm: Any, names: list[str], expected: dict[str, list[int]]
) -> None:
    """Two of four are aborted half-way, one in the midst of its prompt, and what waited takes their places."""
    engine, answers = llm.llm_engine, dict[str, list[int]]()

    def step() -> None:
        for output in engine.step():
            answers[output.request_id] = [*output.outputs[0].token_ids]

    for name in names:
        engine.add_request(name, offline.prompt(offline.read(name)), offline.sampling())
    aborted = [names[1], names[2], names[9]]
    for number, name in zip((1, 20, 60), aborted, strict=True):
        for _ in range(number):
            step()
        engine.abort_request([name])
    while engine.has_unfinished_requests():
        step()
    finished = {name: offline.without_eos(tokens) for name, tokens in answers.items() if name not in aborted}
    assert finished == {name: tokens for name, tokens in expected.items() if name not in aborted}
