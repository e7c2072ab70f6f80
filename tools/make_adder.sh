#!/usr/bin/env bash
# Makes everything in assets/adder again, with this project's own trainer: about 10 minutes on 2 CPU cores.
#
#   model/            the policy of the embedded task: fine-tuned on noisy demonstrations, right about half the time
#   pairs.jsonl       the preference set: best against worst of 8 samples of another checkpoint (other demonstrations, other seed)
#   eval_pairs.jsonl  the same of held-out prompts
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
ASSETS=assets/adder
RUNS=runs/make_adder  # as the model's README will name it: the same on every machine
git diff --quiet HEAD || { echo "commit your changes first: the model's README names the commit that made it" >&2; exit 1; }

sft() {  # name of the demonstrations and of the run, seed
    "$PYTHON" train.py loss=sft model=adder-init model.name_or_path="$RUNS/blank" data=adder-sft data.subset="$1" \
        seed="$2" exp_name="$1" runs_dir="$RUNS" model.batch_size=128 scheduler=cosine min_lr_ratio=0.05 eps=1e-8 overwrite=true wandb.enabled=false
}

# Nothing that git knows changes before both models are trained.
"$PYTHON" -m tools.make_adder blank "$RUNS/blank"
sft policy 1
sft sampler 2
"$PYTHON" -m tools.make_adder pairs "$RUNS/sampler" $ASSETS
cp "$RUNS"/policy/model/* $ASSETS/model/
