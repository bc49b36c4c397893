"""``POST /tokenize`` and ``/detokenize``: what a text or a conversation is to a model, and back."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi import Request as Http

from ..decode.request import Request
from ..decode.spelling import Spelling
from ..errors import RequestError
from ..messages import check_text, normalise
from .attended import attended, time_limit
from .completions_logprobs import spelled
from .fields import Body, template_kwargs
from .server import Server, Serving
from .tools_schema import asked_tools, template_tools

router = APIRouter()


class TokenizeRequest(Body):
    """Exactly one of ``prompt``, a text, and ``messages``, as the chat API has them. ``model``: the first one where it
    is left out. ``add_special_tokens``: with what the tokenizer puts around a text. ``return_token_strs``: each
    token's text too. ``continue_final_message``: the last message is the start of the answer."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def to_request(self) -> Request | None:
        """The conversation; None where a text is given. Raises RequestError."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError(
                "Exactly one of prompt and messages is needed.", param="prompt" if self.prompt is None else "messages"
            )
        if self.messages is None:
            for name in ("tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"):
                if getattr(self, name) is not None:
                    raise RequestError(f"{name} belongs to messages.", "Leave it out.", param=name)
            return None
        if self.add_special_tokens is not None:
            raise RequestError(
                "add_special_tokens belongs to prompt.",
                "A chat template says what it needs.",
                param="add_special_tokens",
            )
        continued = bool(self.continue_final_message)
        if self.add_generation_prompt is not None and self.add_generation_prompt == continued:
            raise RequestError(
                f"add_generation_prompt is {self.add_generation_prompt} and continue_final_message is {continued}.",
                "A prompt ends where the answer begins: give one of the two as true.",
                param="add_generation_prompt",
            )
        return Request(
            messages=normalise(self.messages),
            tools=template_tools(asked_tools(self.tools, None, None)),
            template_kwargs=template_kwargs(self.chat_template_kwargs),
            continue_final=continued,
        )


class DetokenizeRequest(Body):
    """``tokens``: ids of the model, the first one where it is left out."""

    tokens: list[int]
    model: str | None = None


@router.post("/tokenize")
async def tokenize(server: Serving, body: TokenizeRequest, http: Http) -> dict[str, Any]:
    """Token ids, how many, and how many the model's context holds."""
    request = body.to_request()
    text = check_text(body.prompt or "", "prompt")

    async def ask() -> dict[str, Any]:
        async with server.lease(_model(server, body.model)) as engine:

            def work() -> dict[str, Any]:
                if request is None:
                    ids = engine.tokenize(text, body.add_special_tokens is not False)
                else:
                    ids = list(engine.prepare(request, fits=False).token_ids)
                made: dict[str, Any] = {"count": len(ids), "max_model_len": engine.info.context_length, "tokens": ids}
                if body.return_token_strs:
                    spelling = Spelling(engine.tokenizer)
                    made["token_strs"] = [spelled(spelling(id)) for id in ids]
                return made

            return await asyncio.to_thread(work)

    return await attended(http, time_limit(server, None), ask())


@router.post("/detokenize")
async def detokenize(server: Serving, body: DetokenizeRequest, http: Http) -> dict[str, Any]:
    """The exact text of token ids."""

    async def ask() -> dict[str, Any]:
        async with server.lease(_model(server, body.model)) as engine:
            return {"prompt": await asyncio.to_thread(engine.detokenize, body.tokens)}

    return await attended(http, time_limit(server, None), ask())


def _model(server: Server, name: str | None) -> str:
    return server.models.registry.entries[0].name if name is None else name
