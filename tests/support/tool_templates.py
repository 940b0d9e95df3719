"""Chat templates that write tools in the forms of eight families, in small; and tokenisers of bytes with these families' marks.

The shapes are those of the families' public documentation: which marks stand around tools, calls and results, whether arguments
are an object or a text, which token ends a turn, and what a template rejects.
"""

from __future__ import annotations

from dataclasses import dataclass

from kapelle.environments.grading.text.tool_call import Form
from kapelle.models.light_tokenizer import LightTokenizer
from kapelle.models.renderer import ChatRenderer


@dataclass(frozen=True)
class Family:
    """One family of chat templates."""

    form: Form
    template: str
    special: tuple[str, ...]
    """Tokens that texts drop."""
    end: str
    """The token that ends a turn."""
    plain: tuple[str, ...] = ()
    """Tokens of their own that texts keep."""
    stops: str = ""
    """What ends a turn that calls, where another token does."""
    name: str = ""
    """What it is called where another family has the same form."""

    def renderer(self) -> ChatRenderer:
        """Return a renderer of this family, whose other tokens are bytes."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        raw = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = decoders.ByteLevel()
        raw.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in self.special])
        raw.add_tokens([AddedToken(each, special=False, normalized=False) for each in self.plain])
        added = raw.get_added_tokens_decoder()
        named = {"eos_token": self.end, "bos_token": ""}
        return ChatRenderer(LightTokenizer(self.form, raw, self.template, added, named), 10_000)


QWEN = Family(
    "hermes",
    """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{{ message.content }}{% for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first else '' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    ("<tool_call>", "</tool_call>"),
)

LLAMA = Family(
    "llama",
    """{%- if tools %}<|start_header_id|>system<|end_header_id|>

Environment: ipython<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ message.tool_calls[0].function.name }}", "parameters": {{ message.tool_calls[0].function.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if tools and loop.first %}Functions, or <|python_tag|> for code: {{ tools | tojson }}

{% endif %}{{ message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    "<|eot_id|>",
)

LLAMA_SMALL = Family(
    "llama",
    """{%- if tools %}<|start_header_id|>system<|end_header_id|>

Environment: ipython<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('One call at a time.') }}{% endif %}<|start_header_id|>assistant<|end_header_id|>

{{ '{"name": "' + message.tool_calls[0].function.name + '", ' }}{{ '"parameters": ' }}{{ message.tool_calls[0].function.arguments | tojson }}{{ '}' }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if tools and loop.first %}Answer with a call of one of these: {{ tools | tojson }}

{% endif %}{{ message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|eot_id|>",
    name="llama 3.2",
)

MISTRAL = Family(
    "mistral",
    """{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% if tools and message == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}
{%- if call.id | length < 9 %}{{ raise_exception('Tool call IDs should have 9 characters!') }}{% endif %}
{{- (call.function | tojson)[:-1] }}, "id": "{{ call.id[-9:] }}"}{{ '' if loop.last else ', ' }}
{%- endfor %}]</s>
{%- elif message.role == 'assistant' %}{{ message.content }}</s>
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length < 9 %}{{ raise_exception('Tool call IDs should have 9 characters!') }}{% endif %}[TOOL_RESULTS]{"content": {{ message.content }}, "call_id": "{{ message.tool_call_id[-9:] }}"}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}""",
    (*("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"), *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>")),
    "</s>",
)  # fmt: skip

_DS = {
    name: f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"
    for name in ("User", "Assistant", "end of sentence", "tool calls begin", "tool calls end", "tool call begin", "tool call end",
                 "tool sep", "tool output begin", "tool output end")
}  # fmt: skip
DEEPSEEK = Family(
    "deepseek",
    "{%- set ns = namespace(tool=false) %}{% if tools %}Tools: {{ tools | tojson }}{% endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{% set ns.tool = false %}{{ '[User]' + message['content'] + '[Assistant]</think>' }}"
    "{%- elif message['role'] == 'assistant' and message['tool_calls'] %}{{ message['content'] + '[tool calls begin]' }}"
    "{%- for call in message['tool_calls'] %}{{ '[tool call begin]' + call['function']['name'] + '[tool sep]' "
    "+ call['function']['arguments'] + '[tool call end]' }}{% endfor %}{{ '[tool calls end][end of sentence]' }}"
    "{%- elif message['role'] == 'assistant' %}{{ message['content'] + '[end of sentence]' }}"
    "{%- elif message['role'] == 'tool' %}{% set ns.tool = true %}{{ '[tool output begin]' + message['content'] + '[tool output end]' }}"
    "{%- endif %}{%- endfor %}",
    (_DS["end of sentence"],),
    _DS["end of sentence"],
    (*(each for name, each in _DS.items() if name != "end of sentence"), "</think>"),
)
for _name, _mark in _DS.items():
    object.__setattr__(DEEPSEEK, "template", DEEPSEEK.template.replace(f"[{_name}]", _mark))

GLM = Family(
    "glm",
    """[gMASK]<sop>{% if tools %}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|user|>
{{ message.content }}
{%- elif message.role == 'assistant' %}<|assistant|>{{ '\n' + message.content if message.content else '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor %}
</tool_call>
{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
    ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
    "<|endoftext|>",
    ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    stops="<|observation|>",
)

QWEN_CODER = Family(
    "qwen_coder",
    """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer with <tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{{ message.content }}{% for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first else '' }}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    ("<tool_call>", "</tool_call>"),
)

HARMONY = Family(
    "harmony",
    """{%- set ns = namespace(name=none) %}
{%- if tools %}<|start|>developer<|message|># Tools
namespace functions {{ '{' }}{% for tool in tools %} type {{ tool.function.name }} = {{ tool.function.parameters | tojson }};{% endfor %} }<|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- set ns.name = message.tool_calls[0].function.name %}<|start|>assistant<|channel|>commentary to=functions.{{ ns.name }} <|constrain|>json<|message|>{{ message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'tool' %}
{%- if ns.name is none %}{{ raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}{% endif %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
    ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    "<|return|>",
    stops="<|call|>",
)

FAMILIES = (QWEN, LLAMA, LLAMA_SMALL, MISTRAL, DEEPSEEK, GLM, QWEN_CODER, HARMONY)
