"""What the guard changes in vLLM's live objects: the recording of generated tokens."""

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

# The list that gets the tokens of the request that is being served; None if nobody asked for them
_TOKENS: ContextVar[list[int] | None] = ContextVar("_TOKENS", default=None)


@contextlib.contextmanager
def recorded_tokens() -> Iterator[list[int]]:
    """A list that gets the tokens which `recording` sees for calls within the context."""
    tokens: list[int] = []
    before = _TOKENS.set(tokens)
    try:
        yield tokens
    finally:
        _TOKENS.reset(before)


def recording(generate: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's EngineClient.generate, whose tokens also go to the list of `recorded_tokens` at the time of the call."""

    @functools.wraps(generate)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        outputs, kept = generate(*args, **kwargs), _TOKENS.get()
        return outputs if kept is None else _kept(outputs, kept)

    return recorded


async def _kept(outputs: Any, kept: list[int]) -> AsyncIterator[Any]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            # Each output has all tokens (FINAL_ONLY) or the new ones (DELTA): the two kinds that vLLM's transcription
            # asks its engine for.
            kept.extend(output.outputs[0].token_ids)
            yield output
