"""The real OpenAI client against the server with the scripted engine."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = (
    "Let me look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo </parameter> fjord\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


async def ask(harness, **fields):
    client = harness.openai()
    return await client.chat.completions.create(model="scripted", messages=HELLO, **fields)


async def test_a_whole_answer_has_reasoning_content_usage_and_timings(serve):
    async with serve([{"reused": 4, "steps": [{"text": "I think.\n</think>\n\nHello to you."}]}]) as harness:
        answer = await ask(harness)
        message = answer.choices[0].message
        assert (message.role, message.content) == ("assistant", "Hello to you.")
        assert message.reasoning_content == "I think.\n" and message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop" and answer.object == "chat.completion"
        assert answer.id.startswith("chatcmpl-") and answer.model == "scripted"
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens_details.cached_tokens == 4
        timings = answer.timings
        assert timings["cache_n"] == 4 and timings["prompt_n"] == usage.prompt_tokens - 4
        assert timings["predicted_n"] == usage.completion_tokens


async def test_a_stream_says_the_same_as_a_whole_answer(serve):
    async with serve([{"steps": [{"text": "Thinking… 思考\n</think>\n\nGrüße, 世界! 👋"}]}]) as harness:
        whole = await ask(harness)
        content, reasoning, roles, last = "", "", [], None
        async for chunk in await ask(harness, stream=True, stream_options={"include_usage": True}):
            last, delta = chunk, chunk.choices[0].delta
            roles += [delta.role] if delta.role else []
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
        assert (content, reasoning) == ("Grüße, 世界! 👋", whole.choices[0].message.reasoning_content)
        assert roles == ["assistant"] and last.choices[0].finish_reason == "stop"
        assert last.usage == whole.usage and last.timings["predicted_n"] == whole.usage.completion_tokens


async def test_a_tool_call_arrives_whole_and_in_pieces(serve):
    async with serve([{"steps": [{"text": CALL}]}]) as harness:
        fields = {"tools": [WEATHER], "extra_body": NO_THINKING}
        whole = await ask(harness, **fields)
        call = whole.choices[0].message.tool_calls[0]
        wanted = {"city": "Oslo </parameter> fjord", "days": 3}
        assert whole.choices[0].finish_reason == "tool_calls" and whole.choices[0].message.content == "Let me look.\n"
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
            "function",
            "get_weather",
            wanted,
        )
        assert call.id.startswith("call_")
        arguments, ids = "", set()
        async for chunk in await ask(harness, stream=True, **fields):
            for piece in chunk.choices[0].delta.tool_calls or []:
                arguments += piece.function.arguments
                ids |= {piece.id} - {None}
            finish = chunk.choices[0].finish_reason
        assert json.loads(arguments) == wanted and finish == "tool_calls" and len(ids) == 1


async def test_only_tool_calls_leave_the_content_null(serve):
    async with serve([{"steps": [{"text": CALL.removeprefix("Let me look.\n")}]}]) as harness:
        whole = await ask(harness, tools=[WEATHER], extra_body=NO_THINKING)
        assert whole.choices[0].message.content is None and len(whole.choices[0].message.tool_calls) == 1


async def test_a_stop_string_over_a_token_border_ends_the_text_exactly(serve):
    async with serve([{"steps": [{"text": "one two three four"}], "token_ms": 1}]) as harness:
        for stop, wanted in (("two t", "one "), (["zzz", "e fo"], "one two thre"), ("absent", "one two three four")):
            whole = await ask(harness, stop=stop, extra_body=NO_THINKING)
            streamed = [
                chunk.choices[0].delta.content or ""
                async for chunk in await ask(harness, stop=stop, stream=True, extra_body=NO_THINKING)
            ]
            assert whole.choices[0].message.content == wanted == "".join(streamed)
            assert whole.choices[0].finish_reason == "stop"


async def test_an_abort_in_mid_stream_frees_the_engine(serve, eventually):
    endless = {"repeat": True, "token_ms": 1, "steps": [{"text": "more "}]}
    async with serve([endless]) as harness:
        stream = await ask(harness, stream=True)
        async for chunk in stream:
            if getattr(chunk.choices[0].delta, "reasoning_content", None):
                break
        await stream.close()
        await eventually(lambda: harness.service.scheduler.is_idle)
        assert harness.commands[-1] == "STOP"


async def test_max_tokens_ends_with_length(serve):
    async with serve([{"steps": [{"text": "one two three four five six"}]}]) as harness:
        answer = await ask(harness, max_tokens=3)
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3
        answer = await ask(harness, max_completion_tokens=2, max_tokens=3)
        assert answer.usage.completion_tokens == 2


async def test_a_prompt_that_is_too_long_is_a_400_with_the_numbers(serve):
    async with serve(context=64) as harness:
        client = harness.openai()
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "long " * 300}], stream=True
            )
        error = refused.value
        n_prompt = int(error.message.split("the prompt has ")[1].split()[0])
        assert n_prompt > 300 and "holds 64" in error.message
        assert error.type == "invalid_request_error" and error.code == "context_length_exceeded"
        assert harness.commands == []


async def test_forty_requests_at_once_get_forty_answers(serve):
    reply = {"match": r"say (\w+)", "steps": [{"text": "you said \\1"}]}
    async with serve([reply]) as harness:
        client = harness.openai()

        async def one(i: int) -> str:
            messages = [{"role": "user", "content": f"say number{i}"}]
            if i % 2:
                answer = await client.chat.completions.create(
                    model="scripted", messages=messages, extra_body=NO_THINKING
                )
                return answer.choices[0].message.content
            stream = await client.chat.completions.create(
                model="scripted", messages=messages, stream=True, extra_body=NO_THINKING
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert await asyncio.gather(*map(one, range(40))) == [f"you said number{i}" for i in range(40)]


async def test_a_wrong_key_is_an_authentication_error(serve):
    async with serve(settings={"api_keys": ("right", "also")}) as harness:
        with pytest.raises(openai.AuthenticationError) as refused:
            await harness.openai(api_key="wrong").models.list()
        assert refused.value.type == "authentication_error"
        for key in ("right", "also"):
            assert [model.id async for model in await harness.openai(api_key=key).models.list()] == ["scripted"]


async def test_the_clients_own_retry_survives_an_engine_that_died(serve):
    lives = [{"replies": [{"reading": [{"kill": True}]}]}, {"replies": [{"steps": [{"text": "alive"}]}]}]
    async with serve(lives=lives) as harness:
        client = harness.openai(max_retries=2)
        answer = await client.chat.completions.create(model="scripted", messages=HELLO, extra_body=NO_THINKING)
        assert answer.choices[0].message.content == "alive"


async def test_raw_completions_whole_and_streamed(serve):
    async with serve([{"steps": [{"text": "<think>one two three"}]}]) as harness:
        client = harness.openai()
        whole = await client.completions.create(model="scripted", prompt="Once <|im_start|>")
        assert whole.choices[0].text == "<think>one two three" and whole.choices[0].finish_reason == "stop"
        stream = await client.completions.create(model="scripted", prompt=[5, 6, 7], stop="o t", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "<think>one tw"
        assert harness.commands[-1].split()[-1] == "5,6,7" or harness.commands[-2].split()[-1] == "5,6,7"
        assert whole.usage.prompt_tokens == len(harness.commands[0].split()[-1].split(","))
