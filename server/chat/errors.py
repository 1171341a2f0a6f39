"""What the text side refuses. The message is one line for the client; the API answers it with 400."""

from __future__ import annotations


class RequestError(ValueError):
    """The client asked for something that cannot be served; the message names the field and the limit."""


class TemplateError(RequestError):
    """Messages, tools or template arguments that do not make a prompt, or a template that fails on them."""


class VocabularyError(ValueError):
    """A pack whose tokenizer data cannot be used; the message names the file, the key and the reason."""
