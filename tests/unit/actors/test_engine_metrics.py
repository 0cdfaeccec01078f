"""Prometheus' text to numbers."""

from __future__ import annotations

import pytest

from actors.engine_metrics import parse_metrics
from rl.errors import EngineError

TEXT = """\
# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="base"} 3.0
vllm:request_success_total{finished_reason="stop"} 4.0
vllm:request_success_total{finished_reason="length"} 2.0
vllm:request_success_created{finished_reason="length"} 1.7e9
vllm:time_to_first_token_seconds_bucket{le="0.1"} 5.0
vllm:time_to_first_token_seconds_sum{engine="0"} 0.25
vllm:lora_requests_info{running_lora_adapters="policy-v1"} 1.7e9
python_gc_objects_collected_total{generation="0"} 8.0
"""


def test_series_are_summed_over_labels_and_buckets_left_out() -> None:
    assert parse_metrics(TEXT) == {
        "num_requests_running": 3.0,
        "request_success_total": 6.0,
        "time_to_first_token_seconds_sum": 0.25,
    }


def test_torn_line_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="not a metric"):
        parse_metrics('vllm:num_requests_running{engine="0"} many')
