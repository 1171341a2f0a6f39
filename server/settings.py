"""Everything the server was told: command line over environment over config, as one value with defaults filled in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from strata.protocol.config import BATCH_OPTIONS, Config, Sampling

from .link import Patience
from .process import Launch
from .turns import Rules


class SettingsError(Exception):
    """A start that cannot work. One line for the person at the keyboard; exit code 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: str
    launch: Launch
    host: str = "127.0.0.1"
    port: int = 8095
    aliases: tuple[str, ...] = ()
    pack: Path | None = None  # where the vocabulary came from
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    trusted_origins: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    fit_max_tokens: bool = False
    repeat_stop_tokens: int = 256
    patience: Patience = field(default_factory=Patience)
    before_load: list[str] | None = None
    lazy_load: bool = False
    idle_unload_s: float = 0.0
    wait_for_engine: bool = False
    rules: Rules = field(default_factory=Rules)
    parallel: int = 1  # slots asked for
    backlog: int = 256
    max_body_bytes: int = 256 * 1024 * 1024
    heartbeat_s: float = 10.0
    request_lines: bool = True
    keep_empty_turns: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model, *self.aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the command line gave; None or empty: nothing."""

    config: Path | None = None
    engine: str = "strata"
    script: Path | None = None
    host: str | None = None
    port: int | None = None
    tokenizer: Path | None = None
    api_keys: tuple[str, ...] = ()
    fit_max_tokens: bool = False
    lazy: bool = False
    idle_unload_s: float | None = None
    before_load: str | None = None


def api_keys(flags: Flags, environment: Mapping[str, str], config: Config | None) -> tuple[str, ...]:
    """The keys of the first source that names any. Raises SettingsError for an empty one: it would protect nothing."""
    if flags.api_keys:
        source, given = "--api-key", [key for value in flags.api_keys for key in value.split(",")]
    elif "STRATA_API_KEY" in environment:
        source, given = "STRATA_API_KEY", environment["STRATA_API_KEY"].split(",")
    else:
        source, given = "api_key", list(config.api_keys) if config else []
    keys = tuple(key.strip() for key in given)
    if not all(keys):
        raise SettingsError(f"{source}: an empty key protects nothing; give a key, or leave the option out")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise SettingsError(f"{source}: a key may hold printable ASCII characters only")
    return keys


def patience(environment: Mapping[str, str], config: Config | None) -> Patience:
    return Patience(
        ready_s=number(environment, "STRATA_ENGINE_READY_S", 900.0),
        silence_s=config.engine_silence_s if config else 300.0,
        stall_s=number(environment, "STRATA_ENGINE_STALL_S", 90.0),
    )


def rules(environment: Mapping[str, str], config: Config | None) -> Rules:
    return Rules(
        max_queue=config.max_queue if config else 0,
        returns_to_solo=switch(environment, "STRATA_PARALLEL_SOLO", True),
        short_first=int(number(environment, "STRATA_ADMIT_SHORT_FIRST", 0.0)),
        short_after_s=number(environment, "STRATA_ADMIT_MAX_WAIT_S", 30.0),
    )


def slots_asked(command: list[str]) -> int:
    """The slots that an engine's command line asks for; the last option counts."""
    value = option_value(command, *BATCH_OPTIONS) or ""
    return max(int(value), 1) if value.isascii() and value.isdigit() and len(value) < 10 else 1


def number(environment: Mapping[str, str], name: str, default: float, least: float = 0.0) -> float:
    text = environment.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value < float("inf"):
        raise SettingsError(f"{name}: wants a number from {least:g} on, got {text[:40]!r}")
    return value


def switch(environment: Mapping[str, str], name: str, default: bool) -> bool:
    """Unset or empty: the default; "0": off; any other whole number: on; text that is no number: off."""
    text = environment.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text) != 0
    except ValueError:
        return False


def pack_of(args: list[str], cwd: Path) -> Path | None:
    """The pack that the engine's options name; the last one counts."""
    pack = option_value(args, "--pack")
    return None if pack is None else Path(os.path.normpath(cwd / pack))


def option_value(args: list[str], *names: str) -> str | None:
    """The value of an option in either spelling, `--name value` or `--name=value`; the last one counts."""
    found = None
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in names:
            found = value if equals else next(iter(args[i + 1 : i + 2]), found)
    return found
