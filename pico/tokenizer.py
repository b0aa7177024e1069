"""Learn the vocabulary of a small tekken.json (see mistral_layout/tekken.py), and read it without mistral-common.

The vocabulary is byte-pair encoding learned from pico's own sentences, of a size that makes a word take about 1.3
tokens with its punctuation, as the real 131,072-token vocabulary does for English. That keeps the share of
`[STREAMING_PAD]` in the output true to life.
"""

import base64
import json
from collections.abc import Iterable
from pathlib import Path

import tiktoken

from mistral_layout import tekken
from mistral_layout.tekken import N_SPECIAL

# A word with the space before it, a run of punctuation, or space: what no token may span.
PATTERN = r" ?[A-Za-z']+| ?[^\sA-Za-z']+|\s+"


def train(sentences: Iterable[str], n_tokens: int) -> dict:
    """A tekken.json of `n_tokens` text tokens (the 256 bytes among them) learned from `sentences`."""
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
        raise ValueError(f"{n_tokens} text tokens were asked for, and the sentences gave {len(tokens)}")
    vocabulary = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode("utf-8", "replace")}
        for i, t in enumerate(tokens)
    ]
    return tekken.content(PATTERN, vocabulary)


def byte_level_characters() -> dict[int, str]:
    """Byte -> the printable character that stands for it in GPT-2's byte-level alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


class TextTokenizer:
    """Words to token ids and back, from the text part of a tekken.json (mistral-common is not needed to train)."""

    def __init__(self, content: dict):
        """`content` is that of a tekken.json."""
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
        """Text of the ids; special tokens leave no trace."""
        return self._bpe.decode([i - N_SPECIAL for i in ids if i >= N_SPECIAL])
