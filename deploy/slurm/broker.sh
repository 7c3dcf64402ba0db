#!/bin/bash
# The broker as a job: docs/deploy/slurm.md. Submit it in a folder that all nodes see, with
# broker.toml in it. Arguments go to the broker: `sbatch broker.sh --resume` once the run has begun.
#SBATCH --job-name=narrows-broker
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --time=7-00:00:00
#SBATCH --requeue --open-mode=append --output=narrows-broker.log
# Learners that run know one address, so the job should come back on the same node:
##SBATCH --nodelist=NODE
set -euo pipefail

# Learners that start later read it. The port is that of broker.listen.
port=${NARROWS_PORT:-7070}
echo "tcp://$(hostname):$port" > broker.address.new
mv broker.address.new broker.address

# Slurm ends a job with SIGTERM, and after KillWait with SIGKILL. The broker needs no more time than
# it gets: what it has not written by then, the next start replays.
exec srun narrows broker broker.toml --listen "tcp://*:$port" --state-dir state "$@"
