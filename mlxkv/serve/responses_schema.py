"""The body of ``POST /v1/responses``: every field is honoured, or refused with a 400 that names it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ..decode.request import MAX_TOP_LOGPROBS, Request
from ..errors import RequestError
from ..messages import check_text
from .fields import SamplingFields, Strict, format_grammar, limit, template_kwargs
from .parts import Asked, Reasoning, Tools
from .server import Server
from .tools_schema import asked_tools

_LOGPROBS, _SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
#: efforts as templates know them that know any
_EFFORT = {"minimal": "low", "xhigh": "high", "max": "high"}


class ReasoningFields(Strict):
    """effort: none switches thinking off, the others on. summary: the reasoning comes as a summary (the whole of it:
    no second model shortens it)."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextFields(Strict):
    """format: what the text must match, ``{"type": "text" | "json_object" | "json_schema", ...}``."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class PromptCacheOptions(Strict):
    """Hints for another server's cache. Here every prefix is kept as the store sees fit; they change no answer."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None


class ResponsesRequest(SamplingFields):
    """``POST /v1/responses``. ``thinking_budget``, ``chat_template_kwargs`` and the sampling fields that OpenAI's has
    not are this server's own."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
    }

    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    reasoning: ReasoningFields | None = None
    thinking_budget: int | None = None
    text: TextFields | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    client_metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def sealed(self) -> bool:
        return _SEALED in (self.include or ())

    @property
    def summary(self) -> str | None:
        return self.reasoning and (self.reasoning.summary or self.reasoning.generate_summary)

    def to_asked(self, server: Server, messages: list[dict[str, Any]]) -> Asked:
        """What is asked, with the conversation as ``messages``. Raises RequestError."""
        self._check()
        tools = self.asked_tools()
        shown = tools is not None and tools.choice != "none"
        text = self.text or TextFields()
        effort = self.reasoning and self.reasoning.effort
        kwargs = template_kwargs(self.chat_template_kwargs, effort, _EFFORT)
        more: dict[str, Any] = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs or 0}
        if (most := limit(self.max_output_tokens, "max_output_tokens")) is not None:
            more["max_tokens"] = most
        request = Request(
            messages=messages,
            sampling=self.sampling(server.defaults, **more),
            tools=[dict(f) for f in tools.functions] if tools is not None and shown else None,
            template_kwargs=kwargs,
            salt=self.salt(server.cache_salt),
            use_cache=server.use_cache,
            grammar=format_grammar(text.format, "text.format", None),
        )
        return Asked(
            self.model,
            request,
            "responses",
            tools=tools,
            reasoning=Reasoning(None if effort is None else effort != "none", self.thinking_budget),
            stream=bool(self.stream),
            timeout=self.checked_timeout(),
            labels=self.labels(),
            names={"messages": "input", "grammar": "text.format"},
        )

    def asked_tools(self) -> Tools | None:
        """The functions that may be called. Raises RequestError."""
        tools = [_nested(tool) for tool in self.tools or []]
        choice = self.tool_choice
        if isinstance(choice, dict):
            if choice.get("type") == "allowed_tools":
                allowed = choice.get("tools")
                inner = choice | {"tools": [_nested(t) for t in allowed] if isinstance(allowed, list) else allowed}
                choice = {"type": "allowed_tools", "allowed_tools": {k: v for k, v in inner.items() if k != "type"}}
            else:
                choice = _nested(choice)
        try:
            return asked_tools(tools, choice, self.parallel_tool_calls)
        except RequestError as error:  # here a function's keys stand beside its type
            raise RequestError(*map(_flat, (error.message, error.cure, error.param or ""))) from error

    def _check(self) -> None:
        self.check_stream_options()
        if self.stream_options is not None and self.stream_options.include_usage is not None:
            raise RequestError(
                "There is no field 'stream_options.include_usage' here.",
                "A response's last event always has its usage.",
                param="stream_options.include_usage",
            )
        for i, name in enumerate(self.include or ()):
            if name not in (_LOGPROBS, _SEALED):
                raise RequestError(
                    f"include[{i}] is {name[:80]!r}.",
                    f"Supported are {_LOGPROBS} and {_SEALED}.",
                    param=f"include[{i}]",
                )
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}.",
                f"It must be a whole number from 0 to {MAX_TOP_LOGPROBS}.",
                param="top_logprobs",
            )
        if self.thinking_budget is not None and not 0 <= self.thinking_budget < 2**31:
            raise RequestError(
                f"thinking_budget is {self.thinking_budget}.",
                "It must be a whole number, at least 0.",
                param="thinking_budget",
            )
        if self.instructions is not None:
            check_text(self.instructions, "instructions")


def _nested(tool: Any) -> Any:
    """A tool, or a choice of one, in the chat API's form: its keys under ``function``."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    inner = {name: value for name, value in tool.items() if name != "type" and (name, value) not in _HARMLESS}
    return {"type": "function", "function": inner}


def _flat(text: str) -> str:
    return (
        text.replace(', "function": {"name": ...}}', ', "name": ...}')
        .replace(".function", "")
        .replace(".allowed_tools", "")
    )


#: keys of a tool that ask for nothing with these values
_HARMLESS = [("defer_loading", False), ("allowed_callers", ["direct"])]
