"""`litellm`, a proxy with the recipe's configuration, whose client is OpenAI's: one answer is JSON, one subtitles."""

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
    answer = await create(model=server.model, file=file)
    clip.turn(answer.text)
    subtitles = await create(model=server.model, file=file, response_format="srt")
    lines = [line for line in str(subtitles).splitlines() if line and not line.isdigit() and "-->" not in line]
    if " ".join(lines).split() != answer.text.split():
        raise RuntimeError((subtitles, answer))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "litellm.yaml"
        config.write_text(yaml.safe_dump(settings("litellm.yaml", arguments()[0])), encoding="utf-8")
        litellm = str(Path(sys.executable).with_name("litellm"))
        # No list of prices is downloaded
        environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        with running([litellm, "-c", str(config), "--host", "127.0.0.1", "--port", str(PORT)], PORT, environment):
            each(transcribe)
