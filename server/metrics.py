"""What happened: the last requests, totals, and the Prometheus form of both.

Units    milliseconds in records (as the engine's DONE gives them), seconds in Prometheus, `time` in seconds since 1970
Bounds   500 records, a history of 15 minutes
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from strata.protocol.lines import Done, Info, rate

from .effects import Failed
from .job import Job, Phase, State
from .slots import Slot, Use

if TYPE_CHECKING:
    from .service import Service

KEPT_RECORDS = 500
SHOWN_RECORDS = 12
HISTORY_EVERY_S = 5.0
_HISTORY = 180
_BUCKETS = tuple(round(scale * 10.0**power, 3) for power in range(-3, 3) for scale in (1, 2.5, 5)) + (1000, 2560)
_STATES = ("unloaded", "idle", "reading", "generating")
_SLOT_STATES = ("idle", "reading", "decoding")
CACHE = "conversation_cache_"
"""What INFO calls the limits of parked conversations, and their figures."""
EXPERT = "expert_"
"""The same of experts that do not all lie in VRAM."""
CACHE_NOW = {
    "parked": "Conversations parked in RAM.",
    "parked_mib": "MiB of RAM that they take.",
    "disk_parked": "Conversations on disk that can be continued.",
}
CACHE_COUNTERS = {
    "captured": "Conversations parked.",
    "skipped": "Conversations that there was no room for.",
    "hits": "Parked conversations that were continued, those on disk included.",
    "dropped": "Conversations dropped from RAM for others.",
    "damaged": "Parked conversations in RAM whose checksum was wrong.",
    "disk_written": "Files of conversations written.",
    "disk_failed": "Files that could not be written.",
    "disk_hits": "Conversations continued from disk.",
    "disk_deleted": "Files deleted for room.",
    "disk_foreign": "Files of other models or engines, left alone.",
    "disk_torn": "Files that are not whole, left alone.",
    "disk_damaged": "Files whose bytes have changed, left alone.",
}
EXPERT_COUNTERS = {
    "picks": "Experts that rows of decode windows have picked.",
    "reads": "Experts that decode windows have read from RAM, each once for all rows of a window.",
    "read_mib": "MiB of them, read over PCIe.",
    "helped": "Experts that the processor has computed for decode windows.",
    "helped_ms": "Milliseconds that this took.",
    "filed": "Experts that the processor has read in the model's file for decode windows, each once for all rows.",
    "filed_mib": "MiB of them.",
    "file_sent_mib": "MiB of experts that went from the model's file to the card, for prompts and swaps.",
    "streamed_mib": "MiB of experts that prompts have copied, from RAM or from the file.",
    "rounds": "Rounds in which experts may change places.",
    "swaps": "Experts that have changed places.",
    "swapped_mib": "MiB that this has sent over PCIe, both ways.",
}
GAUGES = {
    **{CACHE + name: text for name, text in CACHE_NOW.items()},
    "lent_slots": "Slots of the expert cache that a prompt has borrowed, at most so far.",
}
COUNTERS = {
    **{CACHE + name: text for name, text in CACHE_COUNTERS.items()},
    **{EXPERT + name: text for name, text in EXPERT_COUNTERS.items()},
    "lent_reads": "Prompts that have borrowed slots of the expert cache.",
    "lent_refilled_mib": "MiB of experts that have come back to these slots from RAM.",
    "lent_waited_ms": "Milliseconds that windows and chunks have waited for them.",
    "head_loads": "Times that the output head was loaded again behind a prompt that had its memory.",
}
"""Values of INFO that Prometheus sees as such; the others are labels of one fact."""
_LABEL = re.compile("(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request as /metrics shows it."""

    time: float
    duration_s: float
    finish: str
    prompt_tokens: int
    reused: int
    output_tokens: int
    prompt_total: int
    prompt_read: int
    prompt_ms: float
    decode_ms: float
    decode_tok_s: float
    hit_rate: float | None
    pcie_share: float | None
    ram_blobs: int
    file_blobs: int
    file_mb: float
    drafts_offered: int
    drafts_accepted: int


class Totals(msgspec.Struct):
    since: float
    requests: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    output_tokens: int = 0
    prompt_ms: float = 0.0
    decode_ms: float = 0.0
    drafts_offered: int = 0
    drafts_accepted: int = 0

    def add(self, record: Record) -> None:
        self.requests += 1
        for name in self.__struct_fields__[2:]:
            setattr(self, name, getattr(self, name) + getattr(record, name))


class Metrics:
    """Fed by the service: `token` for each one that is delivered, `ended` once for each request."""

    def __init__(self) -> None:
        self.totals = Totals(since=time.time())
        self.records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self.last_done: Done | None = None
        self.last_request_at: float | None = None
        self.history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self.registry = CollectorRegistry()
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests, reused ones included.")
        self._output = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._reads = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in earlier state.")
        self._reused = self._counter("vllm:prefix_cache_hits", "Prompt tokens that did not have to be read.")
        self._offered = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens checked.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens confirmed.")
        self._success = Counter(
            "vllm:request_success", "Finished requests.", ["finished_reason"], registry=self.registry
        )
        self._gave_way = self._counter("vllm:num_preemptions", "Reads that gave way to a shorter prompt.")
        self._prompt_s = self._counter("strata:totals_prompt_seconds", "Time spent reading prompts.")
        self._decode_s = self._counter("strata:totals_decode_seconds", "Time spent generating.")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._gap = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request.")
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.")

    def token(self, job: Job) -> None:
        times = job.token_times
        if job.n_generated == 1:
            self._first.observe(times[-1] - job.arrived)
        elif len(times) > 1:
            self._gap.observe(times[-1] - times[-2])

    def ended(self, job: Job, end: Done | Failed | None, now: float) -> Record:
        """Account for a request that is over; `now` is of the clock that the job was stamped with."""
        self.last_request_at = time.time()
        done = end if isinstance(end, Done) else None
        record = _record(job, done, "cancel" if end is None or job.gone else "error", now - job.arrived)
        if job.sent is None:
            return record  # it never reached the engine
        self._gave_way.inc(job.n_yields)
        self.records.append(record)
        self.totals.add(record)
        self._prompt.inc(record.prompt_total)
        self._output.inc(record.output_tokens)
        self._reads.inc(record.prompt_total)
        self._reused.inc(record.reused)
        self._offered.inc(record.drafts_offered)
        self._accepted.inc(record.drafts_accepted)
        self._prompt_s.inc(record.prompt_ms / 1000)
        self._decode_s.inc(record.decode_ms / 1000)
        if done is not None:
            self.last_done = done
            self._success.labels(record.finish).inc()
            self._whole.observe(record.duration_s)
        return record

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_BUCKETS, registry=self.registry)


def _record(job: Job, done: Done | None, without_done: str, duration_s: float) -> Record:
    return Record(
        time=time.time(),
        duration_s=round(duration_s, 3),
        finish=done.finish if done else without_done,
        prompt_tokens=len(job.prompt),
        reused=done.reused if done else job.n_reused,
        output_tokens=done.generated if done else job.n_generated,
        prompt_total=done.prompt if done else 0,
        prompt_read=done.prompt_read if done else max(job.n_read - job.n_reused, 0),
        prompt_ms=done.prompt_ms if done else 0.0,
        decode_ms=done.decode_ms if done else 0.0,
        decode_tok_s=round(rate(done.generated, done.decode_ms), 2) if done else 0.0,
        hit_rate=done.hit_rate if done else None,
        pcie_share=done.pcie_share if done else None,
        ram_blobs=done.ram_blobs if done else 0,
        file_blobs=done.file_blobs if done else 0,
        file_mb=done.file_mb if done else 0.0,
        drafts_offered=done.drafts_offered if done else 0,
        drafts_accepted=done.drafts_accepted if done else 0,
    )


def live(service: Service) -> dict[str, Any]:
    """What is happening now. The fields of one request are those of the first: on the solo path, else read, else in
    a slot for longest."""
    scheduler, totals = service.scheduler, service.metrics.totals
    running, now = scheduler.running, scheduler.clock()
    job, waiting = service.first_job, len(scheduler.waiting)
    state = "unloaded" if not service.is_loaded else "idle"
    if running:
        state = "generating" if any(other.phase is Phase.DECODING for other in running) else "reading"
    return {
        "state": state,
        "queued": waiting,
        "phase": str(job.phase) if job else "idle",
        "prompt_tokens": len(job.prompt) if job else 0,
        "prompt_read": job.n_read if job else 0,
        "prompt_total": len(job.prompt) if job else 0,
        "generated": job.n_generated if job else 0,
        "max_tokens": job.max_new if job else 0,
        "elapsed_s": _elapsed_s(job, now) if job else 0.0,
        "tok_s": round(sum(other.tok_s(now) for other in running), 2),
        "tok_s_mean": round(rate(totals.output_tokens, totals.decode_ms), 2),
        "prefill_tok_s_mean": round(rate(totals.prompt_tokens - totals.reused, totals.prompt_ms), 2),
        "parallel": len(scheduler.slots),
        "running": len(running),
        "waiting": waiting,
        "outside_slots": sum(other.state in (State.SOLO, State.ADMITTING) for other in running),
        "slots": [_slot(slot, now) for slot in scheduler.slots.slots],
    }


def _slot(slot: Slot, now: float) -> dict[str, Any]:
    """One slot. A reserved one keeps what was read of a request that waits."""
    job = slot.job
    if job is None or slot.use is Use.RESERVED:
        return {"slot": slot.index, "state": "idle", "held_tokens": len(slot.held)}
    return {
        "slot": slot.index,
        "state": "reading" if job.is_reading else "decoding",
        "prompt_tokens": len(job.prompt),
        "generated": job.n_generated,
        "elapsed_s": _elapsed_s(job, now),
        "tok_s": round(job.tok_s(now), 2),
    }


def _elapsed_s(job: Job, now: float) -> float:
    return round(now - (now if job.sent is None else job.sent), 3)


def sample(service: Service) -> None:
    """One point of the history."""
    now = live(service)
    names = ("state", "tok_s", "running", "waiting")
    service.metrics.history.append({"time": round(time.time(), 3), **{name: now[name] for name in names}})


class LiveCollector(Collector):
    """The gauges, read at the moment of the scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        now = live(self._service)
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests in the engine.", value=now["running"])
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests in the queue.", value=now["waiting"])
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the context in use.", value=self._context_share())
        states = GaugeMetricFamily("strata:live_state", "1 for the state the server is in.", labels=["state"])
        for state in _STATES:
            states.add_metric([state], float(state == now["state"]))
        yield states
        slots = GaugeMetricFamily("strata:live_slots", "Slots of the engine in each state.", labels=["state"])
        for state in _SLOT_STATES:
            slots.add_metric([state], float(sum(slot["state"] == state for slot in now["slots"])))
        yield slots
        yield GaugeMetricFamily("strata:live_tok_s", "Tokens per second over the last two seconds.", value=now["tok_s"])
        done = self._service.metrics.last_done
        if done is not None and done.hit_rate is not None:
            yield GaugeMetricFamily("strata:last_hit_rate", "Experts served from VRAM.", value=done.hit_rate)

        yield from engine_metrics(self._service.info)

    def _context_share(self) -> float:
        scheduler, context = self._service.scheduler, self._service.context
        used = sum(job.n_read + job.n_generated for job in scheduler.running)
        return used / (context * max(len(scheduler.slots), 1)) if context else 0.0


def engine_metrics(info: Info) -> Iterable[Metric]:
    """What the engine has said of itself: its facts as labels, and the figures of parked conversations and of experts.
    The counters begin anew with each engine."""
    figures = {*GAUGES, *COUNTERS}
    facts = {name: str(value) for name, value in info.values.items() if name not in figures and _LABEL.fullmatch(name)}
    if facts:
        yield InfoMetricFamily("strata:engine", "What the engine said when it started.", value=facts)
    for name, text in GAUGES.items():
        if name in info.values:
            yield GaugeMetricFamily(f"strata:{name}", text, value=info.whole(name))
    for name, text in COUNTERS.items():
        if name in info.values:
            yield CounterMetricFamily(f"strata:{name}", text, value=info.whole(name))
