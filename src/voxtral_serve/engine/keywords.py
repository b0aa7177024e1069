"""Custom words: phrases that a request prefers where the audio allows it. What both processes of vLLM know of them.

The API server's process makes the `table` of a request's phrases, which travels in SamplingParams.extra_args[KEYWORDS].
The engine adds to the logits of tokens that go on in a phrase, before it takes the likeliest token: on a GPU with
Model Runner V2 (keyword_processor), on a CPU with V1 (keyword_rows). `Automaton` is the rule, and the reference of the
GPU's kernel:

- The automaton of Aho and Corasick follows the text: its state is the longest beginning of a phrase that the text ends
  with. [STREAMING_PAD] and [STREAMING_WORD], which stand between words, leave the state as it is.
- After [STREAMING_WORD], by which the model says that a word has ended in the audio, a token that begins a phrase gets
  `first`, and one with which the phrase's next word begins `later`.
- After a token of text, one with which the word goes on in the phrase gets `later`.
- After a pad nothing changes: where the model hears no word, none is written.

A table is int32: the header, whose fields are numbered here, and the rows of NODE_ROWS, of as many numbers as there are
nodes. Nodes are numbered by their depth, the root is 0, and the children of a node follow each other.
"""

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from voxtral_serve import shims

KEYWORDS = "voxtral_serve_keywords"  # in SamplingParams.extra_args: the bytes of a table
PROCESSOR = "voxtral_serve.engine.keyword_processor:KeywordProcessor"  # of vLLM's logits_processors
MOST, LONGEST, LONGEST_TEXT = 100, 16, 200  # phrases, tokens of a phrase, characters of a phrase
FORMS = 4  # of a phrase: with and without a blank before it, as it is written and with a capital
MOST_NODES = 1 + FORMS * MOST * LONGEST
HEADER = 7
NODES, PAD, WORD, FIRST, LATER, NODE, SCANNED = range(HEADER)  # FIRST and LATER are float32
NODE_ROWS = 5
TOKEN, KIND, FAIL, CHILD, CHILDREN = range(NODE_ROWS)
INNER, SPACED, BARE = range(3)  # kinds of tokens: within a word; with a blank before it; the first, without one


class KeywordError(ValueError):
    """Phrases cannot be preferred. The message is for the client."""


class Strengths(NamedTuple):
    """What is added to logits: see the module. The defaults are chosen by `python -m pico.keywords`."""

    first: float = 3.0
    later: float = 4.0


class PhraseTokens(NamedTuple):
    """How a tokenizer writes phrases: text to ids without special tokens, an id to its bytes, and the ids of
    [STREAMING_PAD] and [STREAMING_WORD]."""

    encode: Callable[[str], list[int]]
    piece: Callable[[int], bytes]
    pad: int
    word: int

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> "PhraseTokens":
        """From vLLM's MistralTokenizer. Text never becomes a special token."""
        text = tokenizer.instruct.tokenizer
        pad, word = map(text.get_special_token, ("[STREAMING_PAD]", "[STREAMING_WORD]"))
        return cls(partial(text.encode, bos=False, eos=False), text.id_to_byte_piece, pad, word)

    def table(self, phrases: Iterable[str], strengths: Strengths = Strengths()) -> bytes | None:  # noqa: B008
        """The table of phrases; None without any. Raises KeywordError."""
        sequences = dict.fromkeys(form for phrase in cleaned(phrases) for form in self._forms(phrase))
        if not sequences:
            return None
        nodes = _nodes(sequences)
        header = np.zeros(HEADER, np.int32)
        header[[NODES, PAD, WORD]] = nodes.shape[1], self.pad, self.word
        header[FIRST : LATER + 1] = np.array(strengths, np.float32).view(np.int32)
        return header.tobytes() + nodes.tobytes()

    def _forms(self, phrase: str) -> list[tuple[tuple[int, int], ...]]:
        """(token, kind) of each token, for each way in which a text may have a phrase: a text or a sentence may begin
        with it. A form of more than LONGEST tokens is left out. Raises KeywordError if it is the usual one."""
        forms = list[tuple[tuple[int, int], ...]]()
        for written in dict.fromkeys((phrase, phrase[0].upper() + phrase[1:])):
            for text in (" " + written, written):
                tokens = self.encode(text)
                if len(tokens) > LONGEST and not forms:
                    raise KeywordError(f"{shown(phrase)} has {len(tokens)} tokens: expected at most {LONGEST}")
                if len(tokens) <= LONGEST:
                    first = SPACED if text[0] == " " else BARE
                    kinds = [SPACED if self.piece(token)[:1] == b" " else INNER for token in tokens[1:]]
                    forms.append(tuple(zip(tokens, (first, *kinds), strict=True)))
        return forms


def shown(phrase: str) -> str:
    """A phrase as an error repeats it, in ASCII and short."""
    return ascii(phrase[:40])[:60]


def cleaned(phrases: Iterable[str]) -> list[str]:
    """Each phrase once, with single blanks between its words; empty ones are left out. Raises KeywordError for too
    many, and for one that is too long, has control characters, or neither letter nor digit."""
    found = dict[str, None]()
    for number, phrase in enumerate(phrases):
        if number == MOST:
            raise KeywordError(f"more than {MOST} phrases: expected at most {MOST}")
        if len(phrase) > LONGEST_TEXT:
            raise KeywordError(f"{shown(phrase)} has {len(phrase):,} characters: expected at most {LONGEST_TEXT}")
        text = unicodedata.normalize("NFC", " ".join(phrase.split()))
        if not text:
            continue
        if any(unicodedata.category(each) in ("Cc", "Cs") for each in text):
            raise KeywordError(f"{shown(phrase)} has control characters: expected text")
        if not any(map(str.isalnum, text)):
            raise KeywordError(f"{shown(phrase)} has no letter and no digit: expected words")
        found[text] = None
    return list(found)


def _nodes(sequences: Iterable[Sequence[tuple[int, int]]]) -> np.ndarray:
    """int32 [NODE_ROWS, nodes] of sequences of (token, kind)."""
    children: list[dict[tuple[int, int], int]] = [{}]
    for sequence in sequences:
        node = 0
        for edge in sequence:
            if edge not in children[node]:
                children[node][edge] = len(children)
                children.append({})
            node = children[node][edge]
    nodes = np.zeros((NODE_ROWS, len(children)), np.int32)
    nodes[TOKEN, 0] = -1
    old = [0]  # numbers in `children`, in the order of the new ones
    edges = list[dict[tuple[int, int], int]]()  # new numbers of the children of each node
    for number, each in enumerate(old):
        nodes[CHILD, number], nodes[CHILDREN, number] = len(old), len(children[each])
        edges.append({edge: len(old) + place for place, edge in enumerate(children[each])})
        old.extend(children[each].values())
    for parent, below in enumerate(edges):  # a node's fail is less deep, so it is known
        for edge, number in below.items():
            nodes[TOKEN, number], nodes[KIND, number] = edge
            fail = int(nodes[FAIL, parent])
            while edge not in edges[fail] and fail:
                fail = int(nodes[FAIL, fail])
            nodes[FAIL, number] = edges[fail].get(edge, 0) if parent else 0
    return nodes


class Automaton:
    """A table, read. Raises ValueError for one that is not whole."""

    def __init__(self, table: bytes) -> None:
        header, rows = unpacked(table)
        self.pad, self.word = int(header[PAD]), int(header[WORD])
        self.strengths = Strengths(*header[FIRST : LATER + 1].view(np.float32).tolist())
        self._fail: list[int] = rows[FAIL].tolist()
        tokens, kinds = rows[TOKEN].tolist(), rows[KIND].tolist()
        below = zip(rows[CHILD].tolist(), rows[CHILDREN].tolist(), strict=True)
        self._children = [[(tokens[n], kinds[n], n) for n in range(first, first + count)] for first, count in below]

    def step(self, node: int, token: int, before: int) -> int:
        """The state after `token`, which came after the token `before`."""
        if token in (self.pad, self.word):
            return node
        begins = before in (self.pad, self.word)
        while True:
            for other, kind, child in self._children[node]:
                if other == token and (kind != BARE or begins):
                    return child
            if not node:
                return 0
            node = self._fail[node]

    def boost(self, logits: Any, node: int, last: int) -> None:
        """Add to the logits, float32 [vocabulary], of the token after `last`, which has led to `node`."""
        if last == self.pad:
            return
        first, later = self.strengths
        if last == self.word:
            logits[[token for token, *_ in self._children[0]]] += first
        if node:
            go_on = [token for token, kind, _ in self._children[node] if (kind != INNER) == (last == self.word)]
            logits[go_on] += later


def unpacked(table: bytes) -> tuple[np.ndarray, np.ndarray]:
    """(header, int32 [NODE_ROWS, nodes]) of a table. Raises ValueError for one that is not whole."""
    numbers = np.frombuffer(table, np.int32)
    nodes = (len(numbers) - HEADER) // NODE_ROWS
    if not 1 < nodes <= MOST_NODES or len(numbers) != HEADER + NODE_ROWS * nodes or numbers[NODES] != nodes:
        raise ValueError(f"{KEYWORDS} has {len(numbers)} numbers: expected a table of 2 to {MOST_NODES} nodes")
    return numbers[:HEADER], numbers[HEADER:].reshape(NODE_ROWS, nodes)


@lru_cache(maxsize=32)
def table(tokens: PhraseTokens, phrases: tuple[str, ...]) -> bytes | None:
    """`tokens.table`, made once for a client that sends the same phrases with every request. Raises KeywordError."""
    return tokens.table(phrases)


def usable(vllm_config: Any) -> bool:
    """Whether requests to the encode-once model may have phrases: not on vLLM 0.20.0, and on a GPU with Model Runner V2
    only."""
    from vllm.platforms import current_platform

    if shims.installed("vllm") == "0.20.0":
        return False
    return bool(getattr(vllm_config, "use_v2_model_runner", False)) or current_platform.is_cpu()


def table_of(params: Any) -> bytes | None:
    """The table that vLLM's SamplingParams of a request have; None for those without phrases."""
    return (getattr(params, "extra_args", None) or {}).get(KEYWORDS)
