"""Train the vocabulary of a small tekken.json (see mistral_layout/tekken.py), and read it without mistral-common.

The vocabulary is byte-pair encoding, trained on pico's own sentences. Its size is chosen so that a word with its
punctuation has about 1.3 tokens, as English has with the real vocabulary of 131,072 tokens. Therefore the share of
`[STREAMING_PAD]` in the output is realistic.
"""

import base64
import json
from collections.abc import Iterable
from pathlib import Path

import tiktoken

from mistral_layout import tekken
from mistral_layout.tekken import N_SPECIAL

# No token spans several of these: a word with the space before it, a run of punctuation, white space.
PATTERN = r" ?[A-Za-z']+| ?[^\sA-Za-z']+|\s+"


def train(sentences: Iterable[str], n_tokens: int) -> dict:
    """A tekken.json with `n_tokens` text tokens, including the 256 bytes, trained on `sentences`. Raises ValueError."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        sentences, trainers.BpeTrainer(vocab_size=n_tokens, initial_alphabet=alphabet, show_progress=False)
    )
    to_byte = {c: b for b, c in byte_level_characters().items()}
    merges = json.loads(bpe.to_str())["model"]["merges"]
    # two merges may spell the same token
    tokens = list(
        dict.fromkeys([bytes([b]) for b in range(256)] + [bytes(to_byte[c] for c in a + b) for a, b in merges])
    )
    if len(tokens) != n_tokens:
        raise ValueError(f"expected {n_tokens} text tokens, but the sentences gave {len(tokens)}")
    vocabulary = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode("utf-8", "replace")}
        for i, t in enumerate(tokens)
    ]
    return tekken.content(PATTERN, vocabulary)


def byte_level_characters() -> dict[int, str]:
    """Byte -> its printable character in GPT-2's byte-level alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


class TextTokenizer:
    """Encodes and decodes text with the vocabulary of a tekken.json. Training needs no mistral-common."""

    def __init__(self, content: dict):
        """`content` is the content of a tekken.json."""
        ranks = {base64.b64decode(t["token_bytes"]): t["rank"] for t in content["vocab"]}
        self._bpe = tiktoken.Encoding(
            "pico", pat_str=content["config"]["pattern"], mergeable_ranks=ranks, special_tokens={}
        )
        self.vocab_size = N_SPECIAL + len(ranks)

    @classmethod
    def from_file(cls, path: Path) -> "TextTokenizer":
        return cls(json.loads(path.read_text()))

    def encode(self, text: str) -> list[int]:
        return [N_SPECIAL + t for t in self._bpe.encode_ordinary(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, without special tokens."""
        return self._bpe.decode([i - N_SPECIAL for i in ids if i >= N_SPECIAL])
