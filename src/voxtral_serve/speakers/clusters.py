"""Clusters of vectors: one for each voice of a recording.

Spectral clustering as in 3D-Speaker and SpeechBrain: each vector keeps its nearest neighbours, and the number of
clusters is where the eigenvalues of the graph's Laplacian have their largest gap. Clusters with close centres are
merged.

Where the number of voices is known, spectral clustering splits a voice that speaks most of the time. Average-linkage
clustering does not, but takes outliers for voices; of both, the one with the larger silhouette counts.
"""

import numpy as np

from voxtral_serve.speakers import MOST

NEIGHBOURS, LEAST_NEIGHBOURS = 0.02, 6  # of each vector: a part of all, and at least so many
MERGE = 0.80  # cosine of two centres from which they are one voice; chosen with `python -m bench speakers`
LEAST_WINDOWS = 4  # of a voice, where the number is not known
SAMPLE = 3000  # vectors whose graph is computed; others get the label of the nearest centre
SEEDS = 5  # of k-means


def clusters(vectors: np.ndarray, number: int | None = None) -> np.ndarray:
    """int [n]: the cluster of each of `vectors` [n, size] of length 1, from 0 without gaps.

    `number` is that of the voices, 1 to MOST, None if it is not known; n vectors make at most n clusters.
    """
    count = len(vectors)
    if number is not None:
        number = min(number, count)
    if count <= 1 or number == 1:
        return np.zeros(count, int)
    step = -(-count // SAMPLE)
    sample = vectors[::step]
    if number is None:
        labels = _merged(sample, _without_small(sample, _spectral(sample, None)))
    else:
        ways = [_spectral(sample, number), _average_linkage(sample, number)]
        labels = max(ways, key=lambda way: _silhouette(sample, way))  # the first of equals
    labels = np.unique(labels, return_inverse=True)[1]
    return labels if step == 1 else nearest(vectors, centres(sample, labels))


def centres(vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """[clusters, size], each of length 1: the means of the clusters 0, 1, ... of `labels` [n]."""
    means = np.stack([vectors[labels == label].mean(axis=0) for label in range(labels.max() + 1)])
    return means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-9)


def nearest(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """int [n]: the centre with the largest cosine to each vector."""
    labels: np.ndarray = (vectors @ centres.T).argmax(axis=1)
    return labels


def _spectral(vectors: np.ndarray, number: int | None) -> np.ndarray:
    from scipy.linalg import eigh

    count = len(vectors)
    similar = (vectors @ vectors.T).astype(np.float64)
    kept = min(max(round(NEIGHBOURS * count), LEAST_NEIGHBOURS), count)
    low = np.argpartition(similar, count - kept, axis=1)[:, : count - kept]
    np.put_along_axis(similar, low, 0.0, axis=1)
    similar = (similar + similar.T) / 2
    np.fill_diagonal(similar, 0.0)
    laplacian = np.diag(np.abs(similar).sum(axis=1)) - similar
    last = min(count, MOST + 1) - 1
    values, eigenvectors = eigh(laplacian, subset_by_index=[0, last])
    if number is None:
        number = int(np.diff(values).argmax()) + 1
    return _k_means(eigenvectors[:, :number], number)


def _average_linkage(vectors: np.ndarray, number: int) -> np.ndarray:
    from scipy.cluster.hierarchy import fcluster, linkage

    labels: np.ndarray = fcluster(linkage(vectors, "average", metric="cosine"), number, "maxclust")
    return labels - 1


def _silhouette(vectors: np.ndarray, labels: np.ndarray) -> float:
    """The mean of (b - a) / max(a, b), where a is a vector's mean distance to its own cluster, b to the next one.

    The sums of distances need no matrix of all pairs: the distance is 1 - cosine.
    """
    labels, sizes = np.unique(labels, return_inverse=True, return_counts=True)[1:]
    if len(sizes) < 2:
        return -1.0
    rows = np.arange(len(labels))
    sums = np.stack([vectors[labels == label].sum(axis=0) for label in range(len(sizes))])
    distances = sizes - vectors @ sums.T  # [n, clusters]; that of a vector to itself is 0
    own = distances[rows, labels] / np.maximum(sizes[labels] - 1, 1)
    means = distances / sizes
    means[rows, labels] = np.inf
    other = means.min(axis=1)
    scores = np.where(sizes[labels] == 1, 0.0, (other - own) / np.maximum(np.maximum(own, other), 1e-9))
    return float(scores.mean())


def _k_means(points: np.ndarray, number: int) -> np.ndarray:
    from scipy.cluster.vq import kmeans2

    best, labels = np.inf, np.zeros(len(points), int)
    for seed in range(SEEDS):
        means, found = kmeans2(points, number, minit="++", seed=seed)
        inertia = float(((points - means[found]) ** 2).sum())
        if inertia < best:
            best, labels = inertia, found
    return labels


def _without_small(vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
    names, sizes = np.unique(labels, return_counts=True)
    large = names[sizes >= LEAST_WINDOWS]
    if len(large) == 0:
        return np.zeros_like(labels)
    means = centres(vectors, np.searchsorted(names, labels))[np.searchsorted(names, large)]
    moved = np.where(np.isin(labels, large), labels, large[nearest(vectors, means)])
    return moved


def _merged(vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
    while True:
        labels = np.unique(labels, return_inverse=True)[1]
        means = centres(vectors, labels)
        cosines = np.triu(means @ means.T, 1)
        if len(means) == 1 or cosines.max() < MERGE:
            return labels
        first, second = np.unravel_index(cosines.argmax(), cosines.shape)
        labels = np.where(labels == second, first, labels)
