"""Live sessions with the server under proof."""

import asyncio
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager

from voxtral_serve.client.server import CONNECT_S
from voxtral_serve.measure import live
from voxtral_serve.measure.live import Session, Timeline
from voxtral_serve.measure.sound import TOKEN_S, Samples, Sound, pcm16
from voxtral_serve.prove.target import Target

SILENT_S = 120.0  # without an event after which a session has failed


def session(target: Target) -> AbstractAsyncContextManager[Session]:
    """Raises LiveError, as measure.live does."""
    return live.session(target.server, target.model, open_timeout_s=CONNECT_S, timeout_s=SILENT_S)


async def spoken(target: Target, samples: Samples, after_s: float = 0.0) -> Timeline:
    """One session at the pace of speech, which begins after some seconds."""
    await asyncio.sleep(after_s)
    async with session(target) as opened:
        await opened.speak(Sound([pcm16(samples)]))
        await opened.finish()
        return opened.timeline


async def at_once(target: Target, sounds: Iterable[Samples]) -> list[Timeline]:
    """Sessions side by side, which begin at different times within 80 ms. Raises the first error, ends the others."""
    every = list(sounds)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(spoken(target, sound, number / len(every) * TOKEN_S))
                for number, sound in enumerate(every)
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
