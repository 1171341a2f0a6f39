"""The file strata-<model>.json: its schema, its loader, and the engine's command line made from it.

The schema is the documentation: a field's type, range, default and meaning are written once, below, and
`describe()` hands them to the page docs/configuration.md.

Form     one JSON object, UTF-8 with or without BOM, at most 16 MiB. Keys that begin with `//` are comments; null means
         the default; unknown keys are kept in `Config.unknown` and otherwise ignored
Paths    relative ones count from the folder of the file
Errors   ConfigError, one line: the file, the key, what is wanted, what was given
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from .fields import MAX_INT32, MAX_UINT64

MAX_FILE_BYTES = 16 * 1024 * 1024
MAX_SECONDS = 31_536_000  # one year; "for ever" is written as 0 where a key knows it
BATCH_OPTIONS = ("--batch", "--slots")

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Text = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=0, le=MAX_INT32)]
_Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
_Device = Annotated[int, Meta(ge=0, le=255)]


class ConfigError(Exception):
    """A config file that cannot be used. `str(error)` is one line for the person who wrote it."""


def _doc(meaning: str) -> Meta:
    return Meta(description=meaning)


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Values for the sampling fields that a request leaves out; None: nothing is preset."""

    temperature: Annotated[Annotated[float, Meta(ge=0, le=100)] | None, _doc("0 is greedy")] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, _doc("nucleus; 1 is off")] = None
    top_k: Annotated[Annotated[int, Meta(ge=1, le=64)] | None, _doc("candidates kept")] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, _doc("drops candidates below this share of the best one")
    ] = None
    presence_penalty: Annotated[Annotated[float, Meta(ge=-100, le=100)] | None, _doc("0 is off")] = None
    frequency_penalty: Annotated[Annotated[float, Meta(ge=-100, le=100)] | None, _doc("0 is off")] = None
    repetition_penalty: Annotated[Annotated[float, Meta(gt=0, le=100)] | None, _doc("1 is off")] = None
    penalty_last_n: Annotated[
        Annotated[int, Meta(ge=0, le=4096)] | None, _doc("tokens the penalties look back over")
    ] = None
    seed: Annotated[Annotated[int, Meta(ge=0)] | None, _doc("seed of the draw, below 2^64; 0 takes the clock")] = None
    experimental_speed_projection: Annotated[bool | None, _doc("use the loaded control vector")] = None


class Vision(msgspec.Struct, frozen=True, kw_only=True):
    """The helper program that turns pictures into embeddings."""

    exe: Annotated[_Text | None, _doc("program of the helper")] = None
    mmproj: Annotated[_Text | None, _doc("projector file")] = None
    model: Annotated[_Text | None, _doc("model file the helper needs beside the projector")] = None
    gpu: Annotated[bool | None, _doc("run the helper on a graphics card")] = None
    threads: Annotated[Annotated[int, Meta(ge=1, le=1024)] | None, _doc("threads of the helper")] = None
    max_tokens: Annotated[Annotated[int, Meta(ge=1, le=MAX_INT32)] | None, _doc("most tokens of one picture")] = None
    min_tokens: Annotated[Annotated[int, Meta(ge=1, le=MAX_INT32)] | None, _doc("fewest tokens of one picture")] = None
    cuda_device: Annotated[_Device | None, _doc("card of the helper")] = None


class Mcp(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for tools that the server itself calls."""

    timeout_s: Annotated[_Seconds, _doc("longest call")] = 60
    max_result_chars: Annotated[_Count, _doc("longest result, the rest is cut off")] = 20000
    max_rounds: Annotated[_Count, _doc("most calls in a row within one request")] = 8


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Every key of the file, in the order of the documentation."""

    exe: Annotated[
        _Text | None,
        _doc("engine program: a path, or a name looked up beside this file, beside the server's Python, then on PATH"),
    ] = None
    args: Annotated[list[str], _doc("engine options, passed on in order; `--batch` here wins over `parallel`")] = []
    cwd: Annotated[_Text | None, _doc("working directory of the engine; default: the folder of this file")] = None
    tokenizer: Annotated[_Text | None, _doc("tokenizer files; default: what the pack carries")] = None
    model_name: Annotated[_Text | None, _doc("id shown to clients; default: the name of this file")] = None
    aliases: Annotated[list[_Text] | dict[_Text, Any], _doc("further ids under which the model answers")] = []
    log: Annotated[_Text | None, _doc("file for the engine's log; default: beside this file, ending in .log")] = None
    env: Annotated[
        dict[_Text, str | int | float | bool], _doc("environment of the engine; wins over inherited variables")
    ] = {}
    lib_dirs: Annotated[list[_Text], _doc("folders put in front of the engine's library search path")] = []
    backend: Annotated[
        Literal["auto", "cuda", "hip", "sycl", "cpu"], _doc("`cpu` runs the engine without a graphics card")
    ] = "auto"
    gpu: Annotated[_Device | list[_Device] | None, _doc("CUDA devices the engine may see")] = None
    hip_ordinal: Annotated[_Device | list[_Device] | None, _doc("HIP devices the engine may see")] = None
    parallel: Annotated[
        Annotated[int, Meta(le=MAX_INT32)] | None,
        _doc("slots for requests that run at once; 1 or less: one at a time. No whole number: ignored"),
    ] = None
    layer_split: Annotated[
        str | list[int] | None,
        _doc('layers over several GPUs: "auto", or the first layer of each further GPU, rising, from 2 on'),
    ] = None
    head_device: Annotated[_Device | Literal["auto"] | None, _doc("device of the output head on a split")] = None
    gpu_order: Annotated[list[_Device] | None, _doc("order of the devices for the split")] = None
    split_skip_if_fits: Annotated[bool, _doc("no split when one GPU holds the model")] = False
    four_card_profile: Annotated[bool, _doc("false: the settings for four equal 32 GB cards are never filled in")] = (
        True
    )
    host: Annotated[_Text, _doc("address to listen on")] = "127.0.0.1"
    api_key: Annotated[_Text | list[_Text] | None, _doc("key, or keys, that clients must send")] = None
    sampling: Annotated[Sampling, _doc("values for what a request leaves out")] = Sampling()
    fit_max_tokens: Annotated[bool, _doc("a max_tokens beyond the context is lowered instead of refused")] = False
    reasoning_budget_tokens: Annotated[_Count, _doc("thinking tokens before the answer is forced; 0: no limit")] = 0
    reasoning_close_retry: Annotated[bool, _doc("try again when thinking never ends")] = False
    reasoning_loop_recovery: Annotated[bool, _doc("leave a loop inside the thinking")] = False
    tool_call_recovery: Annotated[bool, _doc("repair a broken tool call")] = False
    repeat_stop_tokens: Annotated[_Count, _doc("tokens of one repeated cycle that end a request; 0: never")] = 256
    anthropic_thinking: Annotated[
        Literal["model", "on_request"], _doc("thinking on /v1/messages: as the model does, or only when asked for")
    ] = "model"
    effort_position: Annotated[Literal["start", "end"], _doc("where the effort word stands in the prompt")] = "start"
    engine_silence_s: Annotated[
        _Seconds, _doc("seconds without a line while a request is open before the engine is ended; 0: never")
    ] = 300
    idle_unload_s: Annotated[_Seconds, _doc("seconds without a request before the engine is closed; 0: never")] = 0
    lazy_load: Annotated[bool, _doc("start the engine with the first request")] = False
    min_free_vram_mib: Annotated[_Count, _doc("free VRAM to wait for before a start")] = 0
    before_load: Annotated[_Text | list[_Text] | None, _doc("command run before each start of the engine")] = None
    vram_elastic: Annotated[bool, _doc("the expert cache can be made smaller and larger while running")] = False
    vram_segment_mib: Annotated[int, Meta(ge=64, le=MAX_INT32), _doc("unit in which it gives memory back")] = 512
    vram_reserve_mib: Annotated[_Count | None, _doc("VRAM that planning leaves free; default: the engine's")] = None
    expert_profile_save: Annotated[_Text | None, _doc("file for the learned order of the experts")] = None
    expert_profile_save_every: Annotated[int, Meta(ge=1, le=MAX_INT32), _doc("requests between saves")] = 10
    slot_save_path: Annotated[_Text | None, _doc("folder of session files; absent: the endpoint is off")] = None
    vision: Annotated[Vision | None, _doc("pictures; absent: they are refused")] = None
    mcp_servers: Annotated[dict[_Text, Any] | None, _doc("tool servers that the server itself calls, by name")] = None
    mcp: Annotated[Mcp, _doc("limits for those tools")] = Mcp()
    cors_origins: Annotated[list[_Text], _doc("origins that browsers may call from")] = []
    trusted_origins: Annotated[list[_Text], _doc("origins that count as this server's own page")] = []
    allowed_hosts: Annotated[list[_Text], _doc("further Host names under which requests are accepted")] = []
    api_monitor: Annotated[bool, _doc("keep the last requests for /api/requests")] = False
    open_browser: Annotated[bool, _doc("open the page at start")] = False
    codex_thread_titles: Annotated[bool | None, _doc("answer that client's title requests without the model")] = None
    codex_compaction_cache: Annotated[bool | None, _doc("keep that client's compacted history")] = None
    max_queue: Annotated[_Count, _doc("waiting requests before new ones get 429; 0: no limit")] = 0
    wait_for_engine: Annotated[bool, _doc("requests wait while the engine starts, instead of getting 503")] = False


class Config(Keys, frozen=True, kw_only=True):
    """The keys of a loaded file, and what the file's place and oddities add to them."""

    path: Path  # absolute
    unknown: dict[str, Any] = {}  # name of each key that the schema does not have (dotted inside an object) -> value
    warnings: tuple[str, ...] = ()  # lines for the log

    @property
    def engine_cwd(self) -> Path:
        return self.path.parent / self.cwd if self.cwd else self.path.parent

    @property
    def log_path(self) -> Path:
        return self.path.parent / self.log if self.log else self.path.with_suffix(".log")

    @property
    def model_id(self) -> str:
        return self.model_name or self.path.stem

    @property
    def api_keys(self) -> tuple[str, ...]:
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key or ())


class KeyDoc(NamedTuple):
    key: str
    type: str
    default: str
    meaning: str


def describe() -> list[KeyDoc]:
    """One row per key, keys of objects right behind their object, for the documentation."""
    return _describe(Keys, "")


def load(path: str | Path) -> Config:
    """Read and check a config file."""
    path = Path(path)
    reader = _Reader(path)
    raw = reader.read()
    values: dict[str, Any] = dict(raw)
    parallel = values.get("parallel")
    if parallel is not None and (isinstance(parallel, bool) or not isinstance(parallel, int)):
        reader.warnings.append(
            f"{path}: parallel: wants a whole number, got {_shown(parallel)}; ignored, one request runs at a time"
        )
        del values["parallel"]
    keys = reader.build(Keys, values, "")
    reader.check(keys)
    if keys.backend in ("hip", "sycl"):
        reader.warnings.append(f"{path}: backend: {keys.backend} has no effect, this engine runs on cuda or cpu")
    fields = {name: getattr(keys, name) for name in Keys.__struct_fields__}
    return Config(**fields, path=path.absolute(), unknown=reader.unknown, warnings=tuple(reader.warnings))


def engine_command(config: Config) -> list[str]:
    """The engine's argv: exe, args, what other keys add, `--serve`. Raises ConfigError when there is no `exe`."""
    if config.exe is None:
        raise ConfigError(f"{config.path}: exe: wants the engine program, got nothing")
    added: list[str] = []
    if config.parallel is not None and config.parallel > 1 and not _has_option(config.args, BATCH_OPTIONS):
        added += ["--batch", str(config.parallel)]
    if config.backend == "cpu" and not _has_option(config.args, ("--device",)):
        added += ["--device", "host"]
    if config.layer_split is not None:
        split = config.layer_split
        added += ["--layer-split", split if isinstance(split, str) else ",".join(map(str, split))]
    if isinstance(config.head_device, int):
        added += ["--head-device", str(config.head_device)]
    if config.split_skip_if_fits:
        added += ["--split-skip-if-fits"]
    if config.vram_elastic:
        added += ["--vram-elastic", "--vram-segment-mib", str(config.vram_segment_mib)]
    if config.vram_reserve_mib is not None:
        added += ["--vram-reserve-mib", str(config.vram_reserve_mib)]
    if config.expert_profile_save is not None:
        added += ["--expert-profile-save", config.expert_profile_save]
        added += ["--expert-profile-save-every", str(config.expert_profile_save_every)]
    if config.vision is not None:
        added += ["--vision"]
    return [_find_program(config.exe, config.path.parent), *config.args, *added, "--serve"]


def engine_environment(config: Config, inherited: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: `inherited`, then devices and library folders of the config, then its `env`."""
    result = dict(inherited)
    for variable, devices in (("CUDA_VISIBLE_DEVICES", config.gpu), ("HIP_VISIBLE_DEVICES", config.hip_ordinal)):
        if devices is not None:
            chosen = [devices] if isinstance(devices, int) else devices
            result[variable] = ",".join(map(str, chosen))
    if config.gpu_order is not None:
        result["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.gpu_order))
    if config.lib_dirs:
        variable = "PATH" if os.name == "nt" else "LD_LIBRARY_PATH"
        folders = [str(config.path.parent / folder) for folder in config.lib_dirs]
        result[variable] = os.pathsep.join(folders + ([result[variable]] if result.get(variable) else []))
    for name, value in config.env.items():
        result[name] = str(int(value)) if isinstance(value, bool) else str(value)
    return result


def _has_option(args: list[str], names: tuple[str, ...]) -> bool:
    return any(arg.split("=", 1)[0] in names for arg in args)


def _find_program(exe: str, folder: Path) -> str:
    """The program's path; a name that is found nowhere stays as it is, and starting it says so."""
    if os.path.dirname(exe):
        return str(folder / exe)
    places = [str(folder), os.path.dirname(sys.executable), os.environ.get("PATH", "")]
    return shutil.which(exe, path=os.pathsep.join(places)) or exe


class _Reader:
    """One pass over one file: collects unknown keys and warnings, raises at the first error."""

    def __init__(self, path: Path):
        self.path = path
        self.unknown: dict[str, Any] = {}
        self.warnings: list[str] = []

    def read(self) -> dict[str, Any]:
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise self.error("", f"cannot be read: {error.strerror or error}") from None
        if len(data) > MAX_FILE_BYTES:
            raise self.error("", f"is larger than {MAX_FILE_BYTES} bytes; this is no config file")
        data = data.removeprefix(b"\xef\xbb\xbf")
        try:
            raw = msgspec.json.decode(data)
        except RecursionError:
            raise self.error("", "is nested too deeply; this is no config file") from None
        except msgspec.DecodeError as error:
            raise self.error("", f"is no JSON: {_with_line(str(error), data)}") from None
        if not isinstance(raw, dict):
            raise self.error("", f"wants one JSON object, got {_shown(raw)}")
        return raw

    def build(self, kind: type[_Struct], raw: dict[str, Any], prefix: str) -> _Struct:
        """A struct of `kind` from `raw`; `prefix` is the dotted name of the object, with its dot."""
        known = {info.name: info for info in msgspec.structs.fields(kind)}
        values: dict[str, Any] = {}
        for name, value in raw.items():
            if name.startswith("//"):
                continue
            if name not in known:
                self.unknown[prefix + name] = value
            elif value is not None:
                inner = _object_kind(known[name].type)
                if inner is not None and isinstance(value, dict):
                    values[name] = self.build(inner, value, f"{prefix}{name}.")
                else:
                    values[name] = self.convert(value, known[name].type, prefix + name)
        return kind(**values)

    def convert(self, value: Any, kind: Any, key: str) -> Any:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            at = re.search(r"at `\$((?:\[\d+\])+)`", str(error))
            given = value
            for index in re.findall(r"\d+", at[1]) if at else ():
                given = given[int(index)]
            where = f" at {at[1]}" if at else ""
            raise self.error(key, f"wants {_type_text(kind)}, got {_shown(given)}{where}") from None

    def check(self, keys: Keys) -> None:
        """What the types cannot say."""
        if keys.sampling.seed is not None and keys.sampling.seed > MAX_UINT64:
            raise self.error("sampling.seed", f"wants a whole number below 2^64, got {keys.sampling.seed}")
        if keys.layer_split is not None and not _is_layer_split(keys.layer_split):
            wants = 'wants "auto" or rising first layers from 2 on, such as "13,26,39"'
            raise self.error("layer_split", f"{wants}, got {_shown(keys.layer_split)}")
        for name in keys.env:
            if "=" in name:
                raise self.error("env", f"wants names without '=', got {_shown(name)}")
        texts: dict[str, Iterable[object]] = {
            "exe": [keys.exe],
            "args": keys.args,
            "cwd": [keys.cwd],
            "env": [*keys.env, *keys.env.values()],
        }
        for key, values in texts.items():
            for value in values:
                if isinstance(value, str) and "\0" in value:
                    raise self.error(key, f"wants text without NUL characters, got {_shown(value)}")

    def error(self, key: str, message: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key}: {message}" if key else f"{self.path}: {message}")


def _is_layer_split(value: str | list[int]) -> bool:
    if isinstance(value, str):
        if value == "auto":
            return True
        words = value.split(",")
        if not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
            return False
        value = [int(word) for word in words]
    return bool(value) and value[0] >= 2 and all(a < b for a, b in pairwise(value))


def _object_kind(kind: Any) -> type[msgspec.Struct] | None:
    """The struct that a key's object becomes, or None when the key is no object with fixed keys."""
    info = _plain(msgspec.inspect.type_info(kind))
    choices = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    return next((choice.cls for choice in map(_plain, choices) if isinstance(choice, msgspec.inspect.StructType)), None)


def _plain(info: msgspec.inspect.Type) -> msgspec.inspect.Type:
    return _plain(info.type) if isinstance(info, msgspec.inspect.Metadata) else info


def _describe(kind: type[msgspec.Struct], prefix: str) -> list[KeyDoc]:
    rows = []
    for info in msgspec.structs.fields(kind):
        schema = msgspec.inspect.type_info(info.type)
        meaning = (schema.extra_json_schema or {}) if isinstance(schema, msgspec.inspect.Metadata) else {}
        default = info.default_factory() if info.default is msgspec.NODEFAULT else info.default
        text = "" if default is None else msgspec.json.encode(default).decode()
        inner = _object_kind(info.type)
        rows.append(KeyDoc(prefix + info.name, _type_text(info.type), "" if inner else text, meaning["description"]))
        if inner:
            rows += _describe(inner, f"{prefix}{info.name}.")
    return rows


def _type_text(kind: Any) -> str:
    return _info_text(msgspec.inspect.type_info(kind))


def _info_text(info: msgspec.inspect.Type) -> str:
    """A type in words, as it stands after "wants"."""
    inspect = msgspec.inspect
    info = _plain(info)
    if isinstance(info, inspect.UnionType):
        return " or ".join(_info_text(choice) for choice in info.types if not isinstance(choice, inspect.NoneType))
    if isinstance(info, inspect.LiteralType):
        return " or ".join(f'"{value}"' for value in info.values)
    if isinstance(info, inspect.BoolType):
        return "true or false"
    if isinstance(info, inspect.IntType | inspect.FloatType):
        name = "a whole number" if isinstance(info, inspect.IntType) else "a number"
        low = f" above {info.gt}" if info.gt is not None else f" from {info.ge}" if info.ge is not None else ""
        high = "" if info.le is None else f" to {info.le}" if low else f" up to {info.le}"
        return name + low + high
    if isinstance(info, inspect.ListType):
        return f"a list (each: {_info_text(info.item_type)})"
    if isinstance(info, inspect.StrType):
        return "text that is not empty" if info.min_length else "text"
    if isinstance(info, inspect.DictType) and not isinstance(info.value_type, inspect.AnyType):
        return f"an object (each value: {_info_text(info.value_type)})"
    return "an object"


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= 60 else text[:57] + "..."


def _with_line(message: str, data: bytes) -> str:
    """msgspec's message with line and column instead of a byte offset."""
    at = re.search(r" \(byte (\d+)\)", message)
    if at is None:
        return message
    before = data[: int(at[1])]
    column = len(before) - before.rfind(b"\n")
    return (
        f"{message[: at.start()].removeprefix('JSON is malformed: ')} in line {before.count(10) + 1}, column {column}"
    )
