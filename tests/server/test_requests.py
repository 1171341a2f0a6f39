"""What is refused and how: fields, ranges, sizes, budgets. The reason names the field."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.protocol.config import Sampling
from strata.protocol.lines import SamplingKeys
from strata.server.api.body import decode_body
from strata.server.api.openai import ChatBody, chat_request, check_supported
from strata.server.api.sampling import SamplingFields, sampling_keys
from strata.server.errors import Refused, status_of_err
from strata.server.request import ChatRequest, PrefixMessages, plan, token_budget

HELLO = [{"role": "user", "content": "Hello"}]

BAD_BODIES = {
    "no JSON": (b"{", "no JSON"),
    "empty": (b" ", "empty"),
    "a list": (b"[]", "expected `object`"),
    "not UTF-8": (b'{"messages": [], "model": "\xff"}', "no JSON"),
    "NaN": (b'{"messages": [], "temperature": NaN}', "no JSON"),
    "NaN beside a lone surrogate": (b'{"messages": ["\\ud800"], "temperature": NaN}', "NaN is no JSON number"),
    "nested too deeply": (b'{"tools": [' + b'{"a":' * 100_000, "nested too deeply"),
    "no messages": (b"{}", "messages: is missing"),
    "messages no list": (b'{"messages": "Hi"}', "messages: expected `array`"),
    "message no object": (b'{"messages": ["Hi"]}', "messages[0]: expected `object`"),
    "temperature": (b'{"messages": [], "temperature": -1}', "temperature: expected"),
    "temperature text": (b'{"messages": [], "temperature": "hot"}', "temperature: expected"),
    "temperature huge": (b'{"messages": [], "temperature": 1e999}', "temperature"),
    "top_p": (b'{"messages": [], "top_p": 0}', "top_p: expected"),
    "top_p above 1": (b'{"messages": [], "top_p": 1.5}', "top_p: expected"),
    "top_k": (b'{"messages": [], "top_k": "on"}', "top_k"),
    "min_p": (b'{"messages": [], "min_p": 2}', "min_p: expected"),
    "max_tokens": (b'{"messages": [], "max_tokens": -2}', "max_tokens: expected"),
    "max_tokens fraction": (b'{"messages": [], "max_tokens": 1.5}', "max_tokens: expected"),
    "stop": (b'{"messages": [], "stop": [1]}', "stop[0]: expected `str`"),
    "tune": (b'{"messages": [], "strata_tune": {"pcie_frac": 2}}', "strata_tune.pcie_frac: expected"),
}


@pytest.mark.parametrize("body, reason", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_bad_body_is_refused_with_the_field(body, reason):
    with pytest.raises(Refused) as refused:
        decode_body(body, ChatBody)
    assert refused.value.status == 400 and reason in refused.value.message
    assert "`$" not in refused.value.message


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.dictionaries(
            st.sampled_from([info.name for info in msgspec.structs.fields(ChatBody)]),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                max_leaves=6,
            ),
        ).map(lambda body: json.dumps(body).encode()),
    )
)
def test_any_body_becomes_a_request_or_a_refusal(body):
    try:
        decoded = decode_body(body, ChatBody)
        check_supported(decoded)
        chat_request(decoded)
        sampling_keys(decoded, Sampling(), pin=None, has_cvec=True)
    except Refused as refused:
        assert refused.status == 400 and refused.message


def test_half_a_character_in_an_escape_is_no_reason_to_refuse_a_text():
    body = decode_body(b'{"messages": [{"role": "user", "content": "cut \\ud83d"}]}', ChatBody)
    assert body.messages[0]["content"] == "cut \ud83d"


REFUSED_FIELDS = {
    "unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    "no message": ({"messages": []}, "messages"),
    "picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "pictures"),
    "n": ({"n": 2}, "n:"),
    "logprobs": ({"logprobs": True}, "logprobs"),
    "five stop strings": ({"stop": list("abcde")}, "stop: at most 4"),
    "effort": ({"reasoning_effort": "enormous"}, "reasoning effort"),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format"),
    "thinking budget": ({"reasoning_budget_tokens": 5}, "reasoning_budget_tokens"),
    "seed": ({"seed": 2**64}, "seed"),
    "tool_choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "tools": ({"tools": [{"type": "function"}]}, "tools[0]"),
    "max_tokens beyond the context": ({"max_tokens": 5000}, "max_tokens is 5000"),
    "prefix": ({"strata_prefix": {"messages": 9}}, "strata_prefix.messages"),
}


async def test_refused_fields_are_named_and_nothing_reaches_the_engine(serve):
    async with serve() as harness:
        for fields, reason in REFUSED_FIELDS.values():
            for stream in (False, True):
                async with harness.chat(**{"messages": HELLO, "stream": stream, **fields}) as response:
                    body = await response.json()
                    assert response.status == 400, (fields, body)
                    assert body["error"]["type"] == "invalid_request_error" and reason in body["error"]["message"]
        assert harness.commands == []


async def test_a_body_beyond_the_limit_is_a_413_declared_or_not(serve):
    async def chunks():
        for _ in range(64):
            yield b" " * 1024

    async with serve(settings={"max_body_bytes": 32 * 1024}) as harness:
        for data in (b" " * 65536, chunks()):
            async with harness.http.post(f"{harness.url}/v1/chat/completions", data=data) as response:
                assert response.status == 413 and "STRATA_MAX_BODY_MIB" in (await response.json())["error"]["message"]


async def test_unknown_fields_models_and_nulls_are_taken(serve):
    async with serve([{"steps": [{"text": "fine"}]}]) as harness:
        extras = {
            "model": "gpt-9",
            "user": "me",
            "logit_bias": {},
            "temperature": None,
            "stop": None,
            "max_tokens": None,
        }
        async with harness.chat(**extras) as response:
            assert response.status == 200 and (await response.json())["model"] == "scripted"


BUDGETS = [  # prompt, max_tokens, context, fit -> result
    (10, None, 100, False, 82),
    (10, 0, 100, False, 82),
    (10, -1, 100, False, 82),
    (10, 82, 100, False, 82),
    (10, 83, 100, True, 82),
    (91, None, 100, False, 1),
    (91, 1, 100, False, 1),
]


@pytest.mark.parametrize("n_prompt, max_tokens, context, fit, wanted", BUDGETS)
def test_the_budget_is_the_room_that_is_left(n_prompt, max_tokens, context, fit, wanted):
    assert token_budget(n_prompt, max_tokens, context, fit=fit) == wanted


@pytest.mark.parametrize(
    "n_prompt, max_tokens, fit", [(10, 83, False), (92, None, False), (92, None, True), (500, 1, True)]
)
def test_what_does_not_fit_is_refused_with_both_numbers(n_prompt, max_tokens, fit):
    with pytest.raises(Refused) as refused:
        token_budget(n_prompt, max_tokens, 100, fit=fit)
    assert refused.value.status == 400 and str(n_prompt) in refused.value.message and "100" in refused.value.message


KEYS = [  # request fields, the key part of the engine's line
    ({}, ""),
    ({"temperature": 0}, ""),
    ({"temperature": 0.7}, "temperature=0.7 "),
    ({"top_p": 0.9, "temperature": 1.0}, "temperature=1.0 top_p=0.9 "),
    ({"top_p": 1.0}, ""),
    ({"top_k": 40}, ""),
    ({"top_k": 40, "temperature": 1}, "temperature=1.0 top_k=40 "),
    ({"top_k": 0, "temperature": 1}, "temperature=1.0 top_k=64 "),
    ({"top_k": "off", "temperature": 1}, "temperature=1.0 top_k=64 "),
    ({"top_k": 1000, "temperature": 1}, "temperature=1.0 top_k=64 "),
    ({"min_p": 0.05}, "min_p=0.05 "),
    ({"min_p": 0}, ""),
    ({"repetition_penalty": 1.1}, "penalty_last_n=64 penalty_repeat=1.1 "),
    ({"repetition_penalty": 1.0}, ""),
    ({"frequency_penalty": 0.5, "penalty_last_n": 256}, "penalty_last_n=256 penalty_freq=0.5 "),
    ({"presence_penalty": -0.5, "penalty_last_n": 0}, "penalty_last_n=64 penalty_present=-0.5 "),
    ({"penalty_last_n": 256}, ""),
    ({"seed": 7}, "seed=7 "),
    ({"seed": 0}, ""),
    ({"seed": -1}, ""),
    ({"strata_tune": {"pcie_frac": 0.25, "spec_min_p": 0.5}}, "pcie_frac=0.25 spec_min_p=0.5 "),
    ({"strata_checkpoint": False}, "ckpt=0 "),
    ({"strata_checkpoint": True}, ""),
    ({"experimental_speed_projection": False}, ""),
]


def keys_of(fields: dict, defaults: Sampling = Sampling(), **options) -> SamplingKeys:  # noqa: B008
    body = decode_body(msgspec.json.encode({"messages": [], **fields}), ChatBody)
    assert isinstance(body, SamplingFields)
    return sampling_keys(body, defaults, **{"pin": None, "has_cvec": False, **options})


@pytest.mark.parametrize("fields, line", KEYS)
def test_sampling_fields_become_the_engines_keys(fields, line):
    assert keys_of(fields).line() == line


def test_a_request_wins_over_the_config_and_null_falls_back():
    defaults = Sampling(temperature=0.6, top_k=10, seed=5, repetition_penalty=1.2)
    assert keys_of({}, defaults).line() == ("temperature=0.6 top_k=10 penalty_last_n=64 penalty_repeat=1.2 seed=5 ")
    fields = {"temperature": 0, "top_k": None, "seed": 0, "repetition_penalty": 1.0}
    assert keys_of(fields, defaults).line() == ""


def test_the_projection_is_sent_only_when_there_is_one():
    assert keys_of({"experimental_speed_projection": False}, has_cvec=True).line() == "cvec=0 "
    assert keys_of({"experimental_speed_projection": True}, has_cvec=True).line() == ""


CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "First question."},
    {"role": "assistant", "content": "First answer."},
    {"role": "user", "content": "Second question."},
]


@pytest.mark.parametrize(
    "prefix, text",
    [
        ({"messages": 1}, "Be kind."),
        ({"messages": 3}, "First answer."),
        ({"messages": 4}, "Second question."),
        ({"message": 1, "chars": 5}, "First"),
    ],
)
def test_a_shared_prefix_is_pinned_at_the_end_of_its_last_message(chat, prefix, text):
    request = ChatRequest(messages=CONVERSATION, prefix=PrefixMessages(**prefix))
    planned = plan(chat, request, 4096, fit=False, repeat_stop_tokens=0)
    pinned = chat.vocabulary.decode(planned.prompt[: planned.pin])
    assert pinned.rstrip("\n").endswith(text)


@pytest.mark.parametrize("tokens, pin", [(5, 5), (0, None), (100000, None)])
def test_a_prefix_in_tokens_is_pinned_when_the_prompt_is_longer(chat, tokens, pin):
    request = ChatRequest(messages=CONVERSATION, prefix=PrefixMessages(tokens=tokens))
    assert plan(chat, request, 4096, fit=False, repeat_stop_tokens=0).pin == pin


@pytest.mark.parametrize(
    "text, status",
    [
        ("prompt (9 tokens) + max_new (9) exceeds the context (9)", 400),
        ("a token id is outside the vocabulary", 400),
        ("bad request: ids", 400),
        ("this engine was started without --vision", 400),
        ("expected: GEN <max_new> <ids>", 500),
        ("BGEN: no such free slot (--batch 2) or a bad max_new", 500),
        ("fatal: the output head moved", 503),
        ("anything else", 503),
    ],
)
def test_whose_fault_an_engines_error_is(text, status):
    assert status_of_err(text) == status


async def test_a_raw_prompt_longer_than_any_context_is_refused_before_it_is_encoded(serve):
    async with serve() as harness:
        limit = harness.server.state.chat.max_chars
        async with harness.post("/v1/completions", {"prompt": "a" * (limit + 1)}) as response:
            assert response.status == 400
            assert f"the limit is {limit} characters" in (await response.json())["error"]["message"]
