"""A config file is loaded with its oddities said, or refused in one line that names the key."""

import json
import os
import re
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.protocol import config as configs

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def write(tmp_path):
    """write(text or bytes or object) -> path of a config file with it."""

    def write(content):
        path = tmp_path / "strata-test.json"
        data = content if isinstance(content, bytes) else content.encode() if isinstance(content, str) else None
        path.write_bytes(json.dumps(content).encode() if data is None else data)
        return path

    return write


@pytest.fixture
def loaded(write):
    return lambda content: configs.load(write(content))


def test_an_empty_object_gives_the_documented_defaults(loaded):
    config = loaded({})
    documented = {row.key: row.default for row in configs.describe()}
    for name in configs.Keys.__struct_fields__:
        value = getattr(config, name)
        if not isinstance(value, configs.Sampling | configs.Mcp):
            assert documented[name] == ("" if value is None else json.dumps(value)), name
    assert (config.host, config.repeat_stop_tokens, config.engine_silence_s) == ("127.0.0.1", 256, 300)
    assert (config.mcp.timeout_s, config.mcp.max_result_chars, config.mcp.max_rounds) == (60, 20000, 8)
    assert config.unknown == {}
    assert config.warnings == ()


def test_bom_comments_null_and_unknown_keys_are_accepted(loaded):
    text = '{"// why": [1], "//": 2, "host": null, "top": {"a": 1}, "sampling": {"top_k": 5, "heat": 3, "//x": 1}}'
    config = loaded(b"\xef\xbb\xbf" + text.encode())
    assert config.unknown == {"top": {"a": 1}, "sampling.heat": 3}
    assert config.host == "127.0.0.1"
    assert config.sampling.top_k == 5


@pytest.mark.parametrize("value", ["4", 2.5, 2.0, True, [2], {}])
def test_parallel_that_is_no_whole_number_is_said_and_ignored(loaded, value):
    config = loaded({"exe": "./engine", "parallel": value})
    assert config.parallel is None
    assert len(config.warnings) == 1
    assert "parallel: wants a whole number" in config.warnings[0]
    assert json.dumps(value) in config.warnings[0]
    assert "--batch" not in configs.engine_command(config)


@pytest.mark.parametrize(
    ("content", "key", "wants", "given"),
    [
        ({"sampling": {"top_k": 0}}, "sampling.top_k", "a whole number from 1 to 64", "0"),
        ({"sampling": {"top_k": 65}}, "sampling.top_k", "a whole number from 1 to 64", "65"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p", "a number above 0 to 1", "0"),
        ({"sampling": {"temperature": -0.1}}, "sampling.temperature", "a number from 0 to 100", "-0.1"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature", "a number from 0 to 100", '"hot"'),
        ({"sampling": {"min_p": 2}}, "sampling.min_p", "a number from 0 to 1", "2"),
        ({"sampling": {"seed": 2**64}}, "sampling.seed", "a whole number below 2^64", str(2**64)),
        ({"sampling": {"seed": 1.5}}, "sampling.seed", "a whole number from 0", "1.5"),
        ({"sampling": 5}, "sampling", "an object", "5"),
        ({"args": "--serve"}, "args", "a list (each: text)", '"--serve"'),
        ({"args": ["--max-context", 4096]}, "args", "a list (each: text)", "4096 at [1]"),
        ({"exe": ""}, "exe", "text that is not empty", '""'),
        ({"exe": "a\0b"}, "exe", "text without NUL characters", '"a\\u0000b"'),
        ({"api_key": [""]}, "api_key", "text that is not empty", '"" at [0]'),
        ({"fit_max_tokens": "yes"}, "fit_max_tokens", "true or false", '"yes"'),
        ({"fit_max_tokens": 1}, "fit_max_tokens", "true or false", "1"),
        ({"backend": "metal"}, "backend", '"cuda"', '"metal"'),
        ({"gpu": [0, -1]}, "gpu", "a whole number from 0 to 255", "-1 at [1]"),
        ({"engine_silence_s": -1}, "engine_silence_s", "a number from 0 to 31536000", "-1"),
        ({"vram_segment_mib": 63}, "vram_segment_mib", "a whole number from 64", "63"),
        ({"parallel": 2**40}, "parallel", "a whole number up to 2147483647", str(2**40)),
        ({"layer_split": "13,13"}, "layer_split", '"auto" or rising first layers', '"13,13"'),
        ({"layer_split": [1, 3]}, "layer_split", '"auto" or rising first layers', "[1, 3]"),
        ({"layer_split": ""}, "layer_split", '"auto" or rising first layers', '""'),
        ({"layer_split": "2," + "9" * 5000}, "layer_split", '"auto" or rising first layers', '"2,99'),
        ({"env": {"A": None}}, "env", "an object (each value: ", '{"A": null}'),
        ({"env": {"A=B": "1"}}, "env", "names without '='", '"A=B"'),
        ({"mcp": {"max_rounds": -2}}, "mcp.max_rounds", "a whole number from 0", "-2"),
        ({"vision": {"threads": 0}}, "vision.threads", "a whole number from 1", "0"),
    ],
)
def test_a_bad_value_names_file_key_wanted_and_given(write, content, key, wants, given):
    path = write(content)
    with pytest.raises(configs.ConfigError) as error:
        configs.load(path)
    message = str(error.value)
    assert message.startswith(f"{path}: {key}: wants ")
    assert wants in message
    assert f"got {given}" in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 300


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"a": 1,\n  "b": }', "is no JSON: .* in line 2, column 8"),
        ("", "is no JSON: "),
        ("[1, 2]", r"wants one JSON object, got \[1, 2\]"),
        (b'{"a": "\xff"}', "is no JSON: Invalid UTF-8"),
        ('{"a": NaN}', "is no JSON: "),
        ('{"a": ' + "9" * 5000 + "}", "is no JSON: Integer value out of range"),
        ('{"a": ' + "[" * 100_000, "is nested too deeply"),
        (b" " * (configs.MAX_FILE_BYTES + 1), "is larger than 16777216 bytes"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(write, content, says):
    path = write(content)
    with pytest.raises(configs.ConfigError, match=re.escape(str(path)) + ": " + says) as error:
        configs.load(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(configs.ConfigError, match=r"none\.json: cannot be read: No such file"):
        configs.load(tmp_path / "none.json")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(configs.Keys.__struct_fields__), JSON_VALUES, max_size=4) | JSON_VALUES)
def test_no_json_value_crashes_the_loader(loaded, content):
    try:
        config = loaded(content)
    except configs.ConfigError as error:
        assert "\n" not in str(error)
        return
    if config.exe:
        assert configs.engine_command(config)[-1] == "--serve"
    assert all(isinstance(value, str) for value in configs.engine_environment(config, {}).values())


def test_paths_count_from_the_folder_of_the_file(loaded, tmp_path):
    config = loaded({"cwd": "sub", "log": "logs/engine.txt", "lib_dirs": ["lib", "/opt/lib"]})
    assert config.engine_cwd == tmp_path / "sub"
    assert config.log_path == tmp_path / "logs/engine.txt"
    plain = loaded({})
    assert plain.engine_cwd == tmp_path
    assert plain.log_path == tmp_path / "strata-test.log"
    assert plain.model_id == "strata-test"


def test_one_key_and_several_keys_read_the_same(loaded):
    assert loaded({"api_key": "a"}).api_keys == ("a",)
    assert loaded({"api_key": ["a", "b"]}).api_keys == ("a", "b")
    assert loaded({}).api_keys == ()


def test_the_engine_command_is_exe_args_additions_serve(loaded, tmp_path):
    config = loaded(
        {
            "exe": "bin/engine",
            "args": ["--pack", "a.gguf"],
            "parallel": 3,
            "layer_split": [13, 26],
            "head_device": 1,
            "split_skip_if_fits": True,
            "vram_elastic": True,
            "vram_reserve_mib": 900,
            "expert_profile_save": "p.json",
            "vision": {},
        }
    )
    assert configs.engine_command(config) == [
        *(str(tmp_path / "bin/engine"), "--pack", "a.gguf", "--batch", "3", "--layer-split", "13,26"),
        *("--head-device", "1", "--split-skip-if-fits", "--vram-elastic", "--vram-segment-mib", "512"),
        *("--vram-reserve-mib", "900", "--expert-profile-save", "p.json", "--expert-profile-save-every", "10"),
        *("--vision", "--serve"),
    ]


@pytest.mark.parametrize("option", [["--batch", "2"], ["--slots", "2"], ["--batch=2"]])
def test_slots_in_args_win_over_parallel(loaded, option):
    command = configs.engine_command(loaded({"exe": "./e", "args": option, "parallel": 4}))
    assert command[1:] == [*option, "--serve"]


@pytest.mark.parametrize("parallel", [1, 0, -3])
def test_one_request_at_a_time_asks_for_no_slots(loaded, parallel):
    assert configs.engine_command(loaded({"exe": "./e", "parallel": parallel}))[1:] == ["--serve"]


def test_backend_cpu_runs_the_engine_on_the_host_unless_args_say_otherwise(loaded):
    assert configs.engine_command(loaded({"exe": "./e", "backend": "cpu"}))[1:] == ["--device", "host", "--serve"]
    args = ["--device", "cuda"]
    assert configs.engine_command(loaded({"exe": "./e", "backend": "cpu", "args": args}))[1:] == [*args, "--serve"]


def test_a_backend_this_engine_does_not_have_is_said(loaded):
    assert "backend: hip has no effect" in loaded({"backend": "hip"}).warnings[0]


def test_a_config_without_a_program_names_the_key(loaded):
    with pytest.raises(configs.ConfigError, match=r"strata-test\.json: exe: wants the engine program"):
        configs.engine_command(loaded({}))


def test_a_bare_program_name_is_found_beside_the_file_first_and_beside_python_next(loaded, tmp_path):
    python = os.path.basename(sys.executable)
    assert configs.engine_command(loaded({"exe": python}))[0] == sys.executable
    beside = tmp_path / python
    beside.write_text("")
    beside.chmod(beside.stat().st_mode | stat.S_IXUSR)
    assert configs.engine_command(loaded({"exe": python}))[0] == str(beside)
    assert configs.engine_command(loaded({"exe": "no-such-program-anywhere"}))[0] == "no-such-program-anywhere"


def test_config_env_wins_over_devices_and_inherited_variables(loaded, tmp_path):
    config = loaded(
        {
            "gpu": [1, 0],
            "hip_ordinal": 2,
            "lib_dirs": ["lib"],
            "env": {"A": 1, "B": True, "C": "x", "HIP_VISIBLE_DEVICES": "7"},
        }
    )
    libraries = "PATH" if os.name == "nt" else "LD_LIBRARY_PATH"
    environment = configs.engine_environment(config, {"A": "0", "KEEP": "1", libraries: "/old"})
    assert environment == {
        "A": "1",
        "B": "1",
        "C": "x",
        "KEEP": "1",
        "CUDA_VISIBLE_DEVICES": "1,0",
        "HIP_VISIBLE_DEVICES": "7",
        libraries: os.pathsep.join([str(tmp_path / "lib"), "/old"]),
    }


def test_every_key_is_documented_with_type_and_meaning():
    rows = configs.describe()
    assert len({row.key for row in rows}) == len(rows)
    for row in rows:
        assert row.type, row
        assert row.meaning, row
    keys = [row.key for row in rows]
    assert keys.index("sampling.temperature") == keys.index("sampling") + 1


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.name)
def test_the_configs_of_the_repository_load_without_a_warning(path):
    config = configs.load(path)
    assert config.unknown == {}
    assert config.warnings == ()
    assert configs.engine_command(config)
