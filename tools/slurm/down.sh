#!/bin/bash
# Stops exactly what tools/slurm/up.sh FOLDER started.
S=$(realpath -m "$1"); export SLURM_CONF=$S/slurm.conf
scancel -u "$(id -un)" 2>/dev/null; sleep 0.5
for pid in "$S"/slurmd-*.pid "$S"/slurmctld.pid "$S"/munged.pid; do
    [ -s "$pid" ] && kill "$(cat "$pid")" 2>/dev/null
done
exit 0
