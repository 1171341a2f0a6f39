"""The server's own endpoints: health, status, metrics, slots, properties, load and unload."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from strata.protocol.version import VERSION
from strata.server.errors import Refused
from strata.server.generation import timings
from strata.server.metrics import CACHE, EXPERT, SHOWN_RECORDS, live
from strata.server.scheduler import Engine
from strata.server.slots import Use
from strata.server.state import STATE, State

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def json_answer(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def health(request: web.Request) -> web.Response:
    """200 while requests can be served; 503 while they cannot, except where loading on request is the rule."""
    state = request.app[STATE]
    status, is_well = _health(state)
    body = {
        "status": status,
        "model": state.settings.model,
        "max_context": state.context,
        "images": False,
        "api_key": bool(state.settings.api_keys),
        "loaded": state.service.is_loaded,
        "service": "strata",
    }
    return json_answer(body, 200 if is_well else 503)


def _health(state: State) -> tuple[str, bool]:
    on_demand = state.settings.lazy_load or state.settings.idle_unload_s > 0
    scheduler = state.service.scheduler
    match scheduler.engine:
        case Engine.UP:
            return "ok", True
        case Engine.STARTING:
            return "loading", on_demand
        case Engine.REFUSING:
            return "error", False
    if scheduler.reason:
        return "error", on_demand
    return ("ok", True) if on_demand else ("unloaded", False)


async def status(request: web.Request) -> web.Response:
    """What the request in the engine is doing."""
    state = request.app[STATE]
    now = live(state.service)
    ticket = state.service.first_ticket
    return json_answer(
        {
            "busy": now["running"] > 0,
            "phase": now["phase"],
            "queued": now["queued"],
            "prompt_tokens": now["prompt_tokens"],
            "generated": now["generated"],
            "max_tokens": now["max_tokens"],
            "tool": ticket.tool if ticket else "",
            "tail": ticket.tail if ticket else "",
            "elapsed_s": now["elapsed_s"],
            "tokens_per_s": now["tok_s"],
        }
    )


async def service_status(request: web.Request) -> web.Response:
    state = request.app[STATE]
    settings, service, metrics = state.settings, state.service, state.metrics
    scheduler = service.scheduler
    return json_answer(
        {
            "service": "strata",
            "version": VERSION,
            "model": settings.model,
            "loaded": service.is_loaded,
            "auto_load": scheduler.engine is not Engine.REFUSING,
            "structured_output": False,
            "engine": {
                "state": str(scheduler.engine),
                "version": service.info.text("engine"),
                "pid": service.engine_pid,
                "reason": scheduler.reason,
            },
            "started": round(state.started_at, 3),
            "uptime_s": round(time.time() - state.started_at, 3),
            "cache_max_tokens": state.context,
            "context": state.context,
            "concurrency": {"serving": max(len(scheduler.slots), 1), "requested": settings.parallel},
            "dialects": ["openai"],
            "vision": False,
            "activity": {
                "requests": metrics.totals.requests,
                "in_flight": len(scheduler.running) + len(scheduler.waiting),
                "last_request_at": metrics.last_request_at,
            },
            "last_timings": timings(metrics.last_done) if metrics.last_done else None,
            "vram": _info_with(state, "vram_", "expert_"),
            "machine": machine(),
        }
    )


async def metrics(request: web.Request) -> web.Response:
    """JSON, or Prometheus' text when `format` or Accept asks for it."""
    state = request.app[STATE]
    accept = request.headers.get("Accept", "")
    if request.query.get("format") == "prometheus" or "text/plain" in accept or "openmetrics" in accept:
        # The plain text form for both: the library's OpenMetrics form writes the colons of the names as underscores.
        text = generate_latest(state.metrics.registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
    records = list(reversed(state.metrics.records))
    return json_answer(
        {
            "engine": state.service.info.values,
            "live": live(state.service),
            "requests": records if request.query.get("requests") == "all" else records[:SHOWN_RECORDS],
            "totals": state.metrics.totals,
            "conversation_cache": _info_with(state, CACHE),
            "experts": _info_with(state, EXPERT),
            "hardware": machine(),
            "history": list(state.metrics.history),
            "time": time.time(),
        }
    )


async def slots(request: web.Request) -> web.Response:
    """One entry for each slot; one in all where requests are served one at a time."""
    state = request.app[STATE]
    if not state.service.is_loaded:
        return json_answer([])
    scheduler = state.service.scheduler
    jobs = [slot.job if slot.use in (Use.ADMITTING, Use.BUSY) else None for slot in scheduler.slots.slots]
    return json_answer(
        [
            {
                "id": i,
                "n_ctx": state.context,
                "is_processing": job is not None,
                "n_prompt_tokens": len(job.prompt) if job else 0,
            }
            for i, job in enumerate(jobs or [scheduler.holder])
        ]
    )


async def props(request: web.Request) -> web.Response:
    state = request.app[STATE]
    settings, scheduler = state.settings, state.service.scheduler
    wanted = request.query.get("model")
    if wanted is not None and wanted not in settings.names:
        raise Refused(404, f"there is no model {wanted[:200]!r} here; this server has {settings.model!r}")
    if scheduler.engine is Engine.REFUSING or (scheduler.engine is Engine.DOWN and scheduler.reason):
        raise Refused(503, scheduler.reason)
    template = state.chat.template_source
    params = {name: value for name, value in msgspec.structs.asdict(settings.sampling).items() if value is not None}
    return json_answer(
        {
            "default_generation_settings": {"n_ctx": state.context, "params": params},
            "total_slots": max(len(scheduler.slots), 1),
            "model_alias": settings.model,
            "model_path": str(settings.pack or ""),
            "chat_template": template,
            "chat_template_caps": {
                "supports_tools": "tools" in template,
                "supports_tool_calls": "tool_calls" in template,
                "supports_thinking": "enable_thinking" in template,
            },
            "modalities": {"vision": False},
            "is_sleeping": not state.service.is_loaded,
            "build_info": f"strata {VERSION}",
        }
    )


async def load(request: web.Request) -> web.Response:
    state = request.app[STATE]
    await state.service.load()
    return json_answer({"model": state.settings.model, "loaded": state.service.is_loaded})


async def unload(request: web.Request) -> web.Response:
    state = request.app[STATE]
    await state.service.unload()
    return json_answer({"model": state.settings.model, "loaded": state.service.is_loaded})


async def not_supported(request: web.Request) -> web.Response:
    raise Refused(501, f"{request.path} is not available in this version; /v1/chat/completions is")


def machine() -> dict[str, Any]:
    """Processor and memory, as far as the system says."""
    facts: dict[str, Any] = {"platform": platform.platform(), "cpus": os.cpu_count()}
    try:
        facts["ram_total_mib"] = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES >> 20
        facts["ram_free_mib"] = os.sysconf("SC_AVPHYS_PAGES") * _PAGE_BYTES >> 20
        facts["load_1m"] = round(os.getloadavg()[0], 2)
    except (OSError, ValueError):
        return facts
    return facts


def _info_with(state: State, *prefixes: str) -> dict[str, Any]:
    """The engine's INFO values whose names begin so."""
    values = state.service.info.values
    return {name: value for name, value in values.items() if name.startswith(prefixes)}
