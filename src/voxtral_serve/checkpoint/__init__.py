"""Read checkpoint directories of Voxtral Realtime, and check that they are complete. Standard library only."""

from voxtral_serve.checkpoint.errors import CheckpointError
from voxtral_serve.checkpoint.files import unreadable
from voxtral_serve.checkpoint.layouts import HUGGING_FACE, MISTRAL, is_rotated, mistral_name
from voxtral_serve.checkpoint.params import is_realtime, to_params
from voxtral_serve.checkpoint.reading import Checkpoint, OtherModel, other_model, read
from voxtral_serve.checkpoint.shapes import expected_shapes

__all__ = [
    "HUGGING_FACE",
    "MISTRAL",
    "Checkpoint",
    "CheckpointError",
    "OtherModel",
    "expected_shapes",
    "is_realtime",
    "is_rotated",
    "mistral_name",
    "other_model",
    "read",
    "to_params",
    "unreadable",
]
