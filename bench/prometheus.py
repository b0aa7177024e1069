"""Read vLLM's /metrics, in Prometheus' text format.

prometheus_client parses it, the library with which vLLM writes it.
"""

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(text: str, name: str) -> list[Sample]:
    """The samples of this full name, such as `vllm:generation_tokens_total`, one for each set of labels.

    An empty list if the text is not in Prometheus' format.
    """
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        return []
    return [sample for family in families for sample in family.samples if sample.name == name]


def total(text: str, *names: str) -> float | None:
    """The sum of all samples with one of these names, over all labels; null if there is none."""
    values = [sample.value for name in names for sample in samples(text, name)]
    return sum(values) if values else None


def buckets(text: str, histogram: str) -> dict[float, float] | None:
    """The number of observations up to each bucket's upper bound (`le`, `inf` for +Inf).

    Summed over all other labels, such as vLLM's `engine`; null if there is no such histogram.
    """
    counts: dict[float, float] = {}
    for sample in samples(text, f"{histogram}_bucket"):
        bound = float(sample.labels["le"])
        counts[bound] = counts.get(bound, 0.0) + sample.value
    return counts or None
