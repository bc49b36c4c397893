"""The bodies of Anthropic's Messages API: every field is honoured, or refused with a 400 that names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from ..decode.request import Grammar, Request, SamplingParams
from ..errors import RequestError
from ..messages import check_text
from .anthropic_messages import CacheControl, check_cache_control, conversation
from .fields import MAX_STOPS, Body, Strict, template_kwargs
from .parts import Asked, Reasoning, Tools
from .server import Server

#: Thinking that is never cleared: what an agent asks for that wants the conversation left as it is.
_KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
#: Keys of a tool that change nothing here: arguments stream as they come, and a tool is called directly.
_TOOL_KEYS = {"name", "description", "input_schema", "strict", "input_examples", "type", "cache_control"}
_TOOL_HARMLESS: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "eager_input_streaming": (True, False),
}
#: words of Anthropic's that a template does not know, as the nearest of those it may know
_EFFORT = {"xhigh": "high", "max": "high"}


class Metadata(Strict):
    """``user_id``: the caller's own name for its user; it changes no answer."""

    user_id: str | None = None


class Thinking(Strict):
    """``enabled`` with at most ``budget_tokens`` tokens, ``adaptive`` with any number, or ``disabled``. ``display``:
    omitted leaves the words out of the answer."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(Strict):
    """Whether tools are called: ``auto``, ``any`` of them must be, the one ``tool`` with ``name`` must be, ``none``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Strict):
    """A JSON schema that the answer's text matches."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """``effort`` goes to the model's template, where it has a place for it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextManagement(Strict):
    """Nothing is taken out of a conversation here, so the only edit is one that keeps everything."""

    edits: list[dict[str, Any]] | None = None


class Diagnostics(Strict):
    """``previous_message_id``: ask why a prompt was not found again."""

    previous_message_id: str | None = None


class NoThreads(RequestError):
    """No conversation is held for a client here. Its libraries know the code, and then send all of it each time."""

    code = "thread_unsupported_request"


class CountRequest(Body):
    """``POST /v1/messages/count_tokens``: everything that makes a prompt."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (),
        "fallbacks": ([],),
        "inference_geo": (),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    }

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_asked(self, server: Server) -> Asked:
        """What is asked for, as far as a prompt goes. Raises RequestError naming the field at fault."""
        said = conversation(self.system, self.messages)
        for i, edit in enumerate((self.context_management and self.context_management.edits) or []):
            if edit != _KEEP_ALL:
                where = f"context_management.edits[{i}]"
                raise RequestError(f"{where} is not supported.", f"Only {_KEEP_ALL} is, which keeps all.", param=where)
        tools = self._tools()
        shown = tools is not None and tools.choice != "none"
        effort = self.output_config and self.output_config.effort
        kwargs = template_kwargs(self.chat_template_kwargs, effort, _EFFORT)
        form, field = self._format()
        names = {"grammar": field, "continue_final": "messages", "stop": "stop_sequences"}
        for i, place in enumerate(said.places):
            names[f"messages[{i}]"] = names[f"messages[{i}].tool_calls"] = place
        for i in range(len(self.tools or ())):
            names[f"tools[{i}].function.parameters"] = f"tools[{i}].input_schema"
        request = Request(
            messages=said.messages,
            sampling=server.defaults,
            tools=[dict(f) for f in tools.functions] if tools is not None and shown else None,
            template_kwargs=kwargs,
            salt=server.cache_salt,
            use_cache=server.use_cache,
            grammar=form,
            continue_final=said.continued,
        )
        reasoning = self._reasoning(said.continued)
        return Asked(self.model, request, "messages", tools=tools, reasoning=reasoning, names=names)

    def _format(self) -> tuple[Grammar | None, str]:
        """What the text must match, and the field that says so."""
        field = "output_format" if self.output_format else "output_config.format"
        form = self.output_config and self.output_config.format
        if self.output_format and form:
            raise RequestError("There are two formats.", "Give output_config.format alone.", param=field)
        form = self.output_format or form
        try:
            return Grammar.of({"json_schema": form.schema_}) if form else None, field
        except RequestError as error:
            raise RequestError(error.message, error.cure, param=field) from error

    def _reasoning(self, continued: bool) -> Reasoning:
        asked = self.thinking
        if asked is None:
            return Reasoning()
        if asked.type != "enabled":
            if asked.budget_tokens is not None:
                raise RequestError(
                    f"thinking.budget_tokens was given, and thinking is {asked.type}.",
                    "It belongs to type enabled.",
                    param="thinking.budget_tokens",
                )
            return Reasoning(asked.type == "adaptive")
        if asked.budget_tokens is None:
            raise RequestError("thinking.budget_tokens is missing.", param="thinking.budget_tokens")
        if asked.budget_tokens < 1:
            raise RequestError(
                f"thinking.budget_tokens is {asked.budget_tokens}.",
                "It must be a whole number, at least 1.",
                param="thinking.budget_tokens",
            )
        if continued:
            raise RequestError(
                "The last message begins the answer, so there is nothing left to think about.",
                "End with a user message, or leave thinking out.",
                param="thinking",
            )
        return Reasoning(True, asked.budget_tokens)

    def _tools(self) -> Tools | None:
        functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or [])]
        names = [f["function"]["name"] for f in functions]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise RequestError(f"Two tools have the name {name[:80]!r}.", "Names differ.", param=f"tools[{i}].name")
        choice = self.tool_choice
        if choice is None:
            return Tools(tuple(functions)) if functions else None
        if choice.name is not None and choice.type != "tool":
            raise RequestError(f"tool_choice.name was given, and its type is {choice.type}.", param="tool_choice.name")
        if choice.type == "none" and choice.disable_parallel_tool_use is not None:
            raise RequestError(
                "tool_choice of type none calls no tools at all.",
                "Leave disable_parallel_tool_use out.",
                param="tool_choice.disable_parallel_tool_use",
            )
        if not functions:
            if choice.type in ("any", "tool"):
                raise RequestError(
                    "tool_choice asks for a call, and there are no tools.", "Give tools.", param="tool_choice"
                )
            return None
        if choice.type == "tool" and choice.name not in names:
            raise RequestError(
                f"tool_choice.name is {str(choice.name)[:80]!r}.",
                f"The tools are {', '.join(names)[:200]}.",
                param="tool_choice.name",
            )
        parallel = not choice.disable_parallel_tool_use
        if choice.type == "tool":
            return Tools(tuple(functions), ("name", str(choice.name)), parallel)
        return Tools(tuple(functions), "required" if choice.type == "any" else choice.type, parallel)


class MessagesRequest(CountRequest):
    """``POST /v1/messages``. ``min_p``, ``seed``, ``cache_salt``, ``timeout`` and ``chat_template_kwargs`` are this
    server's own."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    metadata: Metadata | None = None
    user_profile_id: str | None = None
    diagnostics: Diagnostics | None = None
    thread: dict[str, Any] | None = None
    cache_salt: str | None = None
    timeout: float | None = None

    def to_asked(self, server: Server) -> Asked:
        """Everything that is asked for. Raises RequestError naming the field at fault."""
        if self.thread is not None:
            raise NoThreads("thread is not supported.", "Send the whole conversation.", param="thread")
        if self.max_tokens < 0:
            raise RequestError(f"max_tokens is {self.max_tokens}.", "It must be at least 0.", param="max_tokens")
        if self.timeout is not None and not 0 < self.timeout < 1e7:
            raise RequestError(f"timeout is {self.timeout}.", "It is a number of seconds above 0.", param="timeout")
        asked = super().to_asked(server)
        budget = asked.reasoning.budget
        if budget is not None and budget >= self.max_tokens:
            raise RequestError(
                f"thinking.budget_tokens is {budget}, and max_tokens {self.max_tokens}.",
                "Thinking counts, and an answer needs tokens too: max_tokens must be larger.",
                param="thinking.budget_tokens",
            )
        user = self.metadata.user_id if self.metadata else None
        labels = {"user": user, "user_profile_id": self.user_profile_id}
        salt = check_text(self.cache_salt or "", "cache_salt") or server.cache_salt
        return replace(
            asked,
            request=replace(asked.request, sampling=self._sampling(server.defaults), salt=salt),
            stream=bool(self.stream),
            timeout=self.timeout,
            labels={name: value for name, value in labels.items() if value is not None},
        )

    def _sampling(self, defaults: SamplingParams) -> SamplingParams:
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        asked: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        asked["max_tokens"] = self.max_tokens or 1  # 0: the prompt is to be remembered, and for that it must be read
        if self.stop_sequences is not None:
            stops = tuple(check_text(stop, "stop_sequences") for stop in self.stop_sequences)
            if not all(stops):
                raise RequestError("stop_sequences has an empty text.", "Leave it out.", param="stop_sequences")
            if len(stops) > MAX_STOPS:
                raise RequestError(
                    f"stop_sequences has {len(stops)} texts.", f"Give {MAX_STOPS} at most.", param="stop_sequences"
                )
            asked["stop"] = stops
        return replace(defaults, **asked)


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool as OpenAI's object. ``input_examples`` stand in its schema as ``examples``, JSON Schema's own word."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise RequestError(
            f"{where}.type is {str(kind)[:80]!r}.",
            "Only tools with an input_schema are supported, which the client runs itself.",
            param=f"{where}.type",
        )
    for key, value in tool.items():
        if key in _TOOL_HARMLESS:
            if not _asks_nothing(value, _TOOL_HARMLESS[key]):
                raise RequestError(f"{where}.{key} is not supported.", "Leave it out.", param=f"{where}.{key}")
        elif key not in _TOOL_KEYS:
            shown = key.encode("utf-8", "replace").decode()[:80]
            raise RequestError(f"{where}.{shown} is not supported.", "Leave it out.", param=where)
    check_cache_control(tool.get("cache_control"), f"{where}.cache_control")
    function: dict[str, Any] = {"name": check_text(tool.get("name"), f"{where}.name")}
    if not function["name"]:
        raise RequestError(f"{where}.name is empty.", param=f"{where}.name")
    if tool.get("description") is not None:
        function["description"] = check_text(tool["description"], f"{where}.description")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise RequestError(
            f"{where}.input_schema is not the schema of an object.",
            'Give a JSON schema with "type": "object".',
            param=f"{where}.input_schema",
        )
    examples = tool.get("input_examples")
    if examples is not None:
        if not isinstance(examples, list) or not all(isinstance(e, dict) for e in examples):
            raise RequestError(f"{where}.input_examples is not a list of objects.", param=f"{where}.input_examples")
        schema = schema | {"examples": examples} if examples else schema
    function["parameters"] = schema
    if tool.get("strict") is not None:
        if not isinstance(tool["strict"], bool):
            raise RequestError(f"{where}.strict is not true or false.", param=f"{where}.strict")
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _asks_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    return value is None or any(type(value) is type(h) and value == h for h in harmless)
