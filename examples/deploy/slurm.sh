#!/bin/bash
# Two nodes with four ranks each under SLURM:  sbatch examples/deploy/slurm.sh
# Output goes to slurm-JOB.out. `scancel JOB` ends all ranks.
#SBATCH --job-name ring
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 4
#SBATCH --cpus-per-task 4
#SBATCH --time 01:00:00
# With GPUs, one for each rank:
##SBATCH --gpus-per-task 1

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate  # on a file system that all nodes share

# A secret of this job; srun passes it to all ranks, also where the site has told it to pass nothing.
export SLURM_EXPORT_ENV=ALL
export RING_SECRET=$(openssl rand -hex 32)

# Since SLURM 22.05 srun does not take --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# One check per node: missing packages, host names, cores, limits. Its exit status is 1 after warnings, with which the job goes
# on, and 2 after errors, which end it.
srun --ntasks-per-node 1 --ntasks "$SLURM_NNODES" env RING_LAUNCHER=single ring doctor || [ $? -eq 1 ]

# When a rank fails, SLURM ends the others at once. (sbatch does not know this option.)
srun --kill-on-bad-exit=1 python examples/lightning_digits.py
