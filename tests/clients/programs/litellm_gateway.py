"""`litellm`, a proxy with the recipe's configuration, whose client is OpenAI's: words with times, and a stream."""

import sys
import tempfile
from pathlib import Path

import yaml
from clip import Clip, Server, arguments, each
from openai import AsyncOpenAI
from recipe import free_port, running, settings

PORT = free_port()


async def transcribe(server: Server, clip: Clip) -> None:
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none")
    create, file = client.audio.transcriptions.create, ("clip.wav", clip.file())
    timed = await create(
        model="voxtral", file=file, response_format="verbose_json", timestamp_granularities=["word"], language="en"
    )
    words = timed.words or []
    if [word.word for word in words] != timed.text.split() or not all(word.start < word.end for word in words):
        raise RuntimeError(timed)
    deltas = []
    async for event in await create(model="gpt-transcribe", file=file, keywords=["Voxtral"], stream=True):
        if event.type == "transcript.text.delta":
            clip.delta(event.delta)
            deltas.append(event.delta)
        elif event.type == "transcript.text.done":
            clip.turn(event.text)
    if not "".join(deltas).strip() == clip.turns[-1] == timed.text:
        raise RuntimeError((deltas, clip.turns, timed))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "litellm.yaml"
        config.write_text(yaml.safe_dump(settings("litellm.yaml", arguments()[0])), encoding="utf-8")
        litellm = str(Path(sys.executable).with_name("litellm"))
        # No list of prices is downloaded
        environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        with running([litellm, "-c", str(config), "--host", "127.0.0.1", "--port", str(PORT)], PORT, environment):
            each(transcribe)
