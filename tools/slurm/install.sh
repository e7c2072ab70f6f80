#!/bin/bash
# Installs what tools/slurm/up.sh needs, where apt can and one may. Anywhere else it does nothing, and the Slurm tests skip.
set -eu
command -v slurmctld >/dev/null && command -v munged >/dev/null && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "no Slurm here and no way to install it: its tests will skip"; exit 0; }
policy=/usr/sbin/policy-rc.d    # the packages' own daemons stay down: up.sh starts its own, elsewhere
[ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' > $policy; chmod +x $policy; trap 'rm -f $policy' EXIT; }
apt-get update -qq || true
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null \
    || echo "slurm-wlm could not be installed: its tests will skip"
