#!/bin/bash
# A real Slurm cluster on this one host, for tests and for trying out: two virtual nodes with 8 cores and 8 GPUs each (the
# GPUs are null devices that Slurm hands out; the memory is a number that jobs are held to, as their processes are counted). Its own munge, its own folder; three ports from HP_SLURM_PORT (16717) on.
#
#   scripts/slurm-cluster.sh install      Debian's packages (root)
#   scripts/slurm-cluster.sh start DIR    then: export SLURM_CONF=DIR/slurm.conf
#   scripts/slurm-cluster.sh stop DIR
#   scripts/slurm-cluster.sh node DIR n1  (re)start one node's slurmd
#   scripts/slurm-cluster.sh controller DIR
set -euo pipefail

cores=8 gpus=8 nodes="n1 n2" port=${HP_SLURM_PORT:-16717}

configure() {
  mkdir -p "$dir"/{log,run,dev,munge,state} "$dir"/spool/{n1,n2}
  chmod 0755 "$dir" "$dir/munge"
  dd if=/dev/urandom of="$dir/munge/key" bs=32 count=1 status=none
  chmod 0400 "$dir/munge/key"
  for node in $nodes; do
    for gpu in $(seq 0 $((gpus - 1))); do
      [ -e "$dir/dev/$node-gpu$gpu" ] || mknod "$dir/dev/$node-gpu$gpu" c 1 3
    done
  done
  local host tracking=linuxproc
  host=$(hostname -s)
  # Control groups find every process of a job; without them those that left their parent escape.
  if [ -w /sys/fs/cgroup/freezer ] || [ -w /sys/fs/cgroup/cgroup.procs ]; then tracking=cgroup; fi
  cat > "$dir/slurm.conf" << CONF
ClusterName=hp
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
AuthInfo=socket=$dir/munge/socket
AuthType=auth/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/$tracking
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=4000
GresTypes=gpu
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
MinJobAge=300
KillWait=2
SlurmdTimeout=5
MessageTimeout=5
InactiveLimit=0
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=$cores RealMemory=32000 Gres=gpu:$gpus State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=$cores RealMemory=32000 Gres=gpu:$gpus State=UNKNOWN
PartitionName=batch Nodes=n1,n2 Default=YES MaxTime=60 PriorityTier=1 State=UP
PartitionName=urgent Nodes=n1,n2 MaxTime=60 PriorityTier=9 PreemptMode=OFF State=UP
CONF
  for node in $nodes; do
    echo "NodeName=$node Name=gpu File=$dir/dev/$node-gpu[0-$((gpus - 1))]"
  done > "$dir/gres.conf"
  echo "CgroupPlugin=autodetect" > "$dir/cgroup.conf"
}

wait_until_idle() {
  for _ in $(seq 200); do
    [ "$(sinfo --noheader --Node --format=%N:%T 2> /dev/null | sort -u | grep -c ':idle$')" = 2 ] && return
    sleep 0.1
  done
  echo "the nodes did not come up; see $dir/log" >&2
  sinfo --Node >&2 || true
  exit 1
}

# The daemons, and step managers of jobs that no daemon remembers.
processes() {
  # A pid file outlives its daemon, and its number may be another process's by now: only daemons of Slurm are named.
  for pid in $(cat "$dir"/run/*.pid "$dir/munge/pid" 2> /dev/null); do
    if grep -qxE 'slurmctld|slurmd|munged' "/proc/$pid/comm" 2> /dev/null; then echo "$pid"; fi
  done
  for pid in $(pgrep -x slurmstepd); do
    if grep -qzxF "SLURM_CONF=$SLURM_CONF" "/proc/$pid/environ" 2> /dev/null; then echo "$pid"; fi
  done
}

stop() {
  local pids
  pids=$(processes)
  for pid in $pids; do kill "$pid" 2> /dev/null || true; done
  for _ in $(seq 100); do
    local alive=
    for pid in $pids; do kill -0 "$pid" 2> /dev/null && alive=1; done
    [ -z "$alive" ] && return
    sleep 0.1
  done
  for pid in $pids; do kill -KILL "$pid" 2> /dev/null || true; done
}

command=${1:?install, start, stop, node or controller}
if [ "$command" = install ]; then
  apt-get update
  exec apt-get install -y --no-install-recommends slurm-wlm munge
fi
dir=$(realpath -m "${2:?a folder for configuration, state and logs}")
export SLURM_CONF="$dir/slurm.conf" PATH="$PATH:/usr/sbin"
case $command in
  start)
    if (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
      echo "port $port is taken: another cluster runs; stop it, or set HP_SLURM_PORT" >&2
      exit 1
    fi
    configure
    munged --force --socket="$dir/munge/socket" --key-file="$dir/munge/key" --pid-file="$dir/munge/pid" \
      --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed"
    slurmctld
    for node in $nodes; do slurmd -N "$node"; done
    wait_until_idle
    ;;
  stop) stop ;;
  node) exec slurmd -N "${3:?a node}" ;;
  controller) exec slurmctld ;;
  *) echo "unknown command $command" >&2; exit 2 ;;
esac
