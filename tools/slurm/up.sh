#!/bin/bash
# A Slurm cluster on this machine for tests: tools/slurm/up.sh FOLDER [NODES [SETTING…]]; a setting is a line of slurm.conf.
# Everything it makes lies in FOLDER, nothing of the machine's own Slurm is touched.
# Afterwards: export SLURM_CONF=FOLDER/slurm.conf. tools/slurm/down.sh FOLDER stops it.
set -euo pipefail
S=$(realpath -m "$1"); nodes=${2:-1}; me=$(id -un); host=$(hostname -s)
export PATH=$PATH:/usr/sbin SLURM_CONF=$S/slurm.conf
mkdir -p "$S"/{ctld,spool,log}; chmod 755 "$S"
# Below the ports that outgoing connections take, or one of them may have it by the time the daemon starts.
free_port() { python3 - <<'P'
import random, socket
while True:
    with socket.socket() as s:
        try: s.bind(("", port := random.randint(10000, 30000)))
        except OSError: continue
    print(port); break
P
}

dd if=/dev/urandom of="$S/munge.key" bs=1024 count=1 status=none; chmod 400 "$S/munge.key"
munged --force --key-file="$S/munge.key" --socket="$S/munge.sock" --pid-file="$S/munged.pid" --log-file="$S/log/munged.log" --seed-file="$S/munge.seed"

cat > "$SLURM_CONF" <<C
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
AuthInfo=socket=$S/munge.sock,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
StateSaveLocation=$S/ctld
SlurmdSpoolDir=$S/spool/%n
SlurmctldPidFile=$S/slurmctld.pid
SlurmdPidFile=$S/slurmd-%n.pid
SlurmctldLogFile=$S/log/slurmctld.log
SlurmdLogFile=$S/log/slurmd-%n.log
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=10
C
for i in $(seq "$nodes"); do
    echo "NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$(free_port) CPUs=4 RealMemory=2000 State=UNKNOWN" >> "$SLURM_CONF"
done
printf '%s\n' "${@:3}" >> "$SLURM_CONF"
echo "PartitionName=main Nodes=n[1-$nodes] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8" >> "$SLURM_CONF"

slurmctld
for i in $(seq "$nodes"); do mkdir -p "$S/spool/n$i"; slurmd -N "n$i"; done
for _ in $(seq 100); do
    [ "$(sinfo -h -N -o %T 2>/dev/null | grep -c idle)" = "$nodes" ] && exit 0
    sleep 0.1
done
sinfo >&2 || true; tail -n 5 "$S"/log/*.log >&2; exit 1
