"""`strata-bench score` on a real engine: the same answers alone and in slots, floors, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from strata.bench.__main__ import main
from strata.bench.checks import Findings, Launch
from strata.bench.demo_pack.data.mixture import SCORED
from strata.bench.demo_pack.data.sample import split_of
from strata.bench.demo_pack.rendering import Renderer
from strata.bench.demo_pack.tokenizer import vocabulary
from strata.bench.engine_process import EngineFailed, engine_command
from strata.bench.score import Said, note_task, problems, result_of, vocabulary_of
from strata.bench.slot_model import Request
from strata.protocol.lines import SamplingKeys, SlotDone
from strata.server.chat.template import Chat

SMALL = ["--n", "2", "--longest", "150", "--max-new", "24", "--extra=--threads 1 --verify-accounts"]


def records_of(path: Path) -> dict[str, dict[str, Any]]:
    return {record["work"]: record for record in json.loads(path.read_text())["records"]}


def answered(tokens: list[int], finish: Literal["stop", "length"] = "stop") -> Request:
    request = Request((1,), 9, SamplingKeys(), 0, state="over", tokens=tokens)
    request.slot_done = SlotDone(0, len(tokens), finish, 1.0, drafts_accepted=5, drafts_offered=10)
    return request


def test_slots_change_no_answer(packs: Any, tmp_path: Path) -> None:
    found = []
    for name, more in (("alone", []), ("slots", ["--batch", "3"])):
        path = tmp_path / f"{name}.json"
        argv = ["score", "--pack", str(packs["tiny-q8_0"]), "--tasks", "arithmetic", "tools", "lookup", *SMALL, *more]
        assert main([*argv, "--json", str(path)]) == 0
        found.append(records_of(path))
    assert found[0] == found[1]
    assert {"arithmetic, right of 2", "tools, calls that fit the schema", "lookup, answer"} <= set(found[0])


def test_a_pack_below_the_floor_fails(packs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["score", "--pack", str(packs["tiny-q8_0"]), "--tasks", "sort", *SMALL, "--show", "1"]
    assert main([*argv, "--floor", "90"]) == 1
    said = capsys.readouterr().out
    assert "FAILED sort reaches the floor: 0 of 2, wanted 90 %" in said and "sort: " in said


def test_prompts_longer_than_the_context_are_refused_before_the_start(
    packs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["score", "--pack", str(packs["tiny-q8_0"]), "--tasks", "arithmetic", "--n", "1"]
    assert main([*argv, "--max-new", "100000"]) == 1
    assert "lower --longest or --max-new" in capsys.readouterr().err


def test_arguments_out_of_range_are_refused(packs: Any) -> None:
    assert main(["score", "--pack", str(packs["tiny-q8_0"]), "--n", "0"]) == 2


def test_a_config_names_the_pack_relative_to_the_engines_folder(packs: Any) -> None:
    pack = packs["tiny-q8_0"]
    launch = Launch(("engine", "--serve", "--pack", pack.name), cwd=pack.parent)
    assert len(vocabulary_of(launch)) == 1024
    with pytest.raises(EngineFailed, match="names no --pack"):
        vocabulary_of(Launch(("engine", "--serve")))


def test_every_problem_is_held_out_and_the_same_beside_other_tasks() -> None:
    chat = Chat(vocabulary())
    every = list(problems(chat, SCORED, 2, 400, seed=1))
    assert all(split_of(problem.sample.key) == "test" for problem in every)
    assert [p for p in every if p.sample.task == "sort"] == list(problems(chat, ["sort"], 2, 400, seed=1))


def test_right_answers_count_and_wrong_ones_do_not() -> None:
    renderer, findings = Renderer(), Findings()
    results = []
    for i, problem in enumerate(problems(Chat(renderer.vocabulary), ["tools"], 4, 150, seed=1)):
        tokens = renderer.render(problem.sample).ids[len(problem.prompt.ids) :]
        request = answered(tokens) if i else answered(tokens[:3], "length")
        results.append(result_of(renderer.vocabulary, problem, Said.of(request)))
    note_task(findings, "tools", results, floor=75)
    figures = {record.work: record.median for record in findings.records}
    assert figures["tools, right of 4"] == 75 and figures["tools, calls that fit the schema"] == 75
    assert figures["tools, drafts kept of 40"] == 50
    assert findings.checks[0].ok
    note_task(findings, "tools", results, floor=76)
    assert not findings.checks[1].ok


def test_another_implementation_is_judged_by_the_same_measure(packs: Any, tmp_path: Path) -> None:
    """Prompts out, answers in; those of the engine itself give the figures of the engine."""
    prompts, answers = tmp_path / "prompts", tmp_path / "answers"
    base = ["score", "--pack", str(packs["tiny-q8_0"]), "--tasks", "sort", "copy", *SMALL]
    assert main([*base, "--write-prompts", str(prompts)]) == 0
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    assert [line["task"] for line in lines] == ["sort"] * 2 + ["copy"] * 2
    argv = [*engine_command(None), "--serve", "--pack", str(packs["tiny-q8_0"]), "--threads", "1"]
    with Launch(tuple(argv)).start() as engine:
        tokens = [engine.alone(line["ids"], line["max_new"]).tokens for line in lines]
    answers.write_text("".join(json.dumps({"tokens": each}) + "\n" for each in tokens))
    for name, more in (("files", ["--answers", str(answers)]), ("engine", [])):
        assert main([*base, *more, "--json", str(tmp_path / name)]) == 0
    assert records_of(tmp_path / "files") == records_of(tmp_path / "engine")


@pytest.mark.parametrize(("text", "wanted"), [('{"tokens": [1]}\n', "1 answers for 2"), ("[1]\n", "a line is not")])
def test_answers_of_other_problems_are_refused(
    packs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, wanted: str
) -> None:
    (tmp_path / "answers").write_text(text)
    argv = ["score", "--pack", str(packs["tiny-q8_0"]), "--tasks", "sort", *SMALL]
    assert main([*argv, "--answers", str(tmp_path / "answers")]) == 1
    assert wanted in capsys.readouterr().err
