"""`litellm`, a proxy with the recipe's configuration, whose client is OpenAI's: words with times, and subtitles."""

import secrets
import sys
import tempfile
from pathlib import Path

import yaml
from clip import Clip, Server, arguments, each
from openai import AsyncOpenAI
from recipe import free_port, running, settings

PORT = free_port()
MASTER_KEY = f"sk-{secrets.token_hex(32)}"  # litellm does not start without one


async def transcribe(server: Server, clip: Clip) -> None:
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key=MASTER_KEY)
    create, file = client.audio.transcriptions.create, ("clip.wav", clip.file())
    answer = await create(
        model=server.model, file=file, response_format="verbose_json", timestamp_granularities=["word"], language="en"
    )
    words = answer.words or []
    if [word.word for word in words] != answer.text.split() or not all(word.start < word.end for word in words):
        raise RuntimeError(answer)
    clip.turn(answer.text)
    subtitles = str(await create(model=server.model, file=file, response_format="srt"))
    if "00:00:00," not in subtitles or words[0].word not in subtitles:
        raise RuntimeError(subtitles)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "litellm.yaml"
        config.write_text(yaml.safe_dump(settings("litellm.yaml", arguments()[0])), encoding="utf-8")
        litellm = str(Path(sys.executable).with_name("litellm"))
        # No list of prices is downloaded
        environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": MASTER_KEY}
        with running([litellm, "-c", str(config), "--host", "127.0.0.1", "--port", str(PORT)], PORT, environment):
            each(transcribe)
