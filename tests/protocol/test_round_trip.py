"""Every line type comes back from its text as it was; a type without a strategy fails here."""

from array import array
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.protocol import lines

PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_no_line_type_is_left_without_a_round_trip(strategies):
    commands, outputs = strategies
    assert set(commands) == set(get_args(lines.Command))
    assert set(outputs) == set(get_args(lines.Output))


@PROPERTY
@given(data=st.data(), end=st.sampled_from(["", "\n", "\r\n"]), as_bytes=st.booleans())
def test_a_command_survives_its_text(commands, data, end, as_bytes):
    command = data.draw(commands)
    text = lines.encode(command) + end
    assert lines.decode_command(text.encode() if as_bytes else text) == command


@PROPERTY
@given(data=st.data(), end=st.sampled_from(["", "\n", "\r\n"]), as_bytes=st.booleans())
def test_an_output_survives_its_text(outputs, data, end, as_bytes):
    output = data.draw(outputs)
    text = lines.encode(output) + end
    assert lines.decode_output(text.encode() if as_bytes else text) == output


@PROPERTY
@given(data=st.data(), blank=st.sampled_from(["  ", "\t", " \t "]))
def test_runs_of_blanks_and_tabs_read_as_one_blank(commands, data, blank):
    command = data.draw(commands)
    if not isinstance(command, lines.Save | lines.Restore):
        assert lines.decode_command(blank + lines.encode(command).replace(" ", blank)) == command


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60),
    st.lists(st.sampled_from([",", " ", ", ", " ,", "  ", "\t", " , "]), min_size=60, max_size=60),
    st.integers(0, 3),
)
def test_ids_read_the_same_with_every_separator_and_leading_zeros(ids, separators, zeros):
    body = "".join("0" * zeros + str(id) + separator for id, separator in zip(ids, separators, strict=False))
    command = lines.decode_command("GEN 1 " + body.rstrip(", \t"))
    assert isinstance(command, lines.Gen)
    assert command.ids == array("i", ids)


@pytest.mark.parametrize("separator", [",", " ", ", "])
def test_ids_are_not_torn_where_a_long_list_is_decoded_in_pieces(separator):
    ids = array("i", (n * 7919 % 2**31 for n in range(150_000)))
    command = lines.decode_command("GEN 1 " + separator.join(map(str, ids)))
    assert isinstance(command, lines.Gen)
    assert command.ids == ids


@given(st.floats())
def test_no_float_is_written_as_inf_nan_or_with_an_exponent(value):
    text = lines.encode(lines.Progress(1, 2, value, value))
    numbers = text.split(" ")[3:]
    assert all(number.lstrip("-").replace(".", "", 1).isdigit() and number[-2] == "." for number in numbers), text
    assert "-0.0" not in numbers
    assert isinstance(lines.decode_output(text), lines.Progress)


def test_a_rate_over_no_time_is_zero():
    assert lines.rate(100, 0.0) == 0.0
    assert lines.rate(100, 500.0) == 200.0


def test_info_shares_keep_two_fraction_digits_and_engine_goes_last():
    info = lines.Info({"engine": "0.1.0", "context": 4096, "pcie_frac": 0.55, "spec_min_p": 0.0})
    assert lines.encode(info) == "INFO context=4096 pcie_frac=0.55 spec_min_p=0.00 engine=0.1.0"


def test_later_info_lines_win_and_keep_unknown_keys():
    merged = lines.merge_info(
        [
            lines.decode_output(text)
            for text in ("INFO context=1 kv=int8 new_key=x-1 n=-3", "INFO context=2 cvec=0 engine=7")
        ]
    )
    assert merged.values == {"context": 2, "kv": "int8", "new_key": "x-1", "n": -3, "cvec": "0", "engine": "7"}
    assert merged.whole("context") == 2
    assert merged.whole("new_key", 5) == 5
    assert merged.text("context") == "2"


def test_a_message_of_several_lines_cannot_break_the_line_protocol():
    assert lines.encode(lines.Err("first\nT 5\r\nthird")) == "ERR first T 5  third"
    assert lines.encode(lines.Fatal("lone surrogate \ud800")) == "FATAL lone surrogate ?"


@pytest.mark.parametrize(
    "command",
    [
        lines.Save("a\nQUIT"),
        lines.Save(""),
        lines.Save(" a"),
        lines.GenI(1, "two words", array("i", [1])),
        lines.GenI(1, "a=b", array("i", [1])),
        lines.Gen(1, array("i")),
        lines.Gen(1, array("i", [-1])),
        lines.Gen(0, array("i", [1])),
        lines.BStop(-1),
        lines.Save("\ud800"),
    ],
)
def test_a_command_that_would_be_read_differently_is_not_written(command):
    with pytest.raises(lines.ProtocolError):
        lines.encode(command)


def test_derived_shares_of_done_do_not_divide_by_zero():
    done = lines.Done(4, 10, 1.0, 2.0, "stop", hits=30, lookups=40, offloaded=10)
    assert (done.hit_rate, done.pcie_share) == (0.75, 0.25)
    assert lines.Done(4, 10, 1.0, 2.0, "stop").hit_rate is None
