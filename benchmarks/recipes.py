"""The shipped recipes on numbers of GPUs: whether they fit, what the memory plan chooses, and how fast they
would be at usual shares of the peak. Nothing is measured: it needs no GPU and no network.

    python -m benchmarks.recipes                       # every recipe, as docs/performance.md has it
    python -m benchmarks.recipes --only 'dpo-*' --on 8xB200

Rows are as long as the recipe lets them be, and prompts are not shared. Recipes whose steps take the same
memory are one line: with and without humanline, and with other samples or learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from benchmarks.floor import floor, forward
from common.options import options_of
from config.schema import Config
from config.schema_model import SELECTIVE
from config.schema_plan import card_memory
from data.balance import row_tokens
from data.views import mismatched
from launch.composing import compose_config
from launch.estimate import PEAK
from launch.grid import CONFIG_DIR
from memory.parts import Card
from memory.plan import MemoryPlan, make_plan
from memory.simulate import MemoryNeed, MemoryRequest, answer
from models.shapes import architecture
from trainers.assembly import longest_batch, trainer_class

ON = ("1xH100", "1xH200", "4xH100", "8xH100", "16xH100")
SHARES = (0.30, 0.45)
"""Of the card's peak: what training frameworks publish lies between them."""
REPEATED = {False: 0.0, SELECTIVE: 0.5, True: 1.0}
"""Share of the blocks' products that are computed again, by activation checkpointing."""


def recipes() -> dict[str, list[str]]:
    """Return the recipe that stands for each line of the table -> the names of all recipes of the line."""
    alike: dict[Any, list[str]] = {}
    for name in sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("[!_]*.yaml")):
        alike.setdefault(of_memory(compose_config([f"experiment={name}"])), []).append(name)
    return {next((n for n in names if "humanline" in n), names[-1]): names for names in alike.values()}


def of_memory(config: Config) -> Any:
    """Return what the memory of a recipe's steps depends on."""
    lengths = (config.model.max_prompt_length, config.model.max_length, config.max_tokens * config.online)
    held = (config.keeps_reference, config.loss.get("kl_anchor"))
    return config.model.name, config.loss["name"], config.online, lengths, config.model.batch_size, held


@dataclass(frozen=True)
class PlannedRecipe:
    """A recipe on some GPUs."""

    plan: MemoryPlan
    operations: float
    """of a token that is trained on"""

    def text(self, card: str) -> str:
        if self.plan.over:
            return "no"
        way = {False: "none", SELECTIVE: "selective", True: "full"}[self.plan.checkpointing]
        low, high = rates(self.operations, self.plan.ranks, card)
        return f"{way}, {self.plan.answer.tokens:,} tokens; {low:,.0f} to {high:,.0f}"


def rates(operations: float, ranks: int, card: str) -> tuple[float, float]:
    """Return the tokens a second that ``ranks`` train at SHARES of the peak, to three figures."""
    low, high = (float(f"{ranks * PEAK[card] * share / operations:.3g}") for share in SHARES)
    return low, high


def operations_of(config: Config, way: bool | str) -> float:
    """Return the operations for a token of the longest rows: those of benchmarks.floor, with one scoring by
    the reference, and what activation checkpointing repeats."""
    batch = longest_batch(config, trainer_class(config), config.model.batch_size)
    if config.loss["name"] == "kto":
        batch = mismatched(batch, config.model.max_length)
    rows = [row for example in batch for row in example.rows]
    other = [example.mismatched for example in batch if example.mismatched is not None]
    hf_config = architecture(config.model)
    once = forward(hf_config, rows)
    again = REPEATED[way] * once.body + (way is True) * once.attention
    return (floor(hf_config, rows, other).scored + again) / sum(map(row_tokens, batch))


def planned(
    config: Config, ranks: int, card: str, ask: Callable[[MemoryRequest], MemoryNeed]
) -> PlannedRecipe:
    """Return the recipe's plan for so many GPUs of a kind."""
    trainer = trainer_class(config)
    sizes = config.model.batch_size, config.model.eval_batch_size
    batch, held = (longest_batch(config, trainer, size) for size in sizes)
    hf_config, on = architecture(config.model), Card(card, card_memory("--on", card))
    plan = make_plan(MemoryRequest(config, batch, held, ranks, True, hf_config), hf_config, on, ask)
    return PlannedRecipe(plan, operations_of(config, plan.checkpointing))


def remembering() -> Callable[[MemoryRequest], MemoryNeed]:
    """Return ``memory.simulate.answer`` with a memory: a step takes the same offline and online, and with any
    loss, whose own numbers, a few for each completion token, are small beside a layer's."""
    known: dict[str, MemoryNeed] = {}

    def ask(asked: MemoryRequest) -> MemoryNeed:
        config, tokens = asked.config, sum(map(row_tokens, asked.batch))
        model = replace(config.model, batch_size=1, max_grad_norm=1.0)
        key = repr((model, of_memory(config)[-1], asked.ranks, bool(asked.held_out), tokens))
        if key not in known:
            known[key] = answer(asked)
        return known[key]

    return ask


def table(only: str, on: Iterable[str]) -> Iterable[str]:
    """Yield the lines of the table, as they are found."""
    places = [(int(count), card) for count, card in (place.split("x", 1) for place in on)]
    yield f"| recipe | {' | '.join(f'{count} {card}' for count, card in places)} |"
    yield "|---" * (1 + len(places)) + "|"
    ask = remembering()
    for name, names in recipes().items():
        if any(fnmatch(each, only) for each in names):
            config = compose_config([f"experiment={name}"])
            cells = [planned(config, ranks, card, ask).text(card) for ranks, card in places]
            yield f"| {', '.join(f'`{each}`' for each in names)} | {' | '.join(cells)} |"


def main() -> None:
    parser = options_of("python -m benchmarks.recipes", __doc__)
    parser.add_argument("--only", default="*", help="recipes by pattern")
    parser.add_argument("--on", nargs="+", default=ON, help="number of GPUs and kind, as in 8xH100")
    args = parser.parse_args()
    for line in table(args.only, args.on):
        print(line, flush=True)


if __name__ == "__main__":
    main()
