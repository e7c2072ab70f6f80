"""The architecture, tokenizer and chat template of the embedded models, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models
from tokenizers.decoders import Decoder
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

BOS, EOS, PAD, UNKNOWN, USER, ASSISTANT = SPECIALS = [
    "<bos>",
    "<eos>",
    "<pad>",
    "<unk>",
    "<user>",
    "<assistant>",
]

TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<user>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<assistant>' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant turns') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def tokenizer(
    words: Sequence[str], pre_tokenizer: PreTokenizer, decoder: Decoder | None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each of ``words``, and six special tokens."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *words])}
    machine = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    machine.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        machine.decoder = decoder
    machine.add_special_tokens(SPECIALS)
    made = PreTrainedTokenizerFast(
        tokenizer_object=machine,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        extra_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )
    made.chat_template = TEMPLATE
    return made


def architecture(tokens: PreTrainedTokenizerFast) -> LlamaConfig:
    """Return the configuration of a Llama of 0.6 million parameters. Its heads have size 32, the smallest
    that vLLM's CPU attention accepts. The head is not tied to the embedding, so that a checkpoint holds every
    weight by name."""
    return LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )


def write_blank(folder: Path, tokens: PreTrainedTokenizerFast) -> None:
    """Write the folder from which a run with ``model.from_config=true`` starts."""
    config = architecture(tokens)
    tokens.save_pretrained(folder)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
