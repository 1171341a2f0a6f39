"""strata-server: flags and config to a running server.

Exit     0 after SIGINT or SIGTERM · 1 when the address is taken · 2 for anything wrong with flags, config or pack
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from strata.protocol.config import Config, ConfigError, engine_command, engine_environment, load
from strata.protocol.version import VERSION

from .app import TURN_WORD, RunningServer
from .chat.errors import TemplateError, VocabularyError
from .chat.template import Chat
from .chat.vocabulary import Vocabulary
from .process import Launch
from .settings import Flags, Settings, SettingsError, api_keys, number, pack_of, patience, rules, slots_asked, switch

log = logging.getLogger("strata")

EXIT_ADDRESS = 1
EXIT_USAGE = 2
_DEFAULT_PORT = 8095

_HELP = """\
Serves a model over HTTP with the OpenAI interface. The config names the engine program and its options:

  {"exe": "strata-engine", "args": ["--pack", "model.gguf", "--device", "host"]}

  strata-server --config strata-model.json --port 8080
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hello"}]}'

docs/configuration.md lists every key. What is given here wins over the environment, which wins over the config.
"""

# Options of the interface that this version does not have; each is refused by its name instead of being ignored.
_NOT_YET = ("--gpu", "--min-free-vram-mib", "--slot-save-path", "--api-monitor", "--mcp-config", "--open")

# Config keys that change behaviour and that this version does not act on; each is named at the start.
_KEYS_NOT_YET = (
    "reasoning_budget_tokens", "reasoning_close_retry", "reasoning_loop_recovery", "tool_call_recovery",
    "min_free_vram_mib", "slot_save_path", "vision", "mcp_servers", "api_monitor", "open_browser",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    try:
        flags = parse_flags(argv)
        configure_logging(os.environ)
        settings = settings_of(flags, os.environ)
        chat = load_chat(settings)
        return asyncio.run(serve(with_turn_token(settings, chat.vocabulary), chat))
    except SettingsError as error:
        sys.stderr.write(f"strata-server: {error}\n")
        return EXIT_USAGE


def parse_flags(argv: list[str] | None) -> Flags:
    parser = argparse.ArgumentParser(
        prog="strata-server",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"strata {VERSION}")
    add("--config", type=Path, metavar="FILE", help="strata-<model>.json; needed unless --engine mock")
    add(
        "--engine",
        choices=("strata", "mock"),
        default="strata",
        help="mock: scripted answers without a model",
    )
    add("--script", type=Path, metavar="FILE", help="answers of the mock engine")
    add("--host", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, metavar="N", help=f"port to listen on; 0 takes a free one (default: {_DEFAULT_PORT})")
    add("--tokenizer", type=Path, metavar="PACK", help="GGUF file with the vocabulary (default: the engine's --pack)")
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="key for clients; repeatable, or a comma list",
    )
    add("--fit-max-tokens", action="store_true", help="lower a max_tokens beyond the context instead of refusing it")
    add("--lazy", action="store_true", help="start the engine with the first request")
    add("--idle-unload", type=float, metavar="SECONDS", help="end the engine after so long without a request")
    add("--before-load", metavar="COMMAND", help="command run before each start of the engine")
    for name in _NOT_YET:
        add(name, nargs="?", action=_NotYet, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    return Flags(
        config=options.config,
        engine=options.engine,
        script=options.script,
        host=options.host,
        port=options.port,
        tokenizer=options.tokenizer,
        api_keys=tuple(options.api_key),
        fit_max_tokens=options.fit_max_tokens,
        lazy=options.lazy,
        idle_unload_s=options.idle_unload,
        before_load=options.before_load,
    )


class _NotYet(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise SettingsError(f"{self.option_strings[0]} is not available in this version")


def settings_of(flags: Flags, environment: Mapping[str, str]) -> Settings:
    """Raises SettingsError."""
    config = _load_config(flags)
    keys = api_keys(flags, environment, config)
    launch, pack = _launch(flags, config, environment)
    port = _DEFAULT_PORT if flags.port is None else flags.port
    if not 0 <= port <= 65535:
        raise SettingsError(f"--port: wants a number from 0 to 65535, got {port}")
    idle_unload_s = flags.idle_unload_s if flags.idle_unload_s is not None else config.idle_unload_s if config else 0.0
    if not 0 <= idle_unload_s < float("inf"):
        raise SettingsError(f"--idle-unload: wants seconds from 0 on, got {idle_unload_s:g}")
    more_hosts = environment.get("STRATA_ALLOWED_HOSTS", "").replace(",", " ").split()
    defaults = Settings(model="mock", launch=launch)
    return Settings(
        model=config.model_id if config else "mock",
        launch=launch,
        host=flags.host or (config.host if config else defaults.host),
        port=port,
        aliases=tuple(config.aliases) if config else (),
        pack=pack,
        api_keys=keys,
        allowed_hosts=(*(config.allowed_hosts if config else ()), *more_hosts),
        trusted_origins=tuple(config.trusted_origins) if config else (),
        cors_origins=tuple(config.cors_origins) if config else (),
        sampling=config.sampling if config else defaults.sampling,
        fit_max_tokens=flags.fit_max_tokens or bool(config and config.fit_max_tokens),
        repeat_stop_tokens=config.repeat_stop_tokens if config else defaults.repeat_stop_tokens,
        patience=patience(environment, config),
        before_load=_before_load(flags, config),
        lazy_load=flags.lazy or bool(config and config.lazy_load),
        idle_unload_s=idle_unload_s,
        wait_for_engine=bool(config and config.wait_for_engine),
        rules=rules(environment, config),
        parallel=slots_asked(launch.command),
        backlog=max(int(number(environment, "STRATA_HTTP_BACKLOG", 256)), 5),
        max_body_bytes=int(number(environment, "STRATA_MAX_BODY_MIB", 256) * 1024 * 1024),
        request_lines=switch(environment, "STRATA_REQUEST_LINES", True),
        keep_empty_turns=switch(environment, "STRATA_KEEP_EMPTY_TURNS", False),
    )


def _load_config(flags: Flags) -> Config | None:
    if flags.config is None:
        if flags.engine == "strata":
            raise SettingsError("--config FILE is needed; `strata-server --help` shows one")
        return None
    try:
        config = load(flags.config)
    except ConfigError as error:
        raise SettingsError(str(error)) from None
    for warning in config.warnings:
        log.warning("%s", warning)
    for key in config.unknown:
        log.warning("%s: %s: unknown key, ignored", config.path, key)
    for key in _KEYS_NOT_YET:
        if getattr(config, key):
            log.warning("%s: %s: not available in this version, ignored", config.path, key)
    if config.effort_position != "start":
        log.warning("%s: effort_position: only start is available in this version", config.path)
    return config


def _launch(flags: Flags, config: Config | None, environment: Mapping[str, str]) -> tuple[Launch, Path | None]:
    """How to start the engine, and the file with the vocabulary."""
    tokenizer = flags.tokenizer
    if tokenizer is None and config is not None:
        named = config.path.parent / config.tokenizer if config.tokenizer else None
        tokenizer = named or pack_of(config.args, config.engine_cwd)
    if tokenizer is None:
        raise SettingsError("the vocabulary is missing: give --pack in the config's `args`, or --tokenizer PACK")
    if flags.engine == "mock":
        command = [sys.executable, "-m", "strata.server.mock_engine", "--tokenizer", str(tokenizer)]
        if flags.script is not None:
            command += ["--script", str(flags.script)]
        if config is not None and config.parallel is not None and config.parallel > 1:
            command += ["--batch", str(config.parallel)]
        return Launch(command, env=dict(environment)), tokenizer
    assert config is not None
    try:
        command = engine_command(config)
    except ConfigError as error:
        raise SettingsError(str(error)) from None
    engine_log = Path(os.path.normpath(config.log_path))
    return Launch(command, config.engine_cwd, engine_environment(config, environment), engine_log), tokenizer


def _before_load(flags: Flags, config: Config | None) -> list[str] | None:
    command = flags.before_load or (config.before_load if config else None)
    try:
        return shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise SettingsError(f"before_load: {error}: {command}") from None


def load_chat(settings: Settings) -> Chat:
    """The vocabulary and template of the pack. Raises SettingsError."""
    assert settings.pack is not None
    try:
        vocabulary = Vocabulary.load(settings.pack)
        return Chat(vocabulary, keep_empty_turns=settings.keep_empty_turns)
    except OSError as error:
        raise SettingsError(f"{settings.pack}: {error.strerror or error}") from None
    except (VocabularyError, TemplateError) as error:
        raise SettingsError(str(error)) from None


def with_turn_token(settings: Settings, vocabulary: Vocabulary) -> Settings:
    """The settings with an engine that is told the turn token, unless the config does."""
    command = settings.launch.command
    if any(word.partition("=")[0] == "--turn-token" for word in command):
        return settings
    command = [*command, *turn_options(vocabulary)]
    return replace(settings, launch=replace(settings.launch, command=command))


def turn_options(vocabulary: Vocabulary) -> list[str]:
    """The engine keeps checkpoints where a turn begins. It knows no words, so its options say the token."""
    token = vocabulary.special.get(TURN_WORD)
    return [] if token is None else ["--turn-token", str(token)]


async def serve(settings: Settings, chat: Chat) -> int:
    """Until SIGINT or SIGTERM. A second one does not wait for the engine's last words."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number_ in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number_, signals.put_nowait, number_)
    server = RunningServer(settings, chat)
    try:
        await server.__aenter__()
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        log.error("cannot listen on %s: %s; choose another --host or --port", where, error.strerror or error)
        return EXIT_ADDRESS
    announce(settings, server.url)
    number_ = await signals.get()
    log.info("%s: ending the engine", number_.name)
    ending = asyncio.create_task(server.__aexit__(None, None, None))
    again = asyncio.create_task(signals.get())
    await asyncio.wait((ending, again), return_when=asyncio.FIRST_COMPLETED)
    if not ending.done():
        log.warning("%s again: killing the engine", again.result().name)
        server.state.service.kill_engine()
    again.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ending
    return 0


def announce(settings: Settings, url: str) -> None:
    """What a person wants to know at the start."""
    names = settings.model if not settings.aliases else f"{settings.model} (also {', '.join(settings.aliases)})"
    log.info("model %s, from %s", names, settings.pack)
    if settings.launch.log is not None:
        log.info("engine log: %s", settings.launch.log)
    log.info("listening on %s; OpenAI base URL: %s/v1%s", url, url, ", with API key" if settings.api_keys else "")
    key = "-H 'Authorization: Bearer KEY' " if settings.api_keys else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    log.info("try: curl %s/v1/chat/completions %s-H 'Content-Type: application/json' -d '%s'", url, key, body)
    if settings.host not in ("127.0.0.1", "::1", "localhost") and not settings.api_keys:
        log.warning("%s can be reached from other machines and asks for no key; set --api-key", settings.host)
    if settings.lazy_load:
        log.info("the engine starts with the first request")


def configure_logging(environment: Mapping[str, str]) -> None:
    logging.basicConfig(
        format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S", level=logging.INFO, stream=sys.stderr
    )
    for name, variable in (("strata.trace", "STRATA_DEBUG"), ("strata.scheduler", "STRATA_BATCH_TRACE")):
        logging.getLogger(name).setLevel(logging.DEBUG if switch(environment, variable, False) else logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
