"""Read checkpoint directories of Voxtral Realtime and Voxtral TTS, and check them. Standard library only."""

from voxtral_serve.checkpoint.errors import CheckpointError
from voxtral_serve.checkpoint.files import unreadable
from voxtral_serve.checkpoint.layouts import HUGGING_FACE, MISTRAL, is_rotated, mistral_name
from voxtral_serve.checkpoint.params import is_realtime, to_params
from voxtral_serve.checkpoint.reading import Checkpoint, OtherModel, other_model, read
from voxtral_serve.checkpoint.shapes import expected_shapes
from voxtral_serve.checkpoint.speech import SpeechCheckpoint, read_speech

__all__ = [
    "HUGGING_FACE",
    "MISTRAL",
    "Checkpoint",
    "CheckpointError",
    "OtherModel",
    "SpeechCheckpoint",
    "expected_shapes",
    "is_realtime",
    "is_rotated",
    "mistral_name",
    "other_model",
    "read",
    "read_speech",
    "to_params",
    "unreadable",
]
