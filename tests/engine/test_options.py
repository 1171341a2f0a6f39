"""The command line: what is taken, what is refused, and that a refusal names the option, the limit and the remedy."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from strata.engine import flags, options
from strata.engine.options import Options, Refused, fitted, notes, parse
from strata.engine.pack import open_pack

ENGINE = Path(sys.executable).with_name("strata-engine")

SPECIFIED = """
 --serve --max-context --kv --kv-resident --vram-reserve-mib --expert-cache --expert-cache-device1
--expert-cache-device2 --expert-cache-device3 --remote-expert-opt --peer-device --pcie-frac --pcie-mode
--resident-experts --prefill --no-prefill-borrow --prefill-head-alias --short-read --pipeline-windows --mtp
--spec --spec-min-p --prompt-cache --prompt-cache-every --prompt-cache-root --conversation-cache-mib
--conversation-cache-slots --conversation-cache-min-free-mib --adapt-every --adapt-swaps --adapt-decay
--adapt-min-gain --adapt-async --batch --slots --batch-groups --batch-mtp --layer-split --trim-stage-weights
--native --pack --expert-profile --expert-profile-save --expert-profile-save-every --expert-cache-per-layer
--mmap-experts --resident-cpu-experts --resident-budget-gib --vram-elastic --vram-segment-mib
--vram-reserve-later-mib --split-device --split-skip-if-fits --head-device --kv-grow --prompt-cache-tail
--turn-token --tail-role-token --eos-ids --conversation-cache-disk-mib --conversation-cache-dir
--conversation-cache-similarity --conversation-cache-n-min --system-prompt-cache-dir --session-min-free-mib
--suffix-draft --lookup-chain --lookup-chain-min --mtp-max-t --mtp-window --mtp-draft-vocab --mtp-q4
--mtp-hnorm --coupled-draft --pool-workers --pool-tasks --pool-affinity --host-core --ple-io --control-vector
--control-vector-scaled --cvec-layers --rope-scale --yarn-ext-factor --vision --stats
"""


SPECIFIED_NAMES = tuple(SPECIFIED.split())


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ENGINE), *argv], capture_output=True, check=False, text=True, timeout=60, stdin=subprocess.DEVNULL
    )


def refusal_of(*argv: str) -> str:
    with pytest.raises(Refused) as refused:
        parse(argv)
    return str(refused.value)


def test_an_option_of_the_specification_is_never_called_unknown():
    assert [name for name in SPECIFIED_NAMES if flags.find(name) is None] == []


@pytest.mark.parametrize("name", [name for name in SPECIFIED_NAMES if flags.find(name).missing])
def test_an_option_that_does_not_exist_yet_is_refused_by_its_name_and_not_ignored(name):
    text = refusal_of("--pack", "x.gguf", name, "1")
    assert text.startswith(f"{name}: ")
    assert text.endswith("leave the option out")
    assert "\n" not in text


def test_defaults_of_the_struct_are_those_that_the_table_shows():
    given = parse(["--pack", "x.gguf"])
    for flag in flags.FLAGS:
        if not flag.acts or flag.name == "--pack":
            continue
        value = getattr(given, flag.field)
        own = (
            {"--eos-ids": None, "--mtp": None, "--vram-reserve-mib": -1, "--pcie-frac": -1}
            | dict.fromkeys(("--threads", "--prefill", "--prefill-beside", "--max-context", "--expert-cache"), 0)
            | dict.fromkeys(("--adapt-decay", "--adapt-min-gain"), -1)
        )
        shown = own.get(flag.name, flag.default)
        assert value == (shown if not isinstance(shown, str) else {"off": False}.get(shown, type(value)(shown)))


def test_every_working_option_reaches_its_field():
    line = (
        "--serve --pack m.gguf --eos-ids 1,2 --max-context 8192 --prefill 64 --prompt-cache 0 --device host --kv fp32 "
        "--vram-limit-mib 0 --ple-io auto --threads 3 --kernels reference --verify-accounts --stats --log-states "
        "--prompt-cache-every 512 --prompt-cache-root 128 --turn-token 77 --conversation-cache-mib 100 "
        "--conversation-cache-slots 3 --conversation-cache-min-free-mib 200 --conversation-cache-disk-mib 300 "
        "--conversation-cache-dir parked --conversation-cache-similarity 0.25 --conversation-cache-n-min 20 "
        "--batch 4 --prefill-beside 32 --short-read 16 --mtp d.gguf --spec 4 --spec-min-p 0.5 "
        "--suffix-draft 2 --mtp-window 4096 --draft-vocab v.txt --batch-mtp "
        "--plan --json --ram-limit-mib 5000 --kv-resident 30000 "
        "--vram-reserve-mib 0 --expert-cache 100 --expert-profile hot "
        "--pcie-frac 0.5 --adapt-async 1 --adapt-every 8 --adapt-swaps 9 --adapt-decay 0.5 --adapt-min-gain 2.5 "
        "--resident-experts --resident-cpu-experts "
        "--resident-budget-gib 9 --mmap-experts --no-prefill-borrow --prefill-head-alias"
    )
    given = parse(line.split())
    assert given == Options(
        serve=True,
        pack="m.gguf",
        eos_ids=(1, 2),
        max_context=8192,
        prefill=64,
        prompt_cache=0,
        device="host",
        threads=3,
        kernels="reference",
        verify_accounts=True,
        log_states=True,
        stats=True,
        prompt_cache_every=512,
        prompt_cache_root=128,
        turn_token=77,
        conversation_cache_mib=100,
        conversation_cache_slots=3,
        conversation_cache_min_free_mib=200,
        conversation_cache_disk_mib=300,
        conversation_cache_dir="parked",
        conversation_cache_similarity=0.25,
        conversation_cache_n_min=20,
        batch=4,
        prefill_beside=32,
        short_read=16,
        mtp="d.gguf",
        spec=4,
        spec_min_p=0.5,
        suffix_draft=2,
        mtp_window=4096,
        draft_vocab="v.txt",
        batch_mtp=True,
        plan=True,
        json=True,
        ram_limit_mib=5000,
        kv_resident=30000,
        vram_reserve_mib=0,
        expert_cache=100,
        expert_profile="hot",
        pcie_frac=0.5,
        adapt_async=1,
        adapt_every=8,
        adapt_swaps=9,
        adapt_decay=0.5,
        adapt_min_gain=2.5,
        resident_experts=True,
        resident_cpu_experts=True,
        resident_budget_gib=9,
        mmap_experts=True,
        no_prefill_borrow=True,
        prefill_head_alias=True,
    )
    assert {flag.field for flag in flags.FLAGS if flag.acts} == set(Options.__struct_fields__)


def test_an_option_given_twice_takes_the_last_value():
    assert parse(["--pack", "a", "--native", "b", "--max-context", "64", "--max-context=128"]).pack == "b"
    assert parse(["--pack", "a", "--max-context", "64", "--max-context=128"]).max_context == 128


def test_auto_is_a_chunk_size_and_never_longer_than_the_context():
    context = ["--pack", "a", "--max-context", "4096"]
    assert parse([*context, "--prefill", "auto"]).prefill_chunk == flags.AUTO_CHUNK
    assert parse([*context, "--prefill", "0"]).prefill_chunk == flags.AUTO_CHUNK
    assert parse(["--pack", "a", "--prefill", "512", "--max-context", "100"]).prefill_chunk == 100


def test_slots_are_asked_for_by_either_name_and_no_window_has_more_rows():
    assert parse(["--pack", "a", "--slots", "3"]).batch == 3
    many = parse(["--pack", "a", "--batch", "32"])
    assert (many.batch, many.batch_asked) == (32, flags.WINDOW_ROWS)


def test_options_that_ask_for_what_is_so_anyway_are_taken_and_said():
    argv = ["--pack", "a", "--batch-groups", "auto", "--batch", "2", "--batch-groups=2"]
    assert parse(argv) == parse(["--pack", "a", "--batch", "2"])
    said = notes(argv)
    assert [line.partition(":")[0] for line in said] == ["--batch-groups"]
    assert "one group" in said[0]


def test_the_draft_layer_of_the_pack_itself_needs_no_file():
    assert parse(["--pack", "a"]).mtp is None
    assert parse(["--pack", "a", "--mtp", "--spec", "4"]).mtp == ""
    assert parse(["--pack", "a", "--mtp", "b", "--spec=4"]).mtp == "b"


def test_a_chunk_of_the_command_line_fits_a_forward_pass():
    from strata.engine.model import MAX_ROWS

    assert flags.MAX_CHUNK <= MAX_ROWS


@pytest.mark.parametrize(
    ("argv", "wants"),
    [
        (["--max-context", "15"], "--max-context: wants a whole number from 16 to 1048576, got '15'"),
        (["--max-context", "-5"], "--max-context: wants a whole number from 16 to 1048576, got '-5'"),
        (["--max-context", "9" * 5000], "--max-context: wants a whole number from 16 to 1048576, got '9"),
        (["--max-context", "４０９６"], "--max-context: wants"),
        (["--max-context"], "--max-context: a value is missing; wants N"),
        (["--max-context", "--serve"], "--max-context: a value is missing"),
        (["--prefill", "many"], "--prefill: wants auto or a whole number from 0 to 8192, got 'many'"),
        (["--prefill", "8193"], "--prefill: wants auto"),
        (["--prompt-cache", "65"], "--prompt-cache: wants a whole number from 0 to 64"),
        (["--threads", "0"], "--threads: wants a whole number from 1 to 256"),
        (["--eos-ids", "1,,2"], "--eos-ids: wants token ids separated by commas"),
        (["--eos-ids", ""], "--eos-ids: wants token ids"),
        (["--kernels", "fast"], "--kernels: wants one of cpu, reference, got 'fast'"),
        (["--device", "tpu"], "--device: wants one of host, cuda"),
        (["--serve=1"], "--serve: takes no value, got '1'"),
        (["--sreve"], "--sreve: unknown option; strata-engine --help lists all"),
        (["model.gguf"], "model.gguf: unknown option"),
        (["--kv", "fp8"], "--kv: wants one of fp32, fp16, int8, q4_0, k8v4, got 'fp8'"),
        (["--kv", "k8v4"], "--kv k8v4: the host keeps keys and values in float32; leave it out, or use --device cuda"),
        (["--kv", "fp16"], "--kv fp16: the host keeps keys and values in float32; leave it out, or use --device cuda"),
        (["--vram-limit-mib", "8151"], "--vram-limit-mib: there is no card on the host; leave it out, or use --device"),
        (["--ple-io", "ram"], "--ple-io: there is no card on the host; leave it out, or use --device cuda"),
        (["--spec", "9"], "--spec: wants a whole number from 1 to 8, got '9'"),
        (["--suffix-draft", "8"], "--suffix-draft: wants a whole number from 0 to 7, got '8'"),
        (["--batch", "-1"], "--batch: wants a whole number from 0 to 1024, got '-1'"),
        (["--slots", "two"], "--slots: wants a whole number from 0 to 1024, got 'two'"),
        (["--batch-groups", "0"], "--batch-groups: wants auto or a whole number from 1 to 1024, got '0'"),
        (["--conversation-cache-similarity", "1.5"], "--conversation-cache-similarity: wants a number from 0 to 1"),
        (["--conversation-cache-disk-mib", "9"], "--conversation-cache-disk-mib: no folder given; name one: --conv"),
        (["--conversation-cache-dir", ""], "--conversation-cache-dir: wants the name of a folder"),
        (["--json"], "--json: is for --plan; add --plan, or leave it out"),
        (["--ram-limit-mib", "9"], "--ram-limit-mib: is for --plan"),
        (["--plan", "--vram-reserve-mib", "little"], "--vram-reserve-mib: wants a whole number from 0 to"),
        (["--prefill-head-alias"], "--prefill-head-alias: there is no card on the host; leave it out, or use --device"),
        (["--expert-cache", "9"], "--expert-cache: there is no card on the host; leave it out, or use --device cuda"),
        (["--resident-experts"], "--resident-experts: there is no card on the host; leave it out, or use --device"),
        (["--resident-budget-gib", "9"], "--resident-budget-gib: there is no card on the host; leave it out, or use"),
        (["--expert-profile", "hot"], "--expert-profile: there is no card on the host; leave it out, or use --device"),
        (
            [
                "--plan",
                "--device",
                "cuda",
                "--vram-limit-mib",
                "8151",
                "--kv-resident",
                "100",
                "--max-context",
                "90000",
            ],
            "--kv-resident 100: at least 20480 tokens stay in VRAM",
        ),
        (["--rope-scale", "2"], "--rope-scale: the context cannot be extended"),
    ],
)
def test_a_refusal_names_the_option_the_limit_and_what_was_given(argv, wants):
    text = refusal_of("--pack", "x.gguf", *argv)
    assert text.startswith(wants)
    assert len(text) < 300


def test_a_start_without_a_model_says_how_to_name_one():
    assert refusal_of("--serve") == "--pack: no model given; name a GGUF file: --pack model.gguf"


def test_an_installation_without_an_extra_brings_no_cupy():
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    assert not any("cupy" in each or "nvidia" in each for each in project["dependencies"])
    assert {"cuda12", "cuda13"} <= project["optional-dependencies"].keys()


def test_cuda_without_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert "install strata[cuda12] or strata[cuda13], or use --device host" in refusal_of(
        "--pack", "x", "--device", "cuda"
    )


def test_a_card_takes_its_options_and_not_those_of_the_host(monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: object())
    card = ["--pack", "x", "--device", "cuda"]
    given = parse([*card, "--kv", "fp16", "--vram-limit-mib", "8151", "--ple-io", "ram", "--expert-cache", "9"])
    assert (given.kv, given.vram_limit_mib, given.ple_io, given.expert_cache) == ("fp16", 8151, "ram", 9)
    assert refusal_of(*card, "--kernels", "reference").startswith("--kernels reference: a card has its own kernels")


@pytest.mark.parametrize(
    "argv",
    [
        ["--serve", "--pack", "x.gguf", "--frobnicate"],
        ["--kv", "int8", "--serve"],
        ["--serve", "--max-context", "1"],
        ["--serve", "--pack", "/nonexistent/model.gguf"],
        ["--serve"],
    ],
)
def test_a_refused_start_ends_with_code_2_one_log_line_and_the_same_reason_for_the_server(argv):
    done = run(*argv)
    assert done.returncode == 2
    log, out = done.stderr.splitlines(), done.stdout.splitlines()
    assert len(log) == 1 and len(out) == 1
    assert out[0].startswith("ERR ")
    assert log[0].endswith(out[0].removeprefix("ERR "))


def test_a_refused_start_without_serve_leaves_stdout_alone():
    done = run("--nope")
    assert (done.returncode, done.stdout) == (2, "")


def test_help_shows_every_option_with_its_default_and_examples():
    done = run("--help")
    assert done.returncode == 0
    for flag in flags.FLAGS:
        assert flag.name in done.stdout
    assert "Examples" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_version_is_that_of_the_package():
    done = run("--version")
    assert re.fullmatch(r"strata-engine \d+\.\d+\.\d+\n", done.stdout)


def test_the_default_context_shrinks_to_a_smaller_model_and_an_asked_one_is_refused(packs):
    spec = open_pack(packs["odd-q8_0"]).spec
    small = dataclasses.replace(spec, context_length=1000)
    assert fitted(parse(["--pack", "a"]), spec).max_context == 4096
    assert fitted(parse(["--pack", "a"]), small).max_context == 1000
    with pytest.raises(Refused, match="the model's context is 1000; ask for at most that"):
        fitted(parse(["--pack", "a", "--max-context", "1001"]), small)


def test_end_tokens_are_the_packs_unless_others_are_given(packs):
    spec = open_pack(packs["odd-q8_0"]).spec
    assert fitted(parse(["--pack", "a"]), spec).eos_ids == spec.end_tokens
    assert fitted(parse(["--pack", "a", "--eos-ids", "7"]), spec).eos_ids == (7,)
    assert fitted(parse(["--pack", "a", "--eos-ids", "none"]), spec).eos_ids == ()


def test_a_reader_of_the_help_who_has_seen_enough_is_no_failure():
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    done = subprocess.run([str(ENGINE), "--help"], check=False, stdout=write_fd, stderr=subprocess.PIPE, timeout=60)
    os.close(write_fd)
    assert (done.returncode, done.stderr) == (0, b"")
