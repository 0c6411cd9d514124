"""Latencies of a request, with the keys and labels used by targets, searches, tables and pages."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One latency, in seconds: a mean, or a quantile over requests."""

    key: str
    """Key in JSON and in `targets`."""
    quantile_key: str
    """Prefix of its quantile targets, such as `tpot` in tpot_p99_s."""
    head: str
    """Column head in terminal tables."""
    label: str
    """Label on pages."""
    per: str
    """Text after the seconds in a sentence."""

    @property
    def noun(self) -> str:
        """Name in a sentence."""
        return self.label.lower()


TTFT = Latency(
    key="ttft_s",
    quantile_key="ttft",
    head="TTFT",
    label="Time to first token",
    per="to the first token",
)
TPOT = Latency(
    key="tpot_s",
    quantile_key="tpot",
    head="TPOT",
    label="Time per output token",
    per="per output token",
)
REQUEST = Latency(
    key="request_latency_s",
    quantile_key="e2e",
    head="request",
    label="Request latency",
    per="per request",
)
LATENCIES = {latency.key: latency for latency in (TTFT, TPOT, REQUEST)}
"""All latencies by key, in the order of tables."""
LATENCIES_BY_QUANTILE_KEY = {latency.quantile_key: latency for latency in LATENCIES.values()}
