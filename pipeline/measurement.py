"""What one item costs, as measured: the record that analyze writes, and the filter, plan and capture read."""

from dataclasses import dataclass
from typing import Literal

ResourceType = Literal["package", "dataset", "model", "tokenizer"]


@dataclass(frozen=True, kw_only=True)
class MeasuredItem:
    """One measured item. `seconds` and `size_mb` are exclusive: without what it pulls in. Both are 0 or more."""

    key: str  # dotted import name, or with a prefix: model:gpt2
    seconds: float
    size_mb: float  # MB (10⁶ bytes) of growth in memory
    resource_type: ResourceType
    distribution: str  # canonical; "" for a dataset, model or tokenizer
    threads: int = 0  # that importing it leaves: under `fork` such a process cannot be captured
    dependencies: frozenset[str]  # keys of the items that it asks for itself; parent packages are implied
