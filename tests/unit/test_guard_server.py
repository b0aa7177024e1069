"""What the guard reads from vLLM's live objects and changes in them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

from voxtral_serve.guard import server


def test_tokens_are_recorded_for_who_asks() -> None:
    """Of one request and no other; a generator that is left is closed."""
    closed = []

    async def generate(pieces: Sequence[list[int]]) -> AsyncIterator[Any]:
        try:
            for piece in pieces:
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=piece)])
        finally:
            closed.append(True)

    recorded = server.recording(generate)

    async def consume(most: int) -> int:
        count = 0
        outputs = recorded([[1, 2], [3], [4]])
        async for _ in outputs:
            count += 1
            if count == most:
                await outputs.aclose()
                break
        return count

    async def run() -> tuple[list[int], list[int]]:
        async def request(most: int) -> list[int]:
            with server.recorded_tokens() as tokens:
                await consume(most)
            return tokens

        first, second = await asyncio.gather(request(9), request(2))
        assert await consume(9) == 3  # nobody asked
        return first, second

    assert asyncio.run(run()) == ([1, 2, 3, 4], [1, 2, 3])
    assert len(closed) == 3
