"""The sentences that pico learns from: plain, well formed where a rule can tell, split once and for all."""

import random
import re
from collections import Counter
from itertools import pairwise

import pytest

from pico import text

SENTENCE = re.compile(r"[A-Z][A-Za-z']*(,? [A-Za-z']+)*[.?]")
# By letter, but: a uniform, a useful hat, a ukulele, a one way ticket, an hour, an honest man.
AN = re.compile(r"(?!uni|use|uku|one\b)[aeiou]|hour|honest")


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    return text.passage(random.Random(7), 60_000)


def test_only_words_commas_and_a_full_stop_or_question_mark(sentences):
    assert [s for s in sentences if not SENTENCE.fullmatch(s)] == []


def test_lengths(sentences):
    lengths = [len(s.split()) for s in sentences]
    assert min(lengths) >= 2
    assert max(lengths) <= text.MAX_WORDS
    assert 8 < sum(lengths) / len(lengths) < 11


def test_vocabulary_is_exact_large_and_common(sentences):
    counts = Counter(word for s in sentences for word in text.words(s))
    vocabulary = text.vocabulary()
    assert set(counts) == set(vocabulary)
    assert 2_400 <= len(vocabulary) <= 4_000
    assert min(counts.values()) >= 7  # a word is due about 18 times here, 60 times in 200,000 sentences


def test_sentences_seldom_repeat(sentences):
    assert len(set(sentences)) > 0.98 * len(sentences)


def test_a_before_consonants_and_an_before_vowels(sentences):
    pairs = {pair for s in sentences for pair in pairwise(text.words(s)) if pair[0] in ("a", "an")}
    assert len(pairs) > 500
    assert {pair for pair in pairs if (pair[0] == "an") != bool(AN.match(pair[1]))} == set()


def test_no_word_twice_in_a_row_unless_it_is_a_number(sentences):
    numbers = set(text.LISTS["digit"].split())
    doubled = {a for s in sentences for a, b in pairwise(s.split()) if a == b}
    assert doubled <= numbers | {"twenty"}  # nineteen twenty, twenty twenty one


def test_every_slot_is_defined_and_every_definition_is_used():
    source = [
        *text.LISTS.values(),
        *text.RULES.values(),
        *text.SENTENCES.values(),
        *text.OPENERS.values(),
        text.VERBS,
    ]
    used = {match[2] for part in source for match in text._SLOT.finditer(part)}
    assert used == {*text.LISTS, *text.RULES, "do", "strong"}


@pytest.mark.parametrize(
    ("entry", "form", "expected"),
    [
        ("stop the car", "ed", "stopped the car"),
        ("carry it", "ed", "carried it"),
        ("carry it", "ing", "carrying it"),
        ("tie a rope", "ing", "tying a rope"),
        ("bake", "ing", "baking"),
        ("fix it", "ed", "fixed it"),
        ("forget", "ing", "forgetting"),
        ("write a letter", "en", "written a letter"),
        ("go home", "s", "goes home"),
        ("play chess", "s", "plays chess"),
        ("hot dog", "pl", "hot dogs"),
        ("cherry", "pl", "cherries"),
        ("wolf", "pl", "wolves"),
        ("aunt", "own", "aunt's"),
    ],
)
def test_inflection(entry, form, expected):
    assert text.inflect(entry, form) == expected


def test_same_seed_same_sentences():
    assert text.passage(random.Random(3), 200) == text.passage(random.Random(3), 200)
    assert text.passage(random.Random(3), 200) != text.passage(random.Random(4), 200)


@pytest.mark.slow
def test_held_out_sentences_are_another_set(sentences):
    held_out = text.passage(random.Random(11), 2_000, held_out=True)
    assert all(text.is_held_out(s) for s in held_out)
    assert set(held_out).isdisjoint(sentences)


def test_the_split_looks_at_words_only():
    plain = "is it true that my sister called yesterday"
    assert text.is_held_out(plain) == text.is_held_out("Is it true, that my sister called yesterday?")


def test_the_split_never_moves():
    drawn = [text._draw(random.Random(seed)) for seed in range(4_000)]
    assert sum(map(text.is_held_out, drawn)) == pytest.approx(100, abs=40)
    assert text.is_held_out("As far as I know, the sixteenth electrician packed the backpack.")
    assert not text.is_held_out("As far as I know, the sixteenth electrician packed the suitcase.")
