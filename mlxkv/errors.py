"""Every error mlxkv raises on purpose: what is wrong, what to do, and which exit code a command ends with.

Exit codes: 0 done, 1 unexpected, 2 usage or configuration, 3 model cannot be loaded, 4 request refused,
5 generation failed, 70 the device failed twice, 130 interrupted.
"""

from __future__ import annotations


class MlxkvError(Exception):
    """Base class. ``message`` says what is wrong; ``cure`` (may be empty) says what to do.

    ``exit_code`` is what a command line ends with, ``status`` the HTTP status of a server's answer, ``type`` the OpenAI
    error type, ``code`` a stable machine-readable name.
    """

    exit_code = 1
    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, cure: str = "") -> None:
        super().__init__(f"{message} {cure}".strip())
        self.message = message
        self.cure = cure


class ConfigError(MlxkvError):
    """A flag, environment variable, configuration file or combination of them that cannot work."""

    exit_code = 2
    status = 400
    type = "invalid_request_error"
    code = "invalid_configuration"


class ModelError(MlxkvError):
    """A model that cannot be found, read or run; the message names the file, the cure what to do."""

    exit_code = 3
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class RequestError(MlxkvError):
    """A request that is refused. ``param`` names the field at fault, if one is."""

    exit_code = 4
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"

    def __init__(self, message: str, cure: str = "", param: str | None = None) -> None:
        super().__init__(message, cure)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt does not fit the model's context; the message has both numbers."""

    code = "context_length_exceeded"


class RequestTooLarge(RequestError):
    """The request would not fit the memory limit if nothing else ran; the message has both numbers."""

    code = "memory_limit_exceeded"


class EngineError(MlxkvError):
    """Generation failed for one request; the engine lives on and takes others."""

    exit_code = 5
    code = "generation_failed"


class EngineClosed(EngineError):
    """The engine was closed, or is unhealthy and takes no requests."""

    status = 503
    type = "overloaded_error"
    code = "engine_closed"


class EngineBusy(EngineError):
    """A turn of the engine takes so long that a question about it was not answered."""

    status = 503
    type = "overloaded_error"
    code = "engine_busy"


class DeadEnd(EngineError):
    """No token of this model can go on from where the answer is and still keep to the request's grammar."""

    code = "grammar_dead_end"


class RequestCancelled(EngineError):
    """The caller wants no answer any more, and there was none yet."""

    code = "request_cancelled"


class RequestTimeout(EngineError):
    """The request's deadline went by before its answer was whole."""

    status = 504
    type = "timeout_error"
    code = "request_timeout"


class ClientGone(EngineError):
    """The client hung up; nobody reads this but the log."""

    status = 499
    code = "client_gone"


class QueueFull(EngineError):
    """Too many requests wait already."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class DeviceError(EngineError):
    """The device failed twice within a minute; the process should end and be started again."""

    exit_code = 70
    code = "device_failed"
