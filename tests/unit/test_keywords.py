"""Custom words in the engine: the rule, its tables, and Model Runner V1's rows with drafts that are rejected."""

import random
import unicodedata
from types import SimpleNamespace
from typing import Any

import numpy as np
import phrases
import pytest
import torch
from phrases import BARE, PAD, SPACED, VOCABULARY, WORD, encode
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.gpu.sample.logits_processor import loader

from voxtral_serve.engine import config
from voxtral_serve.engine.keyword_rows import KeywordRows
from voxtral_serve.engine.keywords import (
    FORMS,
    KEYWORDS,
    LONGEST,
    LONGEST_TEXT,
    MOST,
    MOST_NODES,
    PROCESSOR,
    Automaton,
    KeywordError,
    cleaned,
    unpacked,
)


def made(*words: str) -> Automaton:
    table = phrases.TOKENS.table(words, phrases.STRENGTHS)
    assert table is not None
    return Automaton(table)


def after(automaton: Automaton, *tokens: int) -> np.ndarray:
    """What is added to the logits 0 of the token after these."""
    node, before = 0, PAD
    for token in tokens:
        node, before = automaton.step(node, token, before), token
    logits = np.zeros(VOCABULARY, np.float32)
    automaton.boost(logits, node, before)
    return logits


def added(**values: float) -> list[float]:
    """The same for letters: `a` with a blank before it, `_a` without."""
    logits = [0.0] * VOCABULARY
    for name, value in values.items():
        logits[encode(name.strip("_") if name[0] == "_" else " " + name)[0]] = value
    return logits


FIRST, LATER = phrases.STRENGTHS
A, B, C = (SPACED + number for number in range(3))
_A, _B, _C = (BARE + number for number in range(3))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((PAD,), {}),
        ((WORD,), {"a": FIRST, "_a": FIRST}),
        ((WORD, A), {"_b": LATER}),
        ((WORD, _A), {"_b": LATER}),  # a text may begin without a blank
        ((WORD, C), {}),
        ((WORD, C, _A), {}),  # the middle of another word
        ((WORD, A, PAD), {}),
        ((WORD, A, _B), {}),
        ((WORD, A, _B, PAD, PAD), {}),
        ((WORD, A, _B, PAD, WORD), {"a": FIRST, "_a": FIRST, "c": LATER}),
        ((WORD, A, _B, WORD, C, WORD), {"a": FIRST, "_a": FIRST}),
        ((WORD, A, _B, WORD, A, _B, WORD), {"a": FIRST, "_a": FIRST, "c": LATER}),
        ((A, _B, 8, WORD), {"a": FIRST, "_a": FIRST}),
    ],
)
def test_what_is_preferred_after(tokens: tuple[int, ...], expected: dict[str, float]) -> None:
    assert after(made("ab c"), *tokens).tolist() == added(**expected)


def test_states_are_the_longest_beginnings_of_phrases() -> None:
    """By comparison with all of them, in texts without a bare token after a blank one."""
    random_ = random.Random(1)
    reached = 0
    for _ in range(60):
        words = phrases.phrases(random_, 8)
        forms = [tuple(encode(" " + word)) for word in words]
        table = phrases.TOKENS.table(words)
        assert table is not None
        automaton, rows = Automaton(table), unpacked(table)[1]
        node, text, before = 0, [], WORD
        stream = list[int]()
        while len(stream) < 80:
            stream += random_.choice((random_.choice(forms), (WORD,), (PAD,), (random_.randrange(BARE, VOCABULARY),)))
        for token in stream:
            if token in range(BARE, SPACED) and before in (PAD, WORD):
                continue
            node, before = automaton.step(node, token, before), token
            text += [token] * (token not in (PAD, WORD))
            expected = max(
                (form[:n] for form in forms for n in range(len(form) + 1) if (*text,)[len(text) - n :] == form[:n]),
                key=len,
            )
            assert path(rows, node) == expected
            reached += len(expected) > 3
    assert reached > 500


def path(rows: np.ndarray, node: int) -> tuple[int, ...]:
    """The tokens that lead to a node."""
    tokens = list[int]()
    while node:
        tokens.append(int(rows[0, node]))
        (node,) = (each for each in range(rows.shape[1]) if rows[3, each] <= node < rows[3, each] + rows[4, each])
    return tuple(tokens[::-1])


@pytest.mark.parametrize("seed", range(20))
def test_with_drafts_the_rows_of_model_runner_v1_say_the_same(seed: int) -> None:
    """Requests with and without phrases in one batch; most drafts are right, and others are rejected."""
    random_ = random.Random(seed)
    tables = [phrases.table(random_) if number % 3 else None for number in range(5)]
    expected = [phrases.said(seed, table, 60) for table in tables]
    assert expected[0] == phrases.said(seed, None, 60) and all(each != expected[0] for each in expected[1:3])
    runner: Any = SimpleNamespace(requests={}, input_batch=SimpleNamespace())
    for number, table in enumerate(tables):
        sampling = SimpleNamespace(extra_args={KEYWORDS: table} if table else None)
        runner.requests[str(number)] = SimpleNamespace(sampling_params=sampling, num_prompt_tokens=len(phrases.PROMPT))
    processor = KeywordRows(runner)

    def boosted(requests: list[list[int]], drafts: list[list[int]], rows: list[phrases.Row]) -> np.ndarray:
        order = random_.sample(range(len(tables)), len(tables))  # the batch's, which changes between steps
        batch = runner.input_batch
        batch.req_ids, batch.spec_token_ids = [str(number) for number in order], [drafts[number] for number in order]
        batch.num_tokens_no_spec = [len(requests[number]) for number in order]
        batch.token_ids_cpu = np.full((len(order), 90), 8)
        for place, number in enumerate(order):
            batch.token_ids_cpu[place, : len(requests[number])] = requests[number]
        processor.update_state(None)
        values = np.stack([row.logits for row in rows])
        last = [max(n for n, row in enumerate(rows) if row.request == number) for number in order]
        others = [n for number in order for n, row in enumerate(rows) if row.request == number and n not in last]
        values[others] = processor.apply_with_spec_decode(
            torch.from_numpy(values[others]), [len(drafts[number]) for number in order]
        ).numpy()
        values[last] = processor.apply(torch.from_numpy(values[last])).numpy()
        return values

    random_drafts = random.Random(seed + 1)
    found = phrases.said_with_drafts([seed] * 5, 60, random_drafts, lambda number: expected[number], boosted)
    assert found == expected
    runner.requests.clear()
    processor.update_state(None)
    assert not processor.readers


# Model Runner V2, whose kernels tests/gpu/test_gpu_kernels.py compares with the rule


def of_v2(slots: int) -> Any:
    """The processor as vLLM's loader makes it."""
    (kind,) = loader._load_v2_logitsprocs_by_fqcns([PROCESSOR])
    state = SimpleNamespace(max_num_reqs=slots, device=torch.device("cpu"))
    return kind(None, state)


def asking(table: bytes | None) -> SamplingParams:
    return SamplingParams(extra_args={} if table is None else {KEYWORDS: table})


@pytest.mark.parametrize("before", [None, ["a.b:C"], ["a.b:C", PROCESSOR]])
def test_the_config_names_the_processor_for_model_runner_v2_alone(before: list[str] | None) -> None:
    for v2, expected in ((True, [*(["a.b:C"] if before else []), PROCESSOR]), (False, before)):
        model = SimpleNamespace(logits_processors=before)
        config._choose_processors(SimpleNamespace(model_config=model, use_v2_model_runner=v2))
        assert model.logits_processors == expected


def test_slots_of_model_runner_v2_are_used_again() -> None:
    processor = of_v2(3)
    long, short = (phrases.TOKENS.table(words) for words in (["ab c", "bc a", "c b a"], ["a"]))
    assert long and short
    assert not processor.add_request(1, asking(None))
    for table in (long, short, long):
        assert processor.add_request(1, asking(table))
        numbers = np.frombuffer(table, np.int32)
        assert processor.tables[1, : len(numbers)].tolist() == numbers.tolist()
        assert processor.wanted.tolist() == [False, True, False]
    assert not processor.add_request(1, asking(None))
    assert processor.tables[:, 0].tolist() == [0, 0, 0] and not processor.wanted.any()
    logits = torch.zeros(2, 8)
    assert processor.apply(logits, SimpleNamespace(idx_mapping_np=np.array([0, 1]))) is logits


def test_a_request_with_half_a_table_is_refused_where_it_arrives() -> None:
    validate = loader.build_custom_logits_processors_params_validator([PROCESSOR])
    table = phrases.table(random.Random(0))
    validate(asking(table))
    validate(asking(None))
    with pytest.raises(VLLMValidationError, match=KEYWORDS):
        validate(asking(table[:-4]))


# Phrases of clients


def test_phrases_are_cleaned() -> None:
    assert cleaned(["  New\t York ", "", "   ", "Zoe\u0308", "New York", "Zo\u00eb"]) == ["New York", "Zo\u00eb"]
    assert unicodedata.is_normalized("NFC", cleaned(["Zoe\u0308"])[0])
    assert phrases.TOKENS.table([" ", ""]) is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["a"] * (MOST + 1), f"more than {MOST} phrases"),
        (["a" * (LONGEST_TEXT + 1)], f"has {LONGEST_TEXT + 1} characters: expected at most {LONGEST_TEXT}"),
        (["a\0b"], "has control characters"),
        (["a\x1bb"], "has control characters"),
        (["..."], "has no letter and no digit"),
        (["a" * (LONGEST + 1)], f"has {LONGEST + 1} tokens: expected at most {LONGEST}"),
    ],
)
def test_phrases_that_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(KeywordError, match="expected") as refused:
        phrases.TOKENS.table(words)
    assert problem in str(refused.value)


def test_the_largest_table() -> None:
    """`encode` gives each phrase and form tokens of its own."""
    numbers = iter(range(100, 10**6))
    tokens = phrases.TOKENS._replace(encode=lambda text: [next(numbers) for _ in range(LONGEST)], piece=lambda _: b"a")
    table = tokens.table([f"p{number}" for number in range(MOST)])
    assert table is not None and unpacked(table)[1].shape == (5, MOST_NODES)
    assert MOST_NODES == 1 + MOST * FORMS * LONGEST


@pytest.mark.parametrize("change", [lambda table: table[:-4], lambda table: b"", lambda table: table + bytes(20)])
def test_a_table_that_is_not_whole_is_refused(change: Any) -> None:
    table = phrases.TOKENS.table(["ab"])
    assert table is not None
    with pytest.raises(ValueError, match=KEYWORDS):
        unpacked(change(table))
