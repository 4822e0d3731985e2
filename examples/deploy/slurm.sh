#!/bin/bash
# Two nodes with four ranks each under SLURM:  sbatch examples/deploy/slurm.sh
# Output goes to slurm-JOB.out. `scancel JOB` ends all ranks.
#SBATCH --job-name ring
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 4
#SBATCH --cpus-per-task 4
#SBATCH --time 01:00:00
# When a rank fails, SLURM ends the others at once.
#SBATCH --kill-on-bad-exit=1
# With GPUs, one for each rank:
##SBATCH --gpus-per-task 1

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate  # on a file system that all nodes share

# A secret of this job; srun passes it to all ranks.
export RING_SECRET=$(openssl rand -hex 32)

# One check per node: missing packages, host names, cores, limits. It ends the job if something is wrong.
srun --ntasks-per-node 1 --ntasks "$SLURM_NNODES" env RING_LAUNCHER=single ring doctor

srun python examples/lightning_digits.py
