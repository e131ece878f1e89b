#!/usr/bin/env bash
# Slurm with four nodes on this machine, for the end-to-end tests: on Debian as root, without an init system. `slurm.sh up` installs slurm-wlm
# and munge where they are missing, and starts a controller and the nodes n1 to n4 (two processors each) in a folder of its own, whose
# slurm.conf SLURM_CONF is to name; exit code 77: Slurm cannot be had here, and why. `slurm.sh node NAME` starts the daemon of one node
# again. `slurm.sh down` stops what `up` has started. A cluster that somebody else has set up is not touched.
set -euo pipefail
state=${COTERIE_SLURM:-${TMPDIR:-/tmp}/coterie-slurm}
port=${COTERIE_SLURM_PORT:-17000}
cannot() { echo "no Slurm: $1" >&2; exit 77; }

mkdir -p "$state"
state=$(realpath "$state")
export SLURM_CONF=$state/slurm.conf
node() { rm -f "$state/$1.pid"; slurmd -D -N "$1" >>"$state/$1.out" 2>&1 </dev/null & echo $! >"$state/$1.pid"; }
case ${1:-up} in
  node) node "$2"; exit 0 ;;
  down)
    for file in "$state"/*.pid; do [ -e "$file" ] && kill "$(cat "$file")" 2>/dev/null || true; done
    for file in "$state"/*.pid; do
      [ -e "$file" ] || continue
      for _ in $(seq 50); do kill -0 "$(cat "$file")" 2>/dev/null || break; sleep 0.2; done
      kill -9 "$(cat "$file")" 2>/dev/null || true
    done
    rm -rf "$state"
    exit 0 ;;
esac
[ "$(id -u)" = 0 ] || cannot "only root could start it"
if ! { command -v slurmctld && command -v slurmd && command -v munged; } >/dev/null; then
  command -v apt-get >/dev/null || cannot "slurmctld is not installed, and this is no Debian"
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge; } >"$state/apt.log" 2>&1 \
    || cannot "apt-get cannot install slurm-wlm and munge: see $state/apt.log"
fi
[ -e "$SLURM_CONF" ] && sinfo >/dev/null 2>&1 && exit 0
# MUNGE wants to own all folders above its socket, or root to own them, and a key that nobody else reads.
munge=$state/munge
mkdir -p "$munge" && chmod 755 "$state" "$munge"
head -c 1024 /dev/urandom >"$munge/key" && chmod 400 "$munge/key"
chown -R munge "$munge"
setpriv --reuid=munge --regid=munge --clear-groups munged -F --force --socket="$munge/socket" --key-file="$munge/key" --log-file="$munge/log" \
  --pid-file="$munge/pid" --seed-file="$munge/seed" >"$state/munged.out" 2>&1 </dev/null &
echo $! >"$state/munged.pid"
host=$(hostname -s)
cat >"$SLURM_CONF" <<END
ClusterName=coterie
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$munge/socket
CredType=cred/munge
StateSaveLocation=$state/state
SlurmdSpoolDir=$state/spool-%n
SlurmctldPidFile=$state/slurmctld.own
SlurmdPidFile=$state/slurmd-%n.own
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,requeue_delay=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=0
KillWait=8
MinJobAge=300
SlurmdTimeout=10
SlurmctldTimeout=10
TreeWidth=50
NodeName=n[1-4] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 4))] CPUs=2 RealMemory=6000
PartitionName=low Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=0
PartitionName=high Nodes=ALL MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
END
mkdir -p "$state/state"
for _ in $(seq 50); do [ -S "$munge/socket" ] && break; sleep 0.1; done
slurmctld -D >"$state/slurmctld.out" 2>&1 </dev/null &
echo $! >"$state/slurmctld.pid"
for name in n1 n2 n3 n4; do node "$name"; done
for _ in $(seq 150); do
  [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" = 4 ] && exit 0
  sleep 0.2
done
tail -n 3 "$state"/*.out "$state"/*.log >&2 || true
"$0" down || true
cannot "its nodes do not come up"
