"""The middleware `Guard`: checks each request, has vLLM answer what is valid, and logs one line each.

The guard rejects invalid requests with an error in OpenAI's format: unknown paths, a missing or wrong key, bodies that
are too large, files that are not audio or too long, URLs that vLLM would fetch, and requests that exceed the queue.
The samples of a valid upload go to vLLM's engine client; other valid requests go to vLLM's routes, chats with their
audio decoded. A request enters the queue when its body is complete; before that, the limits of `body` apply.

What the server serves decides which requests it has: `transcription.TranscriptionRequest` before vLLM's speech-to-text,
`speech.request.SpeechRequest` before vLLM-Omni's Voxtral TTS and VoxCPM2.

vLLM runs a config's middleware before its own. Therefore the guard checks the key before it reads a body, with vLLM's
function; vLLM checks it again. With VOXTRAL_SERVE_KEYS, vLLM has no key, and `keyring` checks it alone. `limits`
describes the environment variables.
"""

import asyncio

from voxtral_serve.guard.asgi import App, GoneError, Message, Receive, Send
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.origins import own_names
from voxtral_serve.guard.request import Facts, Frontend, Request
from voxtral_serve.guard.server import attach, drifted
from voxtral_serve.guard.speech.facts import SpeechFacts
from voxtral_serve.guard.speech.request import SpeechRequest
from voxtral_serve.guard.transcription import TranscriptionRequest
from voxtral_serve.logs import SERVED

NAME = "voxtral_serve.guard"


class Guard(Frontend):
    """The middleware: one of each API process of vLLM."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self.requests: type[Request] = TranscriptionRequest

    def begin(self, facts: Facts) -> None:
        """Serve: vLLM has started."""
        self.requests = SpeechRequest if isinstance(facts, SpeechFacts) else TranscriptionRequest
        self.facts = facts
        if facts.verify is None and facts.keys is None:
            own_names()  # asked for now, as it may take seconds
        self.metrics.most.set(facts.most_in_flight)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope.setdefault(NAME, self) is not self:  # named in the config and on the command line: the outer one acts
            await self.app(scope, receive, send)
            return
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        request = self.requests(self, scope, receive, send)
        before = SERVED.set(served := {"request_id": request.id})
        try:
            await request.serve()
        except RefusedError as error:
            await request.refuse(error)
        except GoneError:
            pass
        except asyncio.CancelledError:  # by uvicorn, once the grace period is over
            if request.answering:
                raise
            request.arriving = False  # there is no time to receive the rest
            await request.refuse(RefusedError(503, "the server is stopping: send this again", "stopping"))
        except Exception:
            if not request.gone:  # its client has left: what follows of that is no failure
                await request.crash()
        finally:
            request.report()
            served.clear()
            SERVED.reset(before)

    async def _lifespan(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            facts = attach(scope["app"].state, self.threads)
            self.begin(facts)
        except Exception as error:  # of a vLLM that is not as expected: uvicorn logs the message and exits
            await send({"type": "lifespan.startup.failed", "message": drifted(error)})
            return
        watchers = [asyncio.create_task(each) for each in facts.watches()]
        try:
            await self.app(scope, receive, send)
        finally:
            for each in watchers:
                each.cancel()
            self.facts = None
            await facts.aclose()
            self.threads.shutdown(wait=False)
