"""Whatever arrives on a pipe is a line or one ProtocolError, in bounded time."""

import random
import time
from array import array
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata.protocol import lines

WORDS = [
    *("GEN", "GENI", "BGEN", "BGENI", "STOP", "BSTOP", "BYIELD", "VRAM", "SAVE", "RESTORE", "QUIT"),
    *("INFO", "READY", "RESUME", "PP", "REUSED", "T", "YIELDED", "DONE", "BADM", "BT", "BDONE", "ERR", "SAVED"),
    *("RESTORED", "SESSION", "SWAIT", "SERR", "FATAL", "HELLO", "RESUME id=3", "temperature=0.7", "top_k=", "=", "a=b"),
    *("seed=-1", "seed=18446744073709551616", "top_p=nan", "min_p=1e999", "cvec=2", "pin=x", "stop", "cancel", "io"),
    *("1", "0", "-1", "007", "2147483648", "9" * 5000, "1.5", "1e5", "inf", "nan", "1_0", "+1", "٣", "1,2", ",", ",,"),
    *("\xff", "\x00", "\r", "é", "\u2028", "\u00a0", " ", "\t", "[1]", '"x"', "true", "x" * 300),
]
PIECES = st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=24)
RAW = st.binary(max_size=200) | st.builds(
    lambda words, glue: glue.join(words).encode(), PIECES, st.sampled_from(" \t,")
)


def decoded(decode, line):
    try:
        return decode(line)
    except lines.ProtocolError as error:
        assert str(error)
        assert "\n" not in str(error)
        assert len(str(error)) < 400
        return None


@settings(max_examples=1500, deadline=None)
@given(RAW)
def test_no_bytes_crash_the_codec(raw):
    for decode in (lines.decode_command, lines.decode_output):
        line = decoded(decode, raw)
        kinds = get_args(lines.Command if decode is lines.decode_command else lines.Output)
        assert line is None or isinstance(line, kinds)


@settings(max_examples=500, deadline=None)
@given(RAW)
@example("\U00010000".encode() * 40)  # quoted, a character takes ten
def test_what_was_read_is_written_as_one_line_that_reads_the_same(raw):
    for decode in (lines.decode_command, lines.decode_output):
        line = decoded(decode, raw)
        if line is None:
            continue
        try:
            text = lines.encode(line)
        except lines.ProtocolError:
            continue  # read with tolerance, such as an admission of no tokens; never written
        assert "\n" not in text
        assert lines.encode(decode(text)) == text  # the line itself may have had more fraction digits


def test_a_hundred_thousand_random_lines_decode_or_are_refused():
    rng = random.Random(20240)
    counts = {"read": 0, "refused": 0}
    for _ in range(100_000):
        raw = rng.choice([" ", ",", "\t"]).join(rng.choices(WORDS, k=rng.randrange(12)))
        for decode in (lines.decode_command, lines.decode_output):
            try:
                decode(raw)
                counts["read"] += 1
            except lines.ProtocolError:
                counts["refused"] += 1
    assert counts["read"] > 1000
    assert counts["refused"] > 1000


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("HELLO", "expected: GEN <max_new> <ids>"),
        ("gen 1 2", "expected: "),
        ("GEN", "bad request: max_new"),
        ("GEN x 1", "bad request: max_new"),
        ("GEN 0 1", "bad request: max_new"),
        ("GEN -1 1", "bad request: max_new"),
        ("GEN +1 1", "bad request: max_new"),
        ("GEN 1_0 1", "bad request: max_new"),
        ("GEN ٣ 1", "bad request: max_new"),
        ("GEN " + "9" * 6000 + " 1", "bad request: max_new"),
        ("GEN 10", "bad request: ids"),
        ("GEN 10 5,x", "bad request: ids"),
        ("GEN 10 5,-1", "bad request: ids"),
        ("GEN 10 -0", "bad request: ids"),
        ("GEN 10 2147483648", "bad request: ids"),
        ("GEN 10 1.0", "bad request: ids"),
        ("GEN 10 1,,2", "bad request: ids"),
        ("GEN 10 1,2,", "bad request: ids"),
        ("GEN 10 ,1", "bad request: ids"),
        ("GEN 10 1\n2", "bad request: "),
        ("GEN 10 1\x0b2", "bad request: ids"),
        ("GEN 10 1\u00a02", "bad request: ids"),
        ("GEN 10 " + "7" * 6000, "bad request: ids"),
        ("GEN 10 [1]", "bad request: ids"),
        ("GEN 10 5 temperature=1", "bad request: ids"),
        ("GEN 10 temperature=warm 5", "bad request: temperature"),
        ("GEN 10 temperature=nan 5", "bad request: temperature"),
        ("GEN 10 temperature=inf 5", "bad request: temperature"),
        ("GEN 10 temperature=1e999 5", "bad request: temperature"),
        ("GEN 10 temperature= 5", "bad request: temperature"),
        ("GEN 10 top_k=1.5 5", "bad request: top_k"),
        ("GEN 10 top_p=0 5", "bad request: top_p"),
        ("GEN 10 penalty_repeat=0 5", "bad request: penalty_repeat"),
        ("GEN 10 seed=-1 5", "bad request: seed"),
        ("GEN 10 seed=18446744073709551616 5", "bad request: seed"),
        ("GEN 10 cvec=2 5", "bad request: cvec"),
        ("GEN 10 pcie_frac=1.5 5", "bad request: pcie_frac"),
        ("GEN 10 pin=-3 5", "bad request: pin"),
        ("GEN 10 " + "a=1 " * 300 + "5", "bad request: more than 256 keys"),
        ("GENI 10 1,2", "bad request: ids"),
        ("BGEN x 1 2", "bad request: slot"),
        ("BGEN -1 1 2", "bad request: slot"),
        ("BGEN 0", "bad request: max_new"),
        ("BSTOP", "bad request: slot"),
        ("BSTOP 1 2", "bad request: BSTOP"),
        ("BYIELD 1.0", "bad request: slot"),
        ("STOP now", "bad request: STOP"),
        ("QUIT 1", "bad request: QUIT"),
        ("VRAM much", "VRAM: "),
        ("VRAM -1", "VRAM: "),
        ("SAVE", "bad request: path"),
        ("RESTORE a\x00b", "bad request: path"),
        (b"SAVE \xff", "bad request: byte 5 of the line is not UTF-8"),
    ],
)
def test_a_bad_command_gets_the_fixed_prefix_of_its_refusal(line, start):
    with pytest.raises(lines.ProtocolError) as error:
        lines.decode_command(line)
    assert str(error.value).startswith(start)


def test_unknown_keys_are_skipped_and_the_later_of_two_wins():
    command = lines.decode_command("GEN 5 mood=good top_k=3 x= top_k=7 =1 5")
    assert command == lines.Gen(5, array("i", [5]), lines.SamplingKeys(top_k=7))


@pytest.mark.parametrize(
    ("given_keys", "taken"),
    [
        ("top_k=0", {"top_k": 64}),
        ("top_k=65", {"top_k": 64}),
        ("top_k=-4", {"top_k": 64}),
        ("top_p=7", {"top_p": 1.0}),
        ("min_p=-1", {"min_p": 0.0}),
        ("min_p=3", {"min_p": 1.0}),
        ("penalty_last_n=99999", {"penalty_last_n": 4096}),
        ("spec_min_p=1.5", {"spec_min_p": 1.0}),
        ("", {}),
    ],
)
def test_a_key_out_of_range_is_taken_as_the_protocol_says(given_keys, taken):
    command = lines.decode_command(f"GEN 1 {given_keys} 5")
    assert command.keys == lines.SamplingKeys(**taken)


def test_absent_keys_mean_greedy_with_the_whole_state():
    keys = lines.SamplingKeys()
    assert keys.is_greedy
    assert (keys.top_k, keys.top_p, keys.penalty_repeat, keys.cvec, keys.ckpt, keys.pin) == (
        20,
        1.0,
        1.0,
        True,
        True,
        None,
    )
    assert not lines.SamplingKeys(temperature=0.1).is_greedy


def test_an_admission_without_tokens_to_write_is_left_to_the_engine_to_refuse():
    assert lines.decode_command("BGEN 0 0 5") == lines.BGen(0, 0, array("i", [5]))


@pytest.mark.parametrize("line", ["", "\n", "\r\n", " \t ", b"", b"\n"])
def test_an_empty_line_is_nothing(line):
    assert lines.decode_command(line) is None
    assert lines.decode_output(line) is None


@pytest.mark.parametrize("line", ["PFSTATE 1", "CAPACITY x", "RESUME id=7 x", "SUSPENDED", b"\xff\xfe 1", "NEW a=b"])
def test_a_line_of_another_engine_is_metadata_and_no_error(line):
    assert isinstance(lines.decode_output(line), lines.Unknown)


@pytest.mark.parametrize(
    "line",
    [
        "T",
        "T x",
        "T -1",
        "T " + "9" * 5000,
        "PP 1 2 x 3",
        "PP 1",
        "DONE 1 2 3 4 gone",
        "BADM 1 2",
        "READY",
        "SERR x 1 y",
    ],
)
def test_a_torn_output_is_one_clear_error(line):
    with pytest.raises(lines.ProtocolError, match="bad line: "):
        lines.decode_output(line)


def test_infinity_from_another_engine_reads_as_zero():
    assert lines.decode_output("PP 1 2 inf -nan") == lines.Progress(1, 2, 0.0, 0.0)


@pytest.mark.parametrize("n_fields", range(5, 25))
def test_done_reads_at_every_length_an_engine_may_write(n_fields):
    words = ["4", "50", "1.5", "2.5", "length", "6", "7", "8", "9", "10", "11", "12", "13.5", "14", "15"]
    words += ["16", "17", "18", "19", "20", "new", "fields", "here", "x"]
    done = lines.decode_output("DONE " + " ".join(words[:n_fields]))
    assert (done.generated, done.prompt, done.finish) == (4, 50, "length")
    assert done.reused == (8 if n_fields >= 8 else 0)
    assert done.file_mb == (13.5 if n_fields >= 13 else 0.0)
    assert done.offloaded == (15 if n_fields >= 15 else 0)
    assert done.chain == (lines.ChainCounts(16, 17, 18, 19, 20) if n_fields >= 20 else None)


@pytest.mark.parametrize(
    ("tail", "drafts"), [("", (None, None)), (" 3", (None, None)), (" 3 4", (3, 4)), (" 3 4 x", (3, 4))]
)
def test_bdone_reads_with_and_without_draft_counts(tail, drafts):
    done = lines.decode_output("BDONE 1 31 error 812.0" + tail)
    assert (done.finish, done.drafts_accepted, done.drafts_offered) == ("error", *drafts)


@pytest.mark.parametrize(
    "text",
    [
        "fatal: the output head moved",
        "verify: timed out at layer 3",
        "verify batch: timed out at layer 40",
        "verify: an earlier window never finished",
        "verify batch: an earlier window never finished",
    ],
)
def test_a_deadly_err_is_told_from_a_refusal(text):
    assert lines.decode_output("ERR " + text).is_fatal
    assert not lines.decode_output("ERR bad request: " + text).is_fatal


def best_ms(decode, line, runs=5):
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        decode(line)
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def test_a_262144_id_prompt_decodes_in_under_50_ms():
    rng = random.Random(7)
    ids = array("i", (rng.randrange(248_320) for _ in range(262_144)))
    line = lines.encode(lines.Gen(64, ids, lines.SamplingKeys(temperature=0.7, seed=3))).encode()
    assert best_ms(lines.decode_command, line, runs=9) < 50
    assert lines.decode_command(line).ids == ids


@pytest.mark.parametrize("unit", ["1,", "1 ", "007,", "1 , ", " ", "\t", ",", "a=1 ", "=", "x", "9", "é"], ids=repr)
def test_decoding_time_grows_with_the_line_and_not_with_its_square(unit):
    small, large = (f"GENI 5 {unit * (size // len(unit))}1" for size in (1 << 16, 1 << 20))
    for decode in (lines.decode_command, lines.decode_output):
        times = [best_ms(lambda line, decode=decode: decoded(decode, line), line, runs=3) for line in (small, large)]
        assert times[1] < 16 * 6 * max(times[0], 0.2), times


def test_a_line_over_the_bound_is_refused_before_it_is_read():
    line = b"GEN 1 " + b"1," * (lines.MAX_LINE_BYTES // 2) + b"1"
    for decode in (lines.decode_command, lines.decode_output):
        with pytest.raises(lines.ProtocolError, match="longer than 33554432 bytes"):
            decode(line)


def test_a_line_of_the_full_32_mib_is_read():
    head = "GEN 1 "
    line = head + "1," * ((lines.MAX_LINE_BYTES - len(head)) // 2 - 1) + "12"
    assert len(line) == lines.MAX_LINE_BYTES
    assert len(lines.decode_command(line + "\r\n").ids) == 16_777_213
