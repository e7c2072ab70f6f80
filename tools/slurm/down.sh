#!/bin/bash
# Stops exactly what tools/slurm/up.sh FOLDER started.
S=$(realpath -m "$1"); export SLURM_CONF=$S/slurm.conf
scancel -u "$(id -un)" 2>/dev/null
for _ in $(seq 50); do [ -n "$(squeue -h 2>/dev/null)" ] || break; sleep 0.2; done
for pid in "$S"/slurmd-*.pid "$S"/slurmctld.pid "$S"/munged.pid; do
    [ -s "$pid" ] && kill "$(cat "$pid")" 2>/dev/null
done
exit 0
