"""Silero VAD (https://github.com/snakers4/silero-vad), which gives each 32 ms of audio a probability of speech.

Its package has two exports of the same model, and this module loads both. The one for clips computes many frames of one
clip in a call (audio.speech). The one for streams computes one frame of many streams in a call, and its caller keeps
the state of each stream (audio.voice). Each uses one thread.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

RATE = 16000  # Hz
FRAME = 512  # samples of one probability, 32 ms
CONTEXT = 64  # samples before a frame that the model sees
STATE = (2, 128)  # shape of the state of a stream


def for_clips() -> tuple[Any, Any]:
    """(model, function from its probabilities to stretches of speech).

    Raises ImportError if silero-vad or onnxruntime is not installed.
    """
    import torch

    threads = torch.get_num_threads()
    try:
        import silero_vad

        return silero_vad.load_silero_vad(sequence=True), silero_vad.utils_vad.get_speech_timestamps_from_probs
    finally:
        torch.set_num_threads(threads)  # the import of silero_vad sets it to 1 for the process


def for_streams() -> Any:
    """An onnxruntime session: its inputs are float32 [n, CONTEXT + FRAME], the states [2, n, 128], and the rate.

    Raises ImportError if silero-vad or onnxruntime is not installed.
    """
    import onnxruntime  # type: ignore[import-untyped,unused-ignore]

    spec = find_spec("silero_vad")
    if spec is None or spec.origin is None:
        raise ImportError("silero-vad is not installed")
    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    file = Path(spec.origin).parent / "data/silero_vad.onnx"
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
