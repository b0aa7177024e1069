"""Read Prometheus' text format, as vLLM's /metrics has it.

By prometheus_client, the library with which vLLM writes it: escapes in labels, exponents, +Inf and comments are its
affair.
"""

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(text: str, name: str) -> list[Sample]:
    """The samples of this full name, such as `vllm:generation_tokens_total`, one for each set of labels.

    None of them where the text is not in Prometheus' format.
    """
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        return []
    return [sample for family in families for sample in family.samples if sample.name == name]


def total(text: str, *names: str) -> float | None:
    """The sum over all sets of labels of the counter or gauge of any of these names; null where there is none."""
    values = [sample.value for name in names for sample in samples(text, name)]
    return sum(values) if values else None


def buckets(text: str, histogram: str) -> dict[float, float] | None:
    """How many observations were at most as large as each bucket's upper bound (`le`, `inf` for +Inf).

    Summed over all other labels, such as vLLM's `engine`; null where there is no such histogram.
    """
    counts: dict[float, float] = {}
    for sample in samples(text, f"{histogram}_bucket"):
        bound = float(sample.labels["le"])
        counts[bound] = counts.get(bound, 0.0) + sample.value
    return counts or None
