#!/bin/bash
# Trains on several nodes of a SLURM cluster, one launcher to a node, one process to a GPU:
#
#     sbatch --nodes=4 scripts/slurm.sh +experiment=llama70b trainer=fsdp2 trainer.accumulation=32
#
# All nodes must see the same data.folder and runs; prepare and regenerate first. Submitting it again goes on from the
# last checkpoint, also on another number of nodes.
#SBATCH --job-name=leadout
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# Three minutes before SLURM would end it, the run saves and ends.
#SBATCH --signal=TERM@180
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# --kill-on-bad-exit: a node that fails ends the job; the others would wait for its processes until they time out.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_PER_NODE:-8}" \
    --rdzv_backend c10d --rdzv_endpoint "$first:29500" --rdzv_id "$SLURM_JOB_ID" \
    -m train.distill "$@"
