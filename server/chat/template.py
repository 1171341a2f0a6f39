"""From a conversation to the ids of its prompt, through the chat template of the pack.

Input    messages and tools in OpenAI's shape, tool choice, thinking
Output   Prompt: ids, and what the output parser has to know about how the prompt ends
Trust    the pack's template runs in jinja2's immutable sandbox; client text can never become a special token
Errors   TemplateError: bad messages, or a template that raises, writes too much or computes for too long
Source   the Qwen chat format; the pack's template when it has one, else FALLBACK_TEMPLATE
Cost     a prompt of 70,000 tokens takes 0.08 s, nearly all of it encoding, which lets other threads run: call it in a
         thread

Client text stays text because every special word in it is broken by a guard, a code point that is no character (a
lone surrogate; those that a client sends are replaced). Templates work on the text as usual, then the special words
that are whole are the template's own, and the guards are dropped from the plain text between them before it is
encoded. Text without special words gives the very ids of plain encoding, as pieces are cut at special words alone.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from strata.server.chat.effort import MODEL_DEFAULT, NO_THINKING, Thinking
from strata.server.chat.errors import TemplateError
from strata.server.chat.messages import Json, forced_tool, hide_old_reasoning, normal_messages, normal_tools
from strata.server.chat.vocabulary import Vocabulary

# A prompt may have this many characters per token of the context (English has 4, code 3), and at least MIN_CHARS.
CHARS_PER_TOKEN = 16
MIN_CHARS = 1 << 20
MAX_RENDER_CPU_S = 20.0
MAX_PRODUCT = 1 << 20  # length of a string or list that a template may make with *

GUARD = "\ud800"
_SURROGATES = re.compile("[\ud800-\udfff]")

FALLBACK_TEMPLATE = r"""
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- set has_system = messages[0].role == 'system' %}
{%- if has_system or tools %}
    {{- '<|im_start|>system\n' }}
    {%- if has_system %}{{- messages[0].content }}{% endif %}
    {%- if tools %}
        {{- '\n\n' if has_system and messages[0].content else '' }}
        {{- 'These functions can be called. Each line is the JSON schema of one.\n\n<tools>' }}
        {%- for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}
        {{- '\n</tools>\n\nA call is written exactly so, with one parameter block for each argument:\n\n' }}
        {{- '<tool_call>\n<function=NAME>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n</tool_call>\n\n' }}
        {{- 'A string is written as it is, any other value as JSON. Several calls follow each other.' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_user %}
            {%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}
            {%- else %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
        {%- endif %}
        {%- if m.tool_calls %}
            {%- set said = m.content.rstrip('\n') %}
            {{- said + ('\n\n' if said else '') }}
            {%- for call in m.tool_calls %}
                {{- '' if loop.first else '\n' }}
                {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
                {%- for name, value in call.function.arguments.items() %}
                    {{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) }}
                    {{- '\n</parameter>\n' }}
                {%- endfor %}
                {{- '</function>\n</tool_call>' }}
            {%- endfor %}
        {%- else %}
            {{- m.content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '<think>\n' }}
{%- endif %}
"""


class Prompt(msgspec.Struct, frozen=True):
    """A conversation ready for the engine, and the state in which the output parser starts."""

    ids: list[int]
    text: str  # as rendered, for logs
    starts_in_reasoning: bool  # the prompt ends inside an open <think>
    forced_prefix: str  # the beginning of a tool call that ends the prompt; "" when the model is free
    tools: list[dict[str, Any]]  # those the model was shown; none when tool_choice hid them


class Chat:
    """Prompts for one pack. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, *, template: str | None = None, keep_empty_turns: bool = False) -> None:
        """`template` overrides the pack's own. Raises TemplateError when it does not parse."""
        self.vocabulary = vocabulary
        self.template_source = template or vocabulary.chat_template or FALLBACK_TEMPLATE
        self.max_chars = max(MIN_CHARS, CHARS_PER_TOKEN * (vocabulary.context_length or 0))
        self._keep_empty_turns = keep_empty_turns
        self._template = _Environment.compile_template(self.template_source)
        words = vocabulary.special or {GUARD: 0}
        self._first_letters = re.compile(f"[{re.escape(''.join(sorted({word[0] for word in words})))}]")
        # What a template could complete: it writes < or </, then a client's name, then perhaps >.
        insides = {(word[cut:-1], word[-1]) for word in words for cut in (1, 2) if word[cut:-1]}
        ends = [f"{re.escape(inside)}(?:{re.escape(last)}|\\Z)" for inside, last in sorted(insides)]
        self._insides = re.compile("|".join(ends or [GUARD]))

    def prompt(
        self,
        messages: Sequence[Json],
        *,
        tools: Sequence[Json] | None = None,
        tool_choice: str | Json | None = None,
        thinking: Thinking = MODEL_DEFAULT,
        template_kwargs: Json | None = None,
    ) -> Prompt:
        """The prompt of a request. `template_kwargs` is the client's `chat_template_kwargs`. Raises TemplateError."""
        shown = [] if tool_choice == "none" else normal_tools(tools)
        forced = forced_tool(tool_choice, [tool["function"]["name"] for tool in shown])
        extra = dict(template_kwargs or {})
        if extra.get("enable_thinking") is False or forced is not None:
            thinking = NO_THINKING
        turns = normal_messages(messages, keep_empty_turns=self._keep_empty_turns)
        if not extra.get("preserve_thinking"):
            turns = hide_old_reasoning(turns)
        text = self._render(turns, shown, thinking, extra)
        opened = text.rstrip().endswith("<think>")
        prefix = ""
        if forced is not None:
            prefix = self._call_opening(forced)
            text += ("\n</think>\n\n" if opened else "") + self._call_opening(self._guarded(forced))
        return Prompt(
            ids=self._encode(text),
            text=text.replace(GUARD, ""),
            starts_in_reasoning=opened and forced is None,
            forced_prefix=prefix,
            tools=shown,
        )

    def _render(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]], thinking: Thinking, extra: Json) -> str:
        values: dict[str, Any] = {
            "messages": turns,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        taken = (values.keys() | self.vocabulary.words.keys()) & extra.keys()
        if taken:
            raise TemplateError(f"chat_template_kwargs.{min(taken)}: is set by the server")
        if thinking.enabled is not None:
            values["enable_thinking"] = thinking.enabled
        if thinking.level is not None:
            values["reasoning_effort"] = thinking.level
        try:
            guarded = self._guarded({**extra, **values})
        except RecursionError as error:
            raise TemplateError("messages or tools: nested too deeply") from error
        return self._rendered({**guarded, **self.vocabulary.words})

    def _rendered(self, values: dict[str, Any]) -> str:
        """The template's text, bounded in size and in CPU time of this thread."""
        _Environment.deadline.set(time.thread_time() + MAX_RENDER_CPU_S)
        pieces: list[str] = []
        n_chars = 0
        try:
            for piece in self._template.generate(values):
                _Environment.check_time()
                n_chars += len(piece)
                if n_chars > self.max_chars:
                    raise TemplateError(self._too_long())
                pieces.append(piece)
        except TemplateError:
            raise
        except Exception as error:
            reason = str(error).replace(GUARD, "")[:500] or type(error).__name__
            raise TemplateError(f"the chat template refuses this conversation: {reason}") from error
        return "".join(pieces)

    def _too_long(self) -> str:
        context = self.vocabulary.context_length
        limit = f"the limit is {self.max_chars} characters"
        return f"messages: the prompt is too long: {limit}" + (f" (a context of {context} tokens)" if context else "")

    def _guarded(self, value: Any) -> Any:
        """Client data in which no special word is whole, nor becomes so beside other strings or in a template's < >."""
        if isinstance(value, str):
            text = self._first_letters.sub(lambda match: match[0] + GUARD, _SURROGATES.sub("\ufffd", value))
            return GUARD + text if self._insides.match(text) else text
        if isinstance(value, Mapping):
            return {self._guarded(key): self._guarded(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(item) for item in value]
        return value

    def _encode(self, text: str) -> list[int]:
        pieces = self.vocabulary.split_special(text)
        return self.vocabulary.encode_pieces([(piece.replace(GUARD, ""), special_id) for piece, special_id in pieces])

    def _call_opening(self, name: str) -> str:
        """The beginning of a call in the form that the template teaches, ended where a token of the model may end."""
        if "<function=" not in self.template_source and '"name"' in self.template_source:
            return '<tool_call>\n{"name": "' + (f'{name}", "arguments":' if name else "")
        return "<tool_call>\n<function" + (f"={name}>\n" if name else "")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a clock that is read at every call and a limit on products.

    A template could still spend time in loops that neither call nor write anything; a pack's author can do worse
    with its tensors, clients cannot reach the template's code.
    """

    intercepted_binops = frozenset({"*", "**"})
    deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))

    @classmethod
    def check_time(cls) -> None:
        if time.thread_time() > cls.deadline.get():
            raise TemplateError(f"the chat template computes for more than {MAX_RENDER_CPU_S:g} s")

    @classmethod
    def compile_template(cls, source: str) -> jinja2.Template:
        environment = cls(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        try:
            return environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template does not parse: line {error.lineno}: {error.message}") from error

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not for chat templates")
        for items, times in ((left, right), (right, left)):
            is_sequence = isinstance(items, str | list | tuple) and isinstance(times, int)
            if is_sequence and len(items) * times > MAX_PRODUCT:
                raise SecurityError(f"a repetition longer than {MAX_PRODUCT}")
        return super().call_binop(context, operator, left, right)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As chat templates expect it: characters as they are, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(f"the chat template refuses this conversation: {message.replace(GUARD, '')[:500]}")
