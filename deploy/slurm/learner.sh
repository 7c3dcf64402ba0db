#!/bin/bash
# One site as a job: docs/deploy/slurm.md. The job's name is the learner's, so give each site one:
#   sbatch --job-name=site-a learner.sh
#SBATCH --nodes=1 --ntasks=1 --gpus-per-node=1 --cpus-per-task=8
#SBATCH --time=1-00:00:00
#SBATCH --requeue --open-mode=append --output=%x.log
set -euo pipefail

export NARROWS_BROKER=${NARROWS_BROKER:-$(cat broker.address)}
# A site's key, where the broker has keys: it says the name, and who the broker is.
# export NARROWS_KEY=$SLURM_JOB_NAME.key

# A small GPT, to try the way. Yours is: exec srun python train.py
exec srun narrows learner --broker "$NARROWS_BROKER" --name "$SLURM_JOB_NAME" "$@"

# Several ranks that are one learner, such as FSDP on the GPUs of some nodes:
#   first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
#   exec srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_PER_NODE" \
#       --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29500" train.py
