"""The engine's metrics, from Prometheus' text format to numbers.

Invariants:
- Only the engine's own series are kept (prefix `vllm:`), each summed over its
  labels; a histogram gives its `_sum` and `_count`, never its buckets.
- Pure.
"""

from __future__ import annotations

from rl.errors import EngineError

PREFIX = "vllm:"
NOT_KEPT = ("_bucket", "_created")  # bucket counts; times of creation
NO_NUMBERS = frozenset({"lora_requests_info", "cache_config_info"})  # facts told in labels


def parse_metrics(text: str) -> dict[str, float]:
    """Values by name without the prefix.

    Raises:
        EngineError: a line is no metric.
    """
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith(PREFIX):
            continue
        series, _, value = line.rpartition(" ")
        name = series.removeprefix(PREFIX).partition("{")[0]
        if name.endswith(NOT_KEPT) or name in NO_NUMBERS:
            continue
        try:
            totals[name] = totals.get(name, 0.0) + float(value)
        except ValueError:
            raise EngineError(f"not a metric: {line[:200]!r}", "the engine's metrics") from None
    return totals
