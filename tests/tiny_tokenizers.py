"""Tokenizers made in the test, with the special tokens and the chat templates of the families that people
train."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

LLAMA3 = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim"
    " + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') "
    "}}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] "
    "%}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}{% elif message['role'] == "
    "'assistant' %}"
    "{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

# How Llama 3 (and, but for the digits, Qwen 2) cuts a text into words: "\n\n" stays one, whatever follows.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA3_SPECIALS = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")
SPECIALS = {
    "llama3": [f"<|{name}|>" for name in LLAMA3_SPECIALS],
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "gemma2": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "llama2": ["<s>", "</s>"],
    "base": ["<|endoftext|>"],
}
# family -> (bos, eos, pad, template, adds BOS by itself)
FAMILIES = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>", LLAMA3, True),
    "qwen2": (None, "<|im_end|>", "<|endoftext|>", QWEN2, False),
    "gemma2": ("<bos>", "<eos>", "<eos>", GEMMA2, True),
    "llama2": ("<s>", "</s>", "</s>", LLAMA2, True),
    "base": (None, "<|endoftext|>", "<|endoftext|>", None, False),
}
END_OF_TURN = {family: eos for family, (_, eos, *_) in FAMILIES.items()} | {"gemma2": "<end_of_turn>"}


def tiny_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer (llama2: one that puts a space before a text, as SentencePiece models do) of the
    family."""
    bos, eos, pad, template, adds_bos = FAMILIES[family]
    machine = _spaced() if family == "llama2" else byte_level()
    machine.add_special_tokens(SPECIALS[family])
    if family == "gemma2":  # Gemma has runs of newlines as added tokens that are no special ones
        machine.add_tokens(["\n", "\n\n"])
    if adds_bos:
        machine.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, machine.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=machine, bos_token=bos, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ("Ġ t", "h e", "Ġt he", "i n", "Ċ Ċ", "o n", "Ġ a", "e r")
    merges = [tuple(pair.split()) for pair in pairs]
    vocabulary = {token: i for i, token in enumerate([*letters, *("".join(merge) for merge in merges)])}
    machine = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    words = pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated")
    letters_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    machine.pre_tokenizer = pre_tokenizers.Sequence([words, letters_alone])
    machine.decoder = decoders.ByteLevel()
    return machine


def _spaced() -> Tokenizer:
    vocabulary = {chr(i): i for i in range(32, 127)} | {"\n": 127, "▁": 128, "<unk>": 129}
    machine = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    machine.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    machine.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    return machine
