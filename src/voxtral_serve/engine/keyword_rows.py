"""The phrases that requests prefer (keywords.py) in vLLM's Model Runner V1 on a CPU, where tokens are known at once.

V1 takes no processor of logits with drafts, but for its own of `min_tokens`: `KeywordRows` is one to its rejection
sampler, which then calls `apply_with_spec_decode` for the rows of drafts, and `apply` for the last rows.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.rejection_sampler import RejectionSampler

from voxtral_serve import shims
from voxtral_serve.engine.keywords import Automaton, table_of


class Reader:
    """The automaton of a request, and how many of its tokens it has read. The prompt is not read."""

    def __init__(self, table: bytes, prompt: int) -> None:
        self.automaton, self.node, self.scanned = Automaton(table), 0, prompt

    def advance(self, tokens: Sequence[int]) -> None:
        """Read what was added to the tokens of the request."""
        for place in range(self.scanned, len(tokens)):
            self.node = self.automaton.step(self.node, tokens[place], tokens[place - 1])
        self.scanned = len(tokens)

    def states(self, last: int, drafts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(state, token before) of each row: after the last token, and after each draft."""
        node = self.node
        yield node, last
        for draft in drafts:
            node, last = self.automaton.step(node, draft, last), draft
            yield node, last


class KeywordRows(MinTokensLogitsProcessor):
    """Of a runner of Model Runner V1, whose batch it reads."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.readers: dict[str, Reader] = {}

    @classmethod
    def attach(cls, runner: Any) -> None:
        """Have a runner call it in every step. Raises PatchError if vLLM is not as expected."""
        sampler = inspect.getsource(RejectionSampler.apply_logits_processors)
        if "isinstance(processor, MinTokensLogitsProcessor)" not in sampler:
            raise shims.PatchError(
                f"vllm {shims.installed('vllm')}: RejectionSampler.apply_logits_processors calls no processor of "
                f"min_tokens, by which drafts get preferred phrases. {shims.ADVICE}"
            )
        runner.input_batch.logitsprocs.non_argmax_invariant.append(cls(runner))

    def update_state(self, batch_update: Any) -> None:
        """Called before each step. What the requests have is in the runner's batch."""
        for request in [name for name in self.readers if name not in self.runner.requests]:
            del self.readers[request]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The last row of each request, float32 [requests, vocabulary], in place."""
        for place, reader, last, drafts in self._preferring():
            *_, (node, token) = reader.states(last, drafts)
            reader.automaton.boost(logits[place], node, token)
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: list[int]) -> torch.Tensor:
        """The rows of drafts, float32 [drafts of all requests, vocabulary], in place."""
        for place, reader, last, drafts in self._preferring():
            first, count = sum(num_draft_tokens[:place]), num_draft_tokens[place]
            for row, (node, token) in zip(range(first, first + count), reader.states(last, drafts), strict=False):
                reader.automaton.boost(logits[row], node, token)
        return logits

    def _preferring(self) -> Iterator[tuple[int, Reader, int, list[int]]]:
        """(place in the batch, reader, last token, drafts) of each request with phrases."""
        batch = self.runner.input_batch
        for place, name in enumerate(batch.req_ids):
            request = self.runner.requests[name]
            if (table := table_of(request.sampling_params)) is None:
                continue
            if name not in self.readers:
                self.readers[name] = Reader(table, request.num_prompt_tokens)
            tokens = batch.token_ids_cpu[place, : batch.num_tokens_no_spec[place]].tolist()
            self.readers[name].advance(tokens)
            yield place, self.readers[name], tokens[-1], batch.spec_token_ids[place]
