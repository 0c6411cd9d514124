"""Describe GPU fields: usable memory, per-GPU values, and rental prices by region and date."""

from collections.abc import Mapping
from typing import Any

from hp_tool import catalog
from hp_tool.catalog.prices import lowest_offers, offers
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.prices import Offer
from hp_tool.domain.query import Constraints
from service.dashboard import formats

TF32_OF_BF16 = (0.45, 0.55)
"""Range of a GPU's TF32 rate relative to its bf16 rate. A catalogue fp32 rate in this range is the
TF32 rate.
"""
PER_GPU = (
    "host_power_w",
    "host_memory_bytes",
    "host_memory_bandwidth_bytes_per_second",
    "inter_node_bandwidth_bytes_per_second",
)
"""Fields of whole servers, to be divided by the number of GPUs."""
UNITS = ("_bytes_per_second", "_bytes", "_w")


def gpu_facts(spec: GpuSpec, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a GPU's fields, with words for values that would mislead as plain numbers."""
    facts = {_per_gpu(name): value for name, value in values.items()}
    facts["kind"] = {"gpu": "GPU", "cpu": "CPU process"}[spec.kind]
    headroom = Constraints().memory_headroom_fraction
    usable = formats.gib((1.0 - headroom) * spec.memory_bytes)
    facts["memory_bytes"] = (
        f"{formats.gib(spec.memory_bytes)} ({usable} usable, {formats.share(headroom)} reserved)"
    )
    facts["peak_flops_per_second"] = _peak_rates(spec.peak_flops_per_second)
    facts["predict_only"] = None
    facts["profile_runs"] = "no, predictions only" if spec.predict_only else "yes"
    facts["price_per_hour"] = None
    facts["price_per_gpu_hour"] = _price_words(spec) or None
    return facts


def _per_gpu(name: str) -> str:
    if name not in PER_GPU:
        return name
    unit = next(unit for unit in UNITS if name.endswith(unit))
    return f"{name.removesuffix(unit)}_per_gpu{unit}"


def _peak_rates(rates: Mapping[Any, float]) -> dict[str, float]:
    """Return the rates by precision. The fp32 rate is marked if it is the TF32 rate."""
    least, most = (share * rates.get("bf16", 0.0) for share in TF32_OF_BF16)
    return {
        "fp32 (as TF32)" if name == "fp32" and least < rate < most else name: rate
        for name, rate in rates.items()
    }


def _price_words(spec: GpuSpec) -> str:
    """Describe the typical and the lowest on-demand price; empty without a price."""
    listed = [
        (offer.on_demand, offer)
        for offer in offers()
        if offer.on_demand is not None and _gpu_of_offer(offer) == spec.name
    ]
    least = lowest_offers().get(spec.name)
    words = []
    if spec.price_per_hour is not None:
        whose = next(
            (_offer_words(offer) for price, offer in listed if price == spec.price_per_hour), ""
        )
        words.append(f"{formats.dollars(spec.price_per_hour)} on demand, typical{whose}")
    if least is not None and least.on_demand is not None and least.on_demand != spec.price_per_hour:
        words.append(f"lowest {formats.dollars(least.on_demand)}{_offer_words(least)}")
    return "; ".join(words)


def _gpu_of_offer(offer: Offer) -> str:
    return catalog.gpu(offer.gpu or catalog.node_type(offer.node_type or "").gpu).name


def _offer_words(offer: Offer) -> str:
    return f" ({offer.name}, {offer.date})"
