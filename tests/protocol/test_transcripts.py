"""Whole conversations: every line reads as the type it is, and is written again letter by letter."""

import re
from pathlib import Path
from typing import get_args

import pytest

from strata.protocol import lines

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"

SOLO = """\
< INFO context=32768 kv=int8 kv_resident=0 expert_slots=7056 pcie_frac=0.55 batch_slots=2 slot_cache=1 engine=0.1.0
< READY 32768 stop
> GEN 64 temperature=0.7 top_k=40 top_p=0.9 seed=7 11,12,13
< RESUME 0
< PP 2048 5000 905.1 2262.7
< PP 5000 5000 2230.4 2241.7
< REUSED 0
< T 900
< T 248046
< DONE 2 5000 2230.4 41.2 stop 2 3 0 1610 1920 250 0 0.0 5000 60
"""

TWO_SLOTS = """\
> GEN 100 1,2,3
< RESUME 0
< PP 3000 3000 1330.0 2255.6
< REUSED 0
< T 11
> STOP
< T 13
< DONE 2 3000 1330.0 48.0 cancel 1 2 0 900 1000 60 0 0.0 3000 40
> BGEN 0 97 1,2,3,11,13
< RESUME 3002
< PP 3003 3003 21.0 47.6
< REUSED 3002
< T 14
< DONE 1 3003 21.0 14.0 length 0 0 3002 0 0 0 0 0.0 1 0
< BADM 0 1
> BGEN 1 50 21,22
< RESUME 0
< BT 0 15
< PP 2500 2500 1790.0 1396.6
< REUSED 0
< T 21
< DONE 1 2500 1790.0 15.0 length 0 0 0 0 0 0 0 0.0 2500 0
< BADM 1 1
< BT 1 248046
< BDONE 1 31 stop 812.0
> BSTOP 0
< BT 0 60
< BDONE 0 47 cancel 1990.0 3 9
"""

GIVES_WAY = """\
> BGEN 0 200 1,2,3
< RESUME 0
< PP 2048 12000 910.0 2250.5
> BYIELD 0
< PP 4096 12000 1821.0 2249.3
< YIELDED 0 4096
< DONE 0 12000 1821.0 0.0 cancel 0 0 0 0 0 0 0 0.0 4096 0
< BADM 0 0
"""

DEATH = """\
> GEN 64 1
< RESUME 0
< PP 2048 2048 3070.0 667.1
< ERR fatal: the output head moved from 0x7f10 to 0x7f90; captured windows would use freed memory
"""

SIDE = """\
> VRAM
< VRAM reserve_mib=700 expert_slots=507 expert_slots_full=600 expert_cache_mib=990 vram_free_mib=712 prompt_chunk=2048
> VRAM 900
< ERR VRAM needs --vram-elastic
> SAVE /tmp/a conversation.bin
< SWAIT write 30
< SESSION 16777216 33554432
< SAVED 3000 33554432 412.5
> RESTORE /tmp/none.bin
< SERR io 0 no such file
> RESTORE /tmp/bad.bin
< FATAL the state is half replaced
> QUIT
"""


@pytest.mark.parametrize("transcript", [SOLO, TWO_SLOTS, GIVES_WAY, DEATH, SIDE], ids=range(5))
def test_a_transcript_is_written_as_it_was_read(transcript):
    for row in transcript.splitlines():
        text = row[2:]
        line = lines.decode_command(text) if row.startswith(">") else lines.decode_output(text)
        assert line is not None
        assert not isinstance(line, lines.Unknown)
        assert getattr(line, "word", None) == text.split(" ")[0]
        assert lines.encode(line) == text


def test_the_fields_of_done_are_in_the_order_of_the_protocol():
    done = lines.decode_output(SOLO.splitlines()[-1][2:])
    assert done == lines.Done(
        generated=2,
        prompt=5000,
        prompt_ms=2230.4,
        decode_ms=41.2,
        finish="stop",
        drafts_accepted=2,
        drafts_offered=3,
        reused=0,
        hits=1610,
        lookups=1920,
        ram_blobs=250,
        file_blobs=0,
        file_mb=0.0,
        prompt_read=5000,
        offloaded=60,
    )


def test_a_dying_engines_last_line_is_told_as_fatal():
    assert lines.decode_output(DEATH.splitlines()[-1][2:]).is_fatal


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("GEN 10 5,x", "bad request: ids"),
        ("HELLO", "expected: GEN <max_new> <ids>"),
    ],
)
def test_a_refused_command_leads_to_the_err_line_of_the_protocol(line, written):
    with pytest.raises(lines.ProtocolError) as error:
        lines.decode_command(line)
    assert lines.encode(lines.Err(str(error.value))).startswith("ERR " + written)


def test_the_documented_conversation_is_what_the_codec_reads_and_writes():
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith(("> ", "< "))]
    assert len(rows) > 15
    for row in rows:
        if row == "> GEN 10 5,x":
            continue
        line = (lines.decode_command if row[0] == ">" else lines.decode_output)(row[2:])
        assert lines.encode(line) == row[2:]
    with pytest.raises(lines.ProtocolError) as refusal:
        lines.decode_command("GEN 10 5,x")
    assert "< " + lines.encode(lines.Err(str(refusal.value))) in rows


def test_every_line_and_every_key_is_on_the_documentation_page():
    page = PAGE.read_text()
    for kind in (*get_args(lines.Command), *get_args(lines.Output)):
        if kind is not lines.Unknown:
            assert re.search(rf"`{kind.word}\b", page), kind
    for key in lines.SamplingKeys.__struct_fields__:
        assert f"`{key}`" in page, key
