"""What the server will not or cannot do: one exception for a client's request, and the meaning of an engine's `ERR`.

Source   docs/configuration.md for the limits; the status table is that of the OpenAI and Anthropic interfaces
"""

from __future__ import annotations

TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "forbidden",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "model_busy",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported",
    502: "structured_output_failed",
    503: "server_error",
    507: "server_error",
}

# The start of an engine's refusal and whose fault it is: the client's request (400) or a line this server should
# never have sent (500). What is in neither list is the engine's trouble: 503.
_CLIENT_ERRORS = ("bad request", "a token id is outside the vocabulary", "this engine was started without --vision")
_SERVER_ERRORS = ("expected", "BGEN: no such free slot")
_CONTEXT_ERROR = "exceeds the context"


class Refused(Exception):
    """A request that the server will not or cannot serve.

    `status` is the HTTP status, `type` follows from it; `param` names the field at fault, `code` is a word for
    programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers: dict[str, str] = {}

    @property
    def type(self) -> str:
        return TYPE_OF_STATUS.get(self.status, "server_error")

    def body(self) -> dict[str, dict[str, str]]:
        error = {"type": self.type, "message": self.message}
        if self.param is not None:
            error["param"] = self.param
        if self.code is not None:
            error["code"] = self.code
        return {"error": error}


def failure() -> Refused:
    """A bug here; what it was is in the log."""
    return Refused(500, "the server failed on this request; its log says why")


def bad_request(message: str, param: str | None = None) -> Refused:
    return Refused(400, message, param=param)


def status_of_err(text: str) -> int:
    """The HTTP status of an engine's `ERR` line."""
    if _CONTEXT_ERROR in text or text.startswith(_CLIENT_ERRORS):
        return 400
    if text.startswith(_SERVER_ERRORS):
        return 500
    return 503
