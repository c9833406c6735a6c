"""A service's metrics page, read into numbers. Knows the text format, not which metrics there are."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_DEADLINE_S = 5.0


@dataclass(frozen=True)
class Scrape:
    """One reading. Keys are a sample's name and its labels without model_name, sorted."""

    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    def value(self, name: str, **labels: str) -> float:
        """A sample's value; KeyError when the service does not have it."""
        return self.samples[name, tuple(sorted(labels.items()))]

    def labels_of(self, name: str, label: str) -> list[str]:
        """The values that a label takes on the samples of a name."""
        return [dict(labels)[label] for sample, labels in self.samples if sample == name]


def scrape(url: str) -> Scrape:
    """Read a metrics page on this machine. Raises OSError when it cannot be reached."""
    # Without the empty handler a proxy of the environment would be asked for our own loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=_DEADLINE_S) as page:
        text = page.read().decode("utf-8")
    return Scrape(
        {
            (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))): (
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


def mean_ms(before: Scrape, after: Scrape, histogram: str, label: str) -> dict[str, float]:
    """Mean of a histogram of seconds between two readings, in milliseconds, for each value of a label.

    Values that were not observed in between are left out.
    """
    means = {}
    for value in after.labels_of(f"{histogram}_count", label):
        count, total = (
            after.value(f"{histogram}_{part}", **{label: value})
            - before.value(f"{histogram}_{part}", **{label: value})
            for part in ("count", "sum")
        )
        if count:
            means[value] = 1000 * total / count
    return means
