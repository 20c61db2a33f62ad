"""What Prometheus scrapes: names as vLLM has them, under a prefix of our own."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from daskserve.core.instance import InstanceLoad
from daskserve.core.request import Completion
from daskserve.core.slo import SLO
from daskserve.server.kv_metrics import KVMetrics
from daskserve.server.sequences import Answer
from daskserve.service.kv_counters import Pulled

PREFIX = "daskserve:"
STAGES = ("prefill_queue", "prefill", "kv_transfer", "decode_queue", "decode")
_WINDOW_S = 60.0
_FIRST_TOKEN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40, 80)
_PER_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 240, 600)


class Metrics:
    """Counts and latencies of this server, and gauges of the instances behind it.

    Latencies are those that clients see but for the network: from the arrival of the HTTP
    request to the moment a token is there to send.

    Parameters
    ----------
    slo
        Limits by which attainment and goodput are counted; None counts neither.
    """

    def __init__(self, slo: SLO | None) -> None:
        self.registry = CollectorRegistry()
        self._slo = slo
        self._recent: deque[tuple[float, bool]] = deque()
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "To the first token.", _FIRST_TOKEN_S
        )
        self._tpot = self._histogram(
            "time_per_output_token_seconds",
            "Mean time per token after the first, of each answer.",
            _PER_TOKEN_S,
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "To the last token.", _WHOLE_S)
        self._stage = Histogram(
            f"{PREFIX}request_stage_seconds",
            "Time of each answer in the five stages from submission to the last token.",
            ["stage"],
            registry=self.registry,
            buckets=_FIRST_TOKEN_S,
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answers.")
        self._output_tokens = self._counter("generation_tokens", "Output tokens.")
        self._succeeded = self._counter("request_success", "Complete answers.", "finished_reason")
        self._failed = self._counter("request_failure", "HTTP requests that failed.", "code")
        self._recomputes = self._counter("request_recomputes", "Prompts computed again.")
        self._in_flight = self._gauge("num_requests_in_flight", "Answers at work in this server.")
        if slo is not None:
            self._judged = self._counter("slo_requests", "Complete answers judged by the SLO.")
            self._attained = self._counter("slo_attained", "Of these, answers within both limits.")
            window = f"in the last {_WINDOW_S:g} s"
            self._attainment = self._gauge(
                "slo_attainment_ratio", f"Share of answers within both limits {window}."
            )
            self._goodput = self._gauge(
                "goodput_requests_per_second", f"Answers per second within both limits {window}."
            )
        self._instances = InstanceGauges(self.registry)
        self._kv = KVMetrics(PREFIX, self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=buckets)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self.registry)

    def finished(self, answer: Answer, completion: Completion, arrived_at: float) -> None:
        """One answer is complete; ``arrived_at`` is on the monotonic clock."""
        first_at, last_at = answer.token_times_s[0], answer.token_times_s[-1]
        ttft_s, tpot_s = first_at - arrived_at, answer.tpot_s
        self._ttft.observe(ttft_s)
        if tpot_s is not None:
            self._tpot.observe(tpot_s)
        self._whole.observe(last_at - arrived_at)
        for stage in STAGES:
            self._stage.labels(stage).observe(getattr(completion.timeline, f"{stage}_s"))
        self._prompt_tokens.inc(completion.num_prompt_tokens)
        self._output_tokens.inc(answer.num_output_tokens)
        self._recomputes.inc(completion.timeline.num_recomputes)
        self._succeeded.labels(completion.finish_reason.value).inc()
        if self._slo is not None:
            self._judge(self._slo.is_met(ttft_s, tpot_s))

    def _judge(self, is_met: bool) -> None:
        self._judged.inc()
        self._attained.inc(is_met)
        self._recent.append((time.monotonic(), is_met))
        self._forget_old()

    def _forget_old(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - _WINDOW_S:
            self._recent.popleft()

    def failed(self, code: str) -> None:
        """An HTTP request for answers failed; ``code`` is one of ours, never a caller's text."""
        self._failed.labels(code).inc()

    def observe(
        self,
        num_in_flight: int,
        status: dict[str, Any] | None,
        load: dict[str, InstanceLoad],
        kv_pulled: dict[str, dict[str, Pulled]],
    ) -> None:
        """Set the gauges to what is so now; ``status`` is None when the scheduler is silent."""
        self._in_flight.set(num_in_flight)
        if self._slo is not None:
            self._forget_old()
            num_met = sum(is_met for _, is_met in self._recent)
            share = num_met / len(self._recent) if self._recent else float("nan")
            self._attainment.set(share)
            self._goodput.set(num_met / _WINDOW_S)
        self._instances.set(status, load)
        self._kv.set(kv_pulled)


class InstanceGauges:
    """Queues, batches and KV pools of the instances, from one look at them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, text, labels, registry=registry)

        self._ready = gauge("num_instances_ready", "Instances that take requests.", "role")
        self._waiting = gauge("num_requests_waiting", "Requests not yet on an instance.", "role")
        self._running = gauge("num_requests_running", "Requests on instances.", "role")
        self._held = gauge("num_requests_held", "Prompts whose KV waits for decode.", "role")
        of_instance = ("role", "instance")
        self._usage = gauge("kv_cache_usage_perc", "Used share of KV pages, 0..1.", *of_instance)
        self._batch = gauge("instance_requests_running", "Requests in steps.", *of_instance)
        self._queue = gauge("instance_requests_waiting", "Requests queued there.", *of_instance)
        self._bubbles = gauge(
            "pipeline_bubble_ratio",
            "Share of its steps' time in which pipeline stages waited, 0..1.",
            *of_instance,
        )

    def set(self, status: dict[str, Any] | None, load: dict[str, InstanceLoad]) -> None:
        # What is gone must not be shown as it once was.
        for gauge in (
            self._ready, self._waiting, self._running, self._held,
            self._usage, self._batch, self._queue, self._bubbles,
        ):  # fmt: skip
            gauge.clear()
        if status is None:
            return
        for role, counters in status["dispatch"]["roles"].items():
            self._ready.labels(role).set(counters["ready"])
            self._waiting.labels(role).set(counters["waiting"])
            self._running.labels(role).set(counters["running"])
            self._held.labels(role).set(counters["held"])
        role_of = {report["address"]: report["role"] for report in status["instances"]}
        for address, counters in load.items():
            labels = (role_of.get(address, ""), address)
            num_blocks = counters.used_kv_blocks + counters.free_kv_blocks
            self._usage.labels(*labels).set(counters.used_kv_blocks / max(num_blocks, 1))
            self._batch.labels(*labels).set(counters.num_running)
            self._queue.labels(*labels).set(counters.num_waiting)
            self._bubbles.labels(*labels).set(counters.bubble_share)
