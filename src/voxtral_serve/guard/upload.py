"""The stages of an upload: form, fields, clip and pieces in a thread; then ask and answer in the event loop."""

import asyncio
import contextlib
from typing import NamedTuple

from voxtral_serve.audio.speech import Detector
from voxtral_serve.guard import clip, fields, form, pieces
from voxtral_serve.guard.answer import EventWriter, response
from voxtral_serve.guard.asgi import App, Message, Receive, Send
from voxtral_serve.guard.ask import GoneError, NotServedError, PieceRequests, StreamError
from voxtral_serve.guard.fields import TranscriptRequest
from voxtral_serve.guard.limits import Rules
from voxtral_serve.guard.pieces import ClipPieces
from voxtral_serve.transcript.words import TokenStream


class Upload(NamedTuple):
    """A transcription or translation that is ready for vLLM."""

    request: TranscriptRequest
    audio: ClipPieces


def read(body: bytes, content_type: str, task: str, rules: Rules, detector: Detector) -> Upload:
    """The upload in a form. `task` is "transcribe" or "translate".

    Raises RefusedError. Call it in a thread: it takes milliseconds, and one second for ten minutes of audio.
    """
    fields.check_task(task, rules.can)
    request, file = fields.read(form.parse(body, content_type), task, rules)
    samples = clip.decoded(bytes(file), rules.bounds, rules.rate, "file")
    return Upload(request, pieces.split(samples, request.form.name, rules, detector))


async def answer(
    upload: Upload,
    app: App,
    scope: Message,
    receive: Receive,
    send: Send,
    request_id: str,
    stream: TokenStream | None,
) -> None:
    """Transcribe an upload with vLLM's `app`, and send the client the answer or vLLM's error.

    `scope` and `receive` are those of the client's request, whose body has been received. `stream` is None for a model
    whose tokens have no times. Raises RefusedError if times are requested and the tokens do not give them.
    """
    gone = asyncio.Event()
    watcher = asyncio.create_task(_watch(receive, gone))
    requests = PieceRequests(app, scope, request_id, upload.request.kept, upload.audio, gone, upload.request.logprobs)
    try:
        if upload.request.streamed:
            await _send_events(requests, EventWriter(upload.request, upload.audio, send, stream))
        else:
            for message in response(upload.request, upload.audio, await requests.results(), stream):
                await send(message)
    except (NotServedError, StreamError) as error:
        for message in error.messages:
            await send(message)
    except GoneError:
        pass
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def _watch(receive: Receive, gone: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()


async def _send_events(requests: PieceRequests, writer: EventWriter) -> None:
    async with contextlib.aclosing(requests.chunks()) as chunks:
        async for number, chunk in chunks:
            if not isinstance(chunk, Exception):
                await writer.add(number, chunk)
            elif isinstance(chunk, GoneError) or not writer.started:
                raise chunk
            else:
                await writer.fail(chunk)
                return
    await writer.finish()
