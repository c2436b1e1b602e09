"""Chat templates in the manner of several families, and tokenizers for them that are made here."""

from contextlib import contextmanager

from flower_app.tasks.chat_renderer import make_renderer
from flower_app.tasks.chat_template import CHATML
from flower_app.tasks.generated.generator import generate

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}'
    "{%- endif %}{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{{- 'Today Date: ' + date_string + '\n\n' }}"
    "{{- system_message }}{{- '<|eot_id|>' }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + "
    "' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token}}{% endif %}"
    "{% endfor %}"
)
QWEN3 = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}{%- set ns = namespace(last_query_index=messages|length - 1) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last_query_index = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{{- '<|im_start|>user\n' + message.content + "
    "'<|im_end|>\n' }}{%- elif message.role == 'assistant' %}{%- set content = message.content %}"
    "{%- set reasoning_content = '' %}{%- if message.reasoning_content is string %}"
    "{%- set reasoning_content = message.reasoning_content %}{%- else %}{%- if '</think>' in content %}"
    "{%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}{%- endif %}"
    "{%- if loop.index0 > ns.last_query_index %}{{- '<|im_start|>assistant\n<think>\n' + "
    "reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{%- else %}"
    "{{- '<|im_start|>assistant\n' + content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "smollm2": SMOLLM2,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
}
MARKED = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == "
    "'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": LLAMA3.replace(
        "{{- message['content'] | trim + '<|eot_id|>' }}",
        "{%- if message['role'] == 'assistant' %}{%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}"
        "{%- endgeneration %}{%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}",
    ),
    "mistral": MISTRAL.replace(
        "{{ ' ' + message['content'] + eos_token}}",
        "{% generation %}{{ ' ' + message['content'] + eos_token}}{% endgeneration %}",
    ),
    "qwen3": QWEN3.replace(
        "{{- '<|im_start|>assistant\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + "
        "content.lstrip('\n') }}{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
        "{{- '<|im_end|>\n' }}{%- endif %}",
        "{{- '<|im_start|>assistant\n' }}{%- generation %}{{- '<think>\n' + reasoning_content.strip('\n') + "
        "'\n</think>\n\n' + content.lstrip('\n') + '<|im_end|>\n' }}{%- endgeneration %}{%- else %}"
        "{{- '<|im_start|>assistant\n' }}{%- generation %}{{- content + '<|im_end|>\n' }}{%- endgeneration %}"
        "{%- endif %}{%- endif %}",
    ),
}
"""Templates that mark what the model writes; of chatml as of TRL's own, without the last line feed."""
_SPECIAL = {
    "chatml": ("<|endoftext|>", "<|im_end|>", ["<|im_start|>", "<|im_end|>"]),
    "smollm2": ("<|im_start|>", "<|im_end|>", ["<|im_start|>", "<|im_end|>"]),
    "llama3": ("<|begin_of_text|>", "<|end_of_text|>", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    "gemma": ("<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "mistral": ("<s>", "</s>", ["[INST]", "[/INST]"]),
    "qwen3": ("<|endoftext|>", "<|im_end|>", ["<|im_start|>", "<|im_end|>"]),
}
"""Mark of the beginning and of the end, and a template's own."""
TALKS = (
    [{"role": "user", "content": "The dog sleeps?"}, {"role": "assistant", "content": "It barked."}],
    [
        {"role": "user", "content": "Who reads?"},
        {"role": "assistant", "content": "The king, zwölf Bücher."},
        {"role": "user", "content": "And the queen?\n"},
        {"role": "assistant", "content": "  She writes 3 letters.\n"},
        {"role": "user", "content": "Why"},
        {"role": "assistant", "content": "\n\nBecause ..."},
    ],
    [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
    ],
    [
        {"role": "user", "content": "Think"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nDone."},
        {"role": "user", "content": "Again"},
        {"role": "assistant", "content": "<think>\nhm hm\n</think>\n\nDone, too."},
    ],
)
"""Conversations without a system's message, which some templates refuse."""


def chat_tokenizer(name, template=None):
    """Give the library's tokenizer of a template: a byte-level BPE that is trained here."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    begin, end, own = _SPECIAL[name]
    special = list(dict.fromkeys([begin, end, *own]))
    backend = Tokenizer(BPE())
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), Decoder()
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator((text for text, _ in generate(300, "train", 0)), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=end, pad_token=end)
    tokenizer.chat_template = TEMPLATES[name] if template is None else template
    return tokenizer


def dated(template):
    """Write a run's date where a template asks for today's."""
    return template.replace('strftime_now("%d %b %Y")', "'31 Jan 2026'")


@contextmanager
def rendered_here(header):
    """Answer as the program that renders does, in this process: fast tests start none."""
    yield make_renderer(**header)


def save_chat_model(folder, name="chatml", template=None, positions=128):
    """Save a tiny LLaMA with the tokenizer of a template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = chat_tokenizer(name, template)
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)
    torch.manual_seed(0)
    marks = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=positions, **size, **marks)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def own_chat(folder, name="chatml", template=None, chosen="", day="2026-01-31", trains_all=False):
    """Give the task's template and tokenizer of what :func:`chat_tokenizer` makes."""
    from flower_app.tasks.chat_template import ChatTemplate
    from flower_app.tasks.tokenizer import load_tokenizer

    chat_tokenizer(name, template).save_pretrained(folder)
    chat = ChatTemplate.chosen(load_tokenizer(str(folder), complete=False), chosen, day)
    with chat.renderer() as render:
        return chat.checked(render, gets_marks=False, needs_marks=bool(chosen) and not trains_all)
