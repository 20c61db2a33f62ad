"""Every error that a user can meet.

DaskserveError
|-- RequestError              this request (or row) only; the job goes on
|   |-- InvalidParameter      a field has a value that is not allowed
|   |-- ContextOverflow       prompt + max_tokens is longer than the model's context
|   |-- NeverFits             no instance's KV pool could ever hold the request
|   |-- EngineStepFailed      the engine step that held this request raised
|   |-- DeadlineExceeded      the request was not finished in time
|   |-- Overloaded            too many requests wait already: try again later
|   |-- KilledInstance        instance after instance died while it ran this request
|   |-- AnswerDiverged        after a fault the tokens came out unlike those already sent
|   `-- RequestCancelled      the caller cancelled it
|-- KVUnavailable             a KV pull was refused, broken or too late: recompute
|-- InstanceLost              a worker died or was replaced: retried elsewhere
|-- ModelError                the model cannot be found, loaded or run exactly
|-- ClusterError              the cluster lacks what was asked of it
|-- ConfigError               a setting or an option is wrong
`-- BatchError                the batch job as a whole cannot start or go on
"""

from __future__ import annotations


class DaskserveError(Exception):
    """Base of all errors that daskserve raises on purpose."""


def _shown(value: object) -> str:
    try:
        return repr(value)
    except (RecursionError, ValueError):  # nested too deep, or an integer of too many digits
        return f"<{type(value).__name__}>"


def _cut(text: str) -> str:
    text = text if len(text) <= 80 else text[:77] + "..."
    return text.encode(errors="backslashreplace").decode()  # a field's name may hold surrogates


class RequestError(DaskserveError):
    """Fails one request; its neighbours and the service go on. ``code`` is stable for machines."""

    code = "request_error"


class InvalidParameter(RequestError):
    """A field has a value outside its limits.

    Parameters
    ----------
    field, value, limit
        What was given and what is allowed, in words: ``temperature=-1 must be 0..2``.
    """

    code = "invalid_parameter"

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{_cut(field)}={_cut(_shown(value))} {limit}")
        self.field, self.value, self.limit = field, value, limit

    def __reduce__(self) -> tuple[type[InvalidParameter], tuple[str, object, str]]:
        return (type(self), (self.field, self.value, self.limit))


class ContextOverflow(RequestError):
    code = "context_length_exceeded"


class NeverFits(RequestError):
    code = "kv_pool_too_small"


class EngineStepFailed(RequestError):
    code = "engine_step_failed"


class DeadlineExceeded(RequestError):
    code = "deadline_exceeded"


class Overloaded(RequestError):
    """Refused at the door because the queue is full; nothing was computed.

    Parameters
    ----------
    message
        Which limit was met.
    retry_after_s
        Seconds after which there may be room.
    """

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[Overloaded], tuple[str, float]]:
        return (type(self), (str(self), self.retry_after_s))


class KilledInstance(RequestError):
    """Given up so that it takes down no more instances; not to be retried."""

    code = "killed_instance"


class AnswerDiverged(RequestError):
    """A stream ends here because going on would contradict what it has sent."""

    code = "answer_diverged"


class RequestCancelled(RequestError):
    code = "cancelled"


class KVUnavailable(DaskserveError):
    """A KV pull was refused, corrupt, or too late; the prompt is computed again."""


class InstanceLost(DaskserveError):
    """The instance that held this request is gone; the request is retried elsewhere."""


class ModelError(DaskserveError):
    """The model cannot be found, loaded, or run exactly by this engine."""


class ClusterError(DaskserveError):
    """The cluster cannot do what was asked; the message says what is missing."""


class ConfigError(DaskserveError):
    """A setting or command-line option is wrong."""


class WorkloadError(DaskserveError):
    """A trace or workload is empty, unsorted or otherwise unusable for planning."""


class BatchError(DaskserveError):
    """The batch job as a whole cannot start or go on."""
