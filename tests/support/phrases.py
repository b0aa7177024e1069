"""Phrases of a toy tokenizer, a toy model whose tokens depend on all before, and what it says with and without drafts.

A letter is a token, and so is a blank with a letter. With few letters, phrases overlap in every way.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from voxtral_serve.engine.keywords import Automaton, PhraseTokens, Strengths

PAD, WORD, LETTERS, BARE = 0, 1, "abc", 2
SPACED = BARE + len(LETTERS)
VOCABULARY = SPACED + len(LETTERS) + 2  # and two that no phrase has
PROMPT = [7, *[PAD] * 4]
STRENGTHS = Strengths(1.25, 1.5)


def encode(text: str) -> list[int]:
    return [
        LETTERS.index(letter) + (SPACED if text[:place].endswith(" ") else BARE)
        for place, letter in enumerate(text.lower())
        if letter != " "
    ]


def piece(token: int) -> bytes:
    return (" " * (token >= SPACED) + LETTERS[(token - BARE) % len(LETTERS)]).encode()


TOKENS = PhraseTokens(encode, piece, PAD, WORD)


def phrases(random: random.Random, most: int) -> list[str]:
    """Of one to three words, none of them new to most."""
    words = ["".join(random.choices(LETTERS, k=random.randint(1, 3))) for _ in range(6)]
    return [" ".join(random.choices(words, k=random.randint(1, 3))) for _ in range(random.randint(1, most))]


def table(random: random.Random, most: int = 8) -> bytes:
    made = TOKENS.table(phrases(random, most), STRENGTHS)
    assert made is not None
    return made


def logits(tokens: Sequence[int], seed: int) -> np.ndarray:
    """float32 [VOCABULARY] of the token after these, in steps of 1/8, so that sums are exact and some are equal."""
    made = np.random.default_rng([seed, *tokens]).normal(size=VOCABULARY)
    return np.round(made * 8).astype(np.float32) / 8


def preferred(tokens: Sequence[int], seed: int, made: bytes | None) -> np.ndarray:
    """The same with a table, by the rule alone: from the first token on."""
    values = logits(tokens, seed)
    if made is not None:
        automaton, node = Automaton(made), 0
        for place in range(len(PROMPT), len(tokens)):
            node = automaton.step(node, tokens[place], tokens[place - 1])
        automaton.boost(values, node, tokens[-1])
    return values


def said(seed: int, made: bytes | None, count: int) -> list[int]:
    """The likeliest tokens, one at a time."""
    tokens = [*PROMPT]
    while len(tokens) < len(PROMPT) + count:
        tokens.append(int(preferred(tokens, seed, made).argmax()))
    return tokens


class Row(NamedTuple):
    """Of a step: the request's number, its tokens, the drafts before the row, and the row's logits."""

    request: int
    tokens: list[int]
    drafts: list[int]
    logits: np.ndarray


def said_with_drafts(
    seeds: Sequence[int],
    count: int,
    random: random.Random,
    truth: Callable[[int], list[int]],
    boosted: Callable[[list[list[int]], list[list[int]], list[Row]], np.ndarray],
) -> list[list[int]]:
    """The tokens of several requests in one batch, with drafts of which most are right.

    truth    (number) -> tokens that the drafts are taken from
    boosted  (tokens of each request, drafts of each, rows) -> logits [rows, VOCABULARY] with what is preferred
    """
    requests = [[*PROMPT] for _ in seeds]
    while any(len(tokens) < len(PROMPT) + count for tokens in requests):
        drafts = []
        for number, tokens in enumerate(requests):
            right = truth(number)[len(tokens) : len(tokens) + random.randint(0, 5)]
            drafts.append([each if random.random() < 0.8 else random.randrange(VOCABULARY) for each in right])
        rows = [
            Row(number, tokens, some[:place], logits([*tokens, *some[:place]], seeds[number]))
            for number, (tokens, some) in enumerate(zip(requests, drafts, strict=True))
            for place in range(len(some) + 1)
        ]
        values = boosted(requests, drafts, rows)
        for number, (tokens, some) in enumerate(zip(requests, drafts, strict=True)):
            chosen = [int(values[place].argmax()) for place, row in enumerate(rows) if row.request == number]
            right = next((place for place, draft in enumerate(some) if draft != chosen[place]), len(some))
            tokens += chosen[: right + 1]
    return [tokens[: len(PROMPT) + count] for tokens in requests]
