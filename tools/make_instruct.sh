#!/usr/bin/env bash
# Makes assets/instruct/model again, with this project's own trainer: about 20 minutes on one CPU core; and its answers to the prompts that
# are trained on, own.jsonl.gz. The authors' stories are written when they are read (data/stories.py).
#
#   tools/make_instruct.sh                          # the embedded model
#   tools/make_instruct.sh kitchen.yaml kitchen-model table   # of another language, pre-trained on its author table; run: kitchen-model-run/
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
LANGUAGE=${1:-assets/instruct/language.yaml}
MODEL=${2:-assets/instruct/model}
if [ $# -eq 0 ]; then
    RUNS=runs/make_instruct  # as the model's README will name it: the same on every machine
    OWN=()
    git diff --quiet HEAD || { echo "commit your changes first: the model's README names the commit that made it" >&2; exit 1; }
else
    RUNS=$MODEL-run
    OWN=(model.name=own data.instruct.language="$LANGUAGE" data.subset="${3:-base}" data.verifier=null)
fi

"$PYTHON" -m tools.make_instruct --language "$LANGUAGE" blank "$RUNS/blank"
OMP_NUM_THREADS=1 "$PYTHON" train.py loss=sft model=instruct-init model.name_or_path="$RUNS/blank" data=instruct-sft seed=1 exp_name=base \
    runs_dir="$RUNS" model.batch_size=64 n_epochs=2 scheduler=cosine min_lr_ratio=0.05 eps=1e-8 overwrite=true wandb.enabled=false ${OWN[@]+"${OWN[@]}"}
mkdir -p "$MODEL"
cp "$RUNS"/base/model/* "$MODEL"/
if [ $# -eq 0 ]; then
    "$PYTHON" sample.py model=instruct data=instruct rounds.samples=4 sampler.batch_size=1024 seed=1 out="$RUNS/own-samples.jsonl" overwrite_out=true
    "$PYTHON" label.py in="$RUNS/own-samples.jsonl" reward=instruct rounds.feedback=group out="$RUNS/own-groups.jsonl" overwrite_out=true
    "$PYTHON" -m tools.make_instruct texts "$RUNS/own-groups.jsonl" assets/instruct/own.jsonl.gz
fi
