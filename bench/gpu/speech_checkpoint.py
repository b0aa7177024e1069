"""Write a checkpoint of Voxtral TTS with random weights, in Mistral's layout: 8 GB, or 3 MB for a CPU.

It makes noise: it serves to measure speed and to test servers. The vocabulary is the one in the mistral-common package.

python -m bench.gpu.speech_checkpoint DIRECTORY
python -m bench.gpu.speech_checkpoint DIRECTORY --tiny
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mistral_layout import speech
from mistral_layout.tensors import Shape

BLOCK = 2**23 - 1  # numbers; an odd count makes all rows different
# Audio tokens of a voice. A preset of the published checkpoint that stands for 10 s of speech has 126.
FRAMES, TINY_FRAMES = 126, 6


def write(directory: Path, small: bool = False) -> None:
    """Write params.json, tekken.json, consolidated.safetensors and voice_embedding/NAME.pt into `directory`.

    Raises ModuleNotFoundError if mistral_common, which has the vocabulary, is not installed.
    """
    params = speech.tiny() if small else speech.PARAMS
    # The tiny one's voices differ in length, as the published ones do.
    names = params["multimodal"]["audio_tokenizer_args"]["voice"]
    voices = {name: TINY_FRAMES + number if small else FRAMES for name, number in names.items()}
    (directory / "voice_embedding").mkdir(parents=True, exist_ok=True)
    (directory / "params.json").write_text(json.dumps(params, indent=2) + "\n")
    (directory / "tekken.json").write_text(json.dumps(speech.tokenizer(params["vocab_size"], voices)))
    noise = torch.Generator().manual_seed(0)
    for name, frames in voices.items():
        embedding = torch.randn(frames, params["dim"], generator=noise).to(torch.bfloat16)
        torch.save(embedding, directory / "voice_embedding" / f"{name}.pt")
    write_weights(directory / "consolidated.safetensors", speech.shapes(params))


def write_weights(path: Path, shapes: dict[str, Shape], zeros: dict[str, Shape] | None = None) -> None:
    """Write random tensors with `shapes` in bfloat16, and then those of `zeros`.

    One after the other: safetensors' save_file would need all 8 GB in memory at once.
    Format: the length of the header, the header, the tensors without gaps (https://huggingface.co/docs/safetensors).
    """
    zeros = zeros or {}
    header, end = {}, 0
    for name, shape in (shapes | zeros).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    normal = np.random.default_rng(0).normal(0, 1, BLOCK).astype(np.float32)
    blocks: dict[float, bytes] = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        place = 0
        for shape in shapes.values():
            size, scale = 2 * math.prod(shape), _scale(shape)
            if scale not in blocks:
                blocks[scale] = _bfloat16(normal * np.float32(scale) if scale else np.ones_like(normal))
            block = blocks[scale]
            while size:
                part = block[2 * (place % BLOCK) :][:size]
                file.write(part)
                place, size = place + len(part) // 2, size - len(part)
        file.writelines(bytes(2 * math.prod(shape)) for shape in zeros.values())


def _scale(shape: Shape) -> float:
    """The standard deviation that keeps a signal's size; 0 for norms, scales and lengths, which are one."""
    inputs = math.prod(shape[1:])
    return 0.0 if inputs == 1 else inputs**-0.5


def _bfloat16(numbers: Any) -> bytes:
    """bfloat16 is the upper half of float32."""
    upper: bytes = (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    return upper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", action="store_true", help="3 MB, for a CPU")
    arguments = parser.parse_args()
    write(arguments.directory, arguments.tiny)


if __name__ == "__main__":
    main()
