"""Chat templates: Jinja programs that write a list of messages as one prompt.

The environment is the one that `transformers` documents for templates (trim_blocks, lstrip_blocks,
break/continue, tojson, raise_exception, strftime_now, the generation tag;
https://huggingface.co/docs/transformers/chat_templating_writing) and gives the same text. It is made here
since importing theirs takes a second. Templates come with models, so they run in Jinja's sandbox and see
plain data only.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from piecework.errors import ModelError, RequestError
from piecework.tokenizer.messages import read_messages, read_tools, read_variables

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """One template, or several by name: `tool_use` is taken where tools are given, else `default`."""

    def __init__(self, template: str | Mapping[str, str], variables: Mapping[str, Any]) -> None:
        """`variables` are what templates may use beside the arguments of `render`, such as `bos_token`.

        Raises:
            ModelError: there are several templates, but none is `default`.
        """
        self._sources = {"default": template} if isinstance(template, str) else dict(template)
        if "default" not in self._sources:
            names = ", ".join(self._sources)
            raise ModelError(f"chat_template has no 'default' among its templates ({names}); give one")
        self._variables = dict(variables)
        self._compiled: dict[str, Template] = {}
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt. `variables` go to the template as they are, before the model's own.

        Raises:
            RequestError: a message or tool is malformed, or the template refuses the chat.
            ModelError: the template is no valid Jinja.
        """
        from jinja2.exceptions import TemplateError

        arguments = {
            "documents": None,
            **self._variables,
            **read_variables(variables),
            "messages": read_messages(messages),
            "tools": read_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        template = self.compile("tool_use" if tools and "tool_use" in self._sources else "default")
        try:
            return template.render(**arguments)
        except TemplateError as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RequestError(
                f"the chat template can't be filled with these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error

    def compile(self, name: str = "default") -> Template:
        """Return a compiled template; raise ModelError where it is no valid Jinja."""
        from jinja2.exceptions import TemplateSyntaxError

        with self._lock:
            if name not in self._compiled:
                try:
                    self._compiled[name] = _environment().from_string(self._sources[name])
                except TemplateSyntaxError as error:
                    raise ModelError(
                        f"chat_template is no valid template: line {error.lineno}: {error}"
                    ) from error
            return self._compiled[name]


def _environment() -> ImmutableSandboxedEnvironment:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationTag(Extension):
        """`{% generation %}` marks what the model itself writes; it matters for training only."""

        tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class PublicNamespace(Namespace):
        """A namespace without underscored names, which could lead out of the sandbox."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            Namespace.__init__(*args, **kwargs)
            for name in dict(*args[1:], **kwargs):
                _refuse_private(name)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    def _refuse_private(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r}")

    def raise_exception(message: object) -> None:
        raise jinja2.exceptions.TemplateError(str(message))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
        "namespace": PublicNamespace,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
