"""The body of a chat request: every field is honoured, or refused with a 400 that names it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ..decode.request import MAX_TOP_LOGPROBS, Request
from ..errors import RequestError
from ..messages import normalise
from .fields import StreamOptions, Strict, limit, template_kwargs
from .parts import Asked, Reasoning
from .server import Server
from .structured import FormFields
from .tools_schema import asked_tools, template_tools

#: choices of one request
MAX_N = 16
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
#: efforts as templates know them that know any
_EFFORT = {"minimal": "low", "xhigh": "high", "max": "high"}


class ReasoningFields(Strict):
    """``effort``: none switches thinking off, the others on. ``enabled`` says the same. ``max_tokens``: tokens of
    thinking at most. ``exclude``: the thoughts are not sent."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: int | None = None
    exclude: bool | None = None


class ChatStreamOptions(StreamOptions):
    """``include_progress``: chunks without a choice that say how much of the prompt is read."""

    include_progress: bool | None = None


class ChatRequest(FormFields):
    """``POST /v1/chat/completions``. What is left out is taken from the server's settings.

    Not OpenAI's: ``thinking_budget`` and ``enable_thinking`` (Qwen's), ``reasoning`` (OpenRouter's),
    ``chat_template_kwargs``, ``continue_final_message``, ``add_generation_prompt``, ``structured_outputs`` and
    ``guided_*`` (vLLM's), ``top_k``, ``min_p``, ``repetition_penalty``, ``cache_salt``, ``timeout``.
    """

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: int | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    stream_options: ChatStreamOptions | None = None

    @property
    def shows_thoughts(self) -> bool:
        """Whether the thoughts are sent."""
        return not (self.reasoning and self.reasoning.exclude)

    def to_asked(self, server: Server) -> Asked:
        """What is asked of ``server``. Raises RequestError naming the field at fault."""
        self.check_stream_options()
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_N:
            raise RequestError(f"n is {n}.", f"It must be a whole number from 1 to {MAX_N}.", param="n")
        tools = asked_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        grammar, grammar_field = self.grammar()
        reasoning, effort = self._reasoning()
        kwargs = template_kwargs(self.chat_template_kwargs, effort, _EFFORT)
        request = Request(
            messages=normalise(self.messages),
            sampling=self.sampling(server.defaults, **self._limits(), **self._logprobs()),
            tools=template_tools(tools),
            template_kwargs=kwargs,
            salt=self.salt(server.cache_salt),
            use_cache=server.use_cache,
            grammar=grammar,
            continue_final=self._continues(),
        )
        return Asked(
            self.model,
            request,
            "chat",
            n=n,
            tools=tools,
            reasoning=reasoning,
            stream=bool(self.stream),
            timeout=self.checked_timeout(),
            names={"grammar": grammar_field, "continue_final": "continue_final_message"},
        )

    def _limits(self) -> dict[str, Any]:
        names = ("max_tokens", "max_completion_tokens")
        limits = {name: value for name in names if (value := limit(getattr(self, name), name)) is not None}
        if len(set(limits.values())) > 1:
            raise RequestError(
                "max_tokens and max_completion_tokens differ.", "Give one of them.", param="max_completion_tokens"
            )
        return {"max_tokens": next(iter(limits.values()))} if limits else {}

    def _logprobs(self) -> dict[str, Any]:
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs is {top}.", f"It must be a whole number from 0 to {MAX_TOP_LOGPROBS}.", "top_logprobs"
            )
        if top and not self.logprobs:
            raise RequestError("top_logprobs was given without logprobs.", "Set logprobs to true.", "top_logprobs")
        return {"logprobs": bool(self.logprobs), "top_logprobs": top}

    def _reasoning(self) -> tuple[Reasoning, Effort | None]:
        """How thinking is handled, and the effort that the template is told."""
        fields = self.reasoning or ReasoningFields()
        effort = _same("reasoning.effort", fields.effort, "reasoning_effort", self.reasoning_effort)
        budget = _same("reasoning.max_tokens", fields.max_tokens, "thinking_budget", self.thinking_budget)
        if budget is not None and not 0 <= budget < 2**31:
            name = "reasoning.max_tokens" if fields.max_tokens is not None else "thinking_budget"
            raise RequestError(f"{name} is {budget}.", "It must be a whole number, at least 0.", param=name)
        enabled = _same("reasoning.enabled", fields.enabled, "enable_thinking", self.enable_thinking)
        if effort is not None:
            enabled = _same("enable_thinking", enabled, "reasoning_effort", effort != "none")
        return Reasoning(enabled, budget), effort

    def _continues(self) -> bool:
        """Whether the last message is the start of the answer."""
        name = "continue_final_message" if self.continue_final_message else "add_generation_prompt"
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true.",
                "A message that goes on is followed by no new one.",
                param="add_generation_prompt",
            )
        if not self.continue_final_message and self.add_generation_prompt is not False:
            return False
        if not self.messages or self.messages[-1].get("role") != "assistant":
            raise RequestError(
                f"{name} is {'true' if self.continue_final_message else 'false'}, but the last message is not the "
                "assistant's.",
                "Put the start of the answer there.",
                param=name,
            )
        return True


def _same(name: str, one: Any, other_name: str, other: Any) -> Any:
    """The value of two fields that mean the same. Raises RequestError where they differ."""
    if one is not None and other is not None and one != other:
        raise RequestError(f"{name} and {other_name} contradict each other.", "Give one of them.", param=other_name)
    return other if one is None else one
