"""Read checkpoint directories of Voxtral Realtime, Voxtral TTS and VoxCPM2, and check them. Standard library only."""

from voxtral_serve.checkpoint.errors import CheckpointError
from voxtral_serve.checkpoint.files import unreadable
from voxtral_serve.checkpoint.layouts import HUGGING_FACE, MISTRAL, is_rotated, mistral_name
from voxtral_serve.checkpoint.params import is_realtime, to_params
from voxtral_serve.checkpoint.reading import Checkpoint, OtherModel, other_model, read
from voxtral_serve.checkpoint.shapes import expected_shapes
from voxtral_serve.checkpoint.speech import SpeechCheckpoint, read_speech
from voxtral_serve.checkpoint.voxcpm2 import VoxCPM2Checkpoint, read_voxcpm2

Synthesis = SpeechCheckpoint | VoxCPM2Checkpoint  # of text to speech, which vLLM-Omni serves

__all__ = [
    "HUGGING_FACE",
    "MISTRAL",
    "Checkpoint",
    "CheckpointError",
    "OtherModel",
    "SpeechCheckpoint",
    "Synthesis",
    "VoxCPM2Checkpoint",
    "expected_shapes",
    "is_realtime",
    "is_rotated",
    "mistral_name",
    "other_model",
    "read",
    "read_speech",
    "read_voxcpm2",
    "to_params",
    "unreadable",
]
