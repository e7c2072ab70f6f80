"""Two of the steps of tools/make_adder.sh, which makes the embedded assets.

python -m tools.make_adder blank FOLDER        # architecture, tokenizer and chat template of the embedded model, no weights
python -m tools.make_adder pairs RUN FOLDER    # pairs.jsonl and eval_pairs.jsonl, sampled from a run's model
"""  # noqa: E501

from __future__ import annotations

from itertools import islice
from pathlib import Path
from statistics import fmean

from tokenizers import Regex, decoders, pre_tokenizers

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
from tools.blank_model import tokenizer, write_blank

CHARACTERS = "0123456789+=;"


def blank(folder: Path) -> None:
    """Write the blank model, whose tokenizer has one token per character."""
    write_blank(
        folder,
        tokenizer(CHARACTERS, pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()),
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
    world = start()
    renderer = make_renderer(
        load_tokenizer(config),
        config,
        with_defaults(DataConfig, name="adder", source="data.adder.adder_pairs"),
    )
    sampler = EmbeddedSampler(load_policy(config, world.device), renderer, world, batch_size=1024)
    for split, (name, wanted) in PAIRS.items():
        groups = sampled_pairs(sampler, renderer, adder.prompts(split), wanted)
        write_groups(folder / name, groups)
        best, worst = (fmean(group.rewards[i] for group in groups) for i in (0, 1))
        print(f"{folder / name}: {len(groups)} pairs, mean reward {best:.2f} against {worst:.2f}")


def sampled_pairs(
    sampler: EmbeddedSampler, renderer: Renderer, prompts: tuple[Prompt, ...], wanted: int
) -> list[Group]:
    """Return the first ``wanted`` pairs, from as many prompts as necessary; a prompt whose samples' rewards
    differ by less than 0.01 has none."""
    groups: list[Group] = []
    left = iter(prompts)
    while len(groups) < wanted and (contexts := list(islice(left, CONTEXTS_AT_ONCE))):
        for prompt, samples in zip(contexts, sampler.sample(contexts, SAMPLES, SETTINGS, SEED), strict=True):
            groups.extend(_pair(renderer, prompt, samples))
    return groups[:wanted]


def _pair(renderer: Renderer, prompt: Prompt, samples: list[Sample]) -> list[Group]:
    """Return the group of two that the samples give, best first, or nothing. Pairs are stored as text, on
    which any model can be trained, so a sample whose tokens differ from those of its text is left out."""
    made = [(sample, sample.completion(renderer)) for sample in samples]
    texts = [
        Completion(text=c.text, finished=c.finished)
        for sample, c in made
        if _is_text(renderer, prompt, sample, c)
    ]
    rewards = adder.rewards([c.text or "" for c in texts], [prompt.reference_answer] * len(texts))
    scored = Group(prompt, tuple(texts), tuple(r for r in rewards if r is not None))
    ends = best_and_worst(scored, THRESHOLD)
    return (
        []
        if ends is None
        else [Group(prompt, tuple(texts[i] for i in ends), tuple(scored.rewards[i] for i in ends))]
    )


def _is_text(renderer: Renderer, prompt: Prompt, sample: Sample, completion: Completion) -> bool:
    row = renderer.sequence(prompt, Completion(text=completion.text, finished=completion.finished))
    return not isinstance(row, str) and tuple(row.completion_ids.tolist()) == sample.token_ids


def main() -> None:
    parser = options_of("python -m tools.make_adder", __doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("blank").add_argument("folder", type=Path)
    step = steps.add_parser("pairs")
    step.add_argument("run")
    step.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.step == "blank":
        blank(given.folder)
    else:
        pairs(given.run, given.folder)


if __name__ == "__main__":
    main()
