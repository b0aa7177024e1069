"""The audio of a session on its way to the engine, cut into turns where a finder of turns says so."""

from collections.abc import AsyncIterator

from voxtral_serve.audio.level import StreamPower
from voxtral_serve.audio.voice import FRAME, RATE, VoiceStream
from voxtral_serve.guard.live.cuts import SAMPLE_BYTES
from voxtral_serve.guard.live.session import LiveSession
from voxtral_serve.guard.live.turns import Finder, SpeechEvent, TurnSign
from voxtral_serve.guard.live.voices import VoicePool

SLICE = RATE * SAMPLE_BYTES  # bytes that are looked at before they go to the engine


class TurnAudio:
    """
    fed    samples of the session so far
    begin  of them, those before the turn that is going on
    power  of the audio, for the times of words
    """

    def __init__(self, session: LiveSession, voices: VoicePool) -> None:
        self.session, self._voices = session, voices
        self.fed = self.begin = 0
        self.power = StreamPower(session.shape.rate_hz)
        self._finder: Finder | None = None
        self._stream = VoiceStream()

    def find(self, finder: Finder | None) -> None:
        """From here on, have this finder look for turns; None for a client that ends them itself."""
        if self._finder is None:
            self._stream = VoiceStream()
        self._finder = finder

    async def feed(self, pcm: bytes) -> AsyncIterator[SpeechEvent | TurnSign]:
        """Take PCM16, and yield what the finder finds, each when the audio up to it is with the session.

        Who iterates may call `cut` before it goes on: the turn then ends there, to the sample.
        """
        for first in range(0, len(pcm), SLICE):
            if self.session.ended:
                return
            part = pcm[first : first + SLICE]
            if self._finder is None:
                await self._give(part)
                continue
            start, offset = self.fed - len(self._stream.pending) // SAMPLE_BYTES, self.fed
            sent = 0
            for number, probability in enumerate(await self._voices.probabilities(self._stream, part)):
                begin = start + number * FRAME
                event = self._finder.step(float(probability), begin, begin + FRAME)
                if event is not None:
                    upto = (begin + FRAME - offset) * SAMPLE_BYTES
                    await self._give(part[sent:upto])
                    sent = upto
                    yield event
            await self._give(part[sent:])

    def cut(self) -> None:
        """The turn ends with the audio so far."""
        self.session.cut()
        self.begin = self.fed
        if self._finder is not None:
            self._finder.reset(self.fed)

    async def _give(self, pcm: bytes) -> None:
        if pcm:
            self.fed += len(pcm) // SAMPLE_BYTES
            self.power.take(pcm)
            await self.session.feed(pcm)
