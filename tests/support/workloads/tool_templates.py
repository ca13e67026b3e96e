"""Chat templates that write calls of functions as models in use do, cut down to that part."""

from __future__ import annotations

from shared.workloads.data.chat_template import ChatTemplate

_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALL = (
    '{"name": "{{ c.function.name }}", "KEY": {{ c.function.arguments | tojson }}'
    "{% if c.id and IDS %}, "
    '"id": "{{ c.id }}"{% endif %}}'
)


def _template(calls: str) -> ChatTemplate:
    source = (
        f"{_TOOLS}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n"
        f"{{% if m.tool_calls %}}{calls}{{% else %}}{{{{ m.content }}}}{{% endif %}}<|im_end|>\n"
        f"{{% endfor %}}{_PROMPT}"
    )
    return ChatTemplate(source, eos_token="<|im_end|>")


def _call(key: str, ids: bool = False) -> str:
    return _CALL.replace("KEY", key).replace("IDS", str(ids).lower())


# of Hermes and Qwen, of Llama 3, of Mistral
HERMES = _template(
    "{% for c in m.tool_calls %}{{ '' if loop.first else '\n' }}<tool_call>\n"
    + _call("arguments")
    + "\n</tool_call>{% endfor %}"
)
LLAMA = _template(
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call a turn') }}{% endif %}"
    "{% set c = m.tool_calls[0] %}" + _call("parameters")
)
MISTRAL = _template(
    "[TOOL_CALLS] [{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}"
    + _call("arguments", ids=True)
    + "{% endfor %}]"
)
XML = _template("{% for c in m.tool_calls %}<function={{ c.function.name }}>{% endfor %}")
END = "<|im_end|>\n"
EVERY = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
