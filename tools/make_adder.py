"""Two of the steps of tools/make_adder.sh, which makes the embedded assets.

python -m tools.make_adder blank FOLDER        # architecture, tokenizer and chat template of the embedded model, no weights
python -m tools.make_adder pairs RUN FOLDER    # pairs.jsonl and eval_pairs.jsonl, sampled from a run's model
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from statistics import fmean

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from common.options import options_of
from config.schema_data import DataConfig
from config.schema_model import ModelConfig
from config.sections import with_defaults
from data import adder
from data.chat import Renderer, make_renderer
from data.groups import write_groups
from data.types import Completion, Group, Prompt
from data.views import best_and_worst
from models.distributed import start
from models.pretrained import load_policy, load_tokenizer
from rollouts.embedded import EmbeddedSampler
from rollouts.samplers import Sample, SamplingSettings

SPECIALS = ("<bos>", "<eos>", "<pad>", "<unk>", "<user>", "<assistant>")
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<user>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<assistant>' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant turns') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def blank(folder: Path) -> None:
    """Write the folder from which a run with ``model.from_config=true`` starts: a tokenizer with one token
    per character, and a Llama of 0.6 million parameters. Its heads have size 32, the smallest that vLLM's CPU
    attention accepts. The head is not tied to the embedding, so that a checkpoint holds every weight by
    name."""
    tokens = tokenizer("0123456789+=;")
    config = LlamaConfig(
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
    for part in (tokens, config, GenerationConfig.from_model_config(config)):
        part.save_pretrained(folder)


def tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character, six special tokens, and the chat template."""
    bos, eos, pad, unknown, *roles = SPECIALS
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *characters])}
    machine = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    machine.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    machine.decoder = decoders.Fuse()
    machine.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=machine,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token=unknown,
        extra_special_tokens=roles,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
        chat_template=TEMPLATE,
    )


# The preference set: best against worst of 8 samples (paper, Algorithm 1 and C.1)

SETTINGS = SamplingSettings(temperature=0.7, top_p=0.95, max_tokens=32)
SAMPLES, THRESHOLD, SEED = 8, 0.01, 0
PAIRS = {"train": ("pairs.jsonl", 2560), "eval": ("eval_pairs.jsonl", 256)}
CONTEXTS_AT_ONCE = 512


def pairs(run: str, folder: Path) -> None:
    """Write the pairs of both splits. Prompts come in the order of their ids, which is unrelated to their
    numbers."""
    config = with_defaults(
        ModelConfig, name="sampler", name_or_path=run, dtype="float32", max_length=64, max_prompt_length=16
    )
    data = with_defaults(DataConfig, name="adder", source="data.adder.adder_pairs")
    world, renderer = start(), make_renderer(load_tokenizer(config), config, data)
    sampler = EmbeddedSampler(load_policy(config, world.device), renderer, world, batch_size=1024)
    for split, (name, wanted) in PAIRS.items():
        groups = list(islice(sampled_pairs(sampler, renderer, adder.prompts(split)), wanted))
        write_groups(folder / name, groups)
        best, worst = (fmean(group.rewards[i] for group in groups) for i in (0, 1))
        print(f"{folder / name}: {len(groups)} pairs, mean reward {best:.2f} against {worst:.2f}")


def sampled_pairs(
    sampler: EmbeddedSampler, renderer: Renderer, prompts: tuple[Prompt, ...]
) -> Iterator[Group]:
    """Yield a pair of each prompt, best first. Prompts whose samples' rewards differ by less than THRESHOLD
    have none. Pairs are stored as text, on which any model can be trained, so a sample whose tokens differ
    from those of its text is left out."""
    left = iter(prompts)
    while contexts := list(islice(left, CONTEXTS_AT_ONCE)):
        for prompt, samples in zip(contexts, sampler.sample(contexts, SAMPLES, SETTINGS, SEED), strict=True):
            texts = list(chain.from_iterable(as_text(renderer, prompt, sample) for sample in samples))
            answers = [prompt.reference_answer] * len(texts)
            rewards = [r for r in adder.rewards([c.text or "" for c in texts], answers) if r is not None]
            if ends := best_and_worst(Group(prompt, tuple(texts), tuple(rewards)), THRESHOLD):
                yield Group(prompt, tuple(texts[i] for i in ends), tuple(rewards[i] for i in ends))


def as_text(renderer: Renderer, prompt: Prompt, sample: Sample) -> Iterator[Completion]:
    """Yield the sample as text, where that has its tokens."""
    sampled = sample.completion(renderer)
    text = Completion(text=sampled.text, finished=sampled.finished)
    row = renderer.sequence(prompt, text)
    if not isinstance(row, str) and tuple(row.completion_ids.tolist()) == sample.token_ids:
        yield text


def main() -> None:
    parser = options_of("python -m tools.make_adder", __doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("blank").add_argument("folder", type=Path)
    step = steps.add_parser("pairs")
    step.add_argument("run")
    step.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.step == "blank":
        blank(options.folder)
    else:
        pairs(options.run, options.folder)


if __name__ == "__main__":
    main()
