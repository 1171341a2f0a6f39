"""The lines that engine and server exchange over the engine's standard input and output.

One frozen struct per line; commands (server to engine) are in commands.py, outputs (engine to server) in outputs.py.

    encode(line) -> str             the line without its LF
    decode_command(text) -> Command | None
    decode_output(text) -> Output | None

Decoding takes str or bytes of one line, with or without its LF (and a CR before it); an empty line is None.
Errors   ProtocolError, in both directions; an engine writes `Err(str(error))` for a command it cannot read
Source   docs/protocol.md
"""

from .commands import (
    BGen,
    BGenI,
    BStop,
    BYield,
    Command,
    Gen,
    GenI,
    Quit,
    Restore,
    SamplingKeys,
    Save,
    Stop,
    VramCommand,
    decode_command,
)
from .fields import MAX_LINE_BYTES, Ids, ProtocolError, rate
from .outputs import (
    Admitted,
    ChainCounts,
    Done,
    Err,
    Fatal,
    Finish,
    Info,
    InfoValue,
    Output,
    Progress,
    Ready,
    Restored,
    Resume,
    Reused,
    Saved,
    SessionError,
    SessionProgress,
    SessionWait,
    SlotDone,
    SlotFinish,
    SlotToken,
    Token,
    Unknown,
    VramReport,
    Yielded,
    decode_output,
    merge_info,
)


def encode(line: Command | Output) -> str:
    """The line as text without LF. Raises ProtocolError when a reader would not get the same line back."""
    text = line.line()
    if len(text) > MAX_LINE_BYTES:
        raise ProtocolError(f"bad request: the line is longer than {MAX_LINE_BYTES} bytes")
    return text


__all__ = [
    "MAX_LINE_BYTES",
    "Admitted",
    "BGen",
    "BGenI",
    "BStop",
    "BYield",
    "ChainCounts",
    "Command",
    "Done",
    "Err",
    "Fatal",
    "Finish",
    "Gen",
    "GenI",
    "Ids",
    "Info",
    "InfoValue",
    "Output",
    "Progress",
    "ProtocolError",
    "Quit",
    "Ready",
    "Restore",
    "Restored",
    "Resume",
    "Reused",
    "SamplingKeys",
    "Save",
    "Saved",
    "SessionError",
    "SessionProgress",
    "SessionWait",
    "SlotDone",
    "SlotFinish",
    "SlotToken",
    "Stop",
    "Token",
    "Unknown",
    "VramCommand",
    "VramReport",
    "Yielded",
    "decode_command",
    "decode_output",
    "encode",
    "merge_info",
    "rate",
]
