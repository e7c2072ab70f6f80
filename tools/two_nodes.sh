#!/usr/bin/env bash
# Two nodes on one machine, by torchrun and gloo, each with a rank and with a vLLM engine on its CPU that samples a share of each round:
#   tools/two_nodes.sh /tmp/two-nodes
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1 python=.venv/bin/python settings=(loss=dpo online=true humanline=true sampler=vllm model.dtype=float32 reward=adder
    rounds.contexts=32 rounds.contexts_per_round=16 rounds.samples=4 n_eval_prompts=8 wandb.enabled=false report=false
    "runs_dir=$1/runs" "cache_dir=$1/cache" exp_name=two overwrite=true)
mkdir -p "$out"
trap 'kill $(jobs -p) 2>/dev/null' EXIT
for node in 0 1; do
    rm -f "$out/addresses.$node"
    $python -m jobs.serve --ready "$out/addresses.$node" "${settings[@]}" >"$out/server.$node" 2>&1 &
done
until [ -e "$out/addresses.0" ] && [ -e "$out/addresses.1" ]; do sleep 1; jobs %1 %2 >/dev/null; done
urls=$(cat "$out"/addresses.? | paste -sd,)
port=$($python -c 'from common.ports import free_port; print(free_port())')
for node in 1 0; do
    $python -m torch.distributed.run --nnodes 2 --node-rank $node --nproc-per-node 1 --master-addr 127.0.0.1 --master-port "$port" \
        train.py "${settings[@]}" "sampler.urls=[$urls]" >"$out/node.$node" 2>&1 & runs[node]=$!
done
wait "${runs[0]}" && wait "${runs[1]}" || { tail "$out"/node.?; exit 1; }
$python - "$out" <<'END'
import json, sys
from pathlib import Path

for file in sorted(Path(sys.argv[1]).glob("runs/two/rounds/*/round.json")):
    said = json.loads(file.read_text())
    keys = ("sampler_engines", "sampler_workers", "weight_transfer", "probe_mean", "kept", "steps")
    print(file.parent.name, {key: said.get(key) for key in keys})
END
