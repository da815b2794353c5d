#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

# Two minutes before the end, SLURM sends SIGUSR1 to all ranks. They save a checkpoint and end with status 138;
# the job goes back into the queue and continues there.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

srun --mpi=pmix --kill-on-bad-exit=1 python "${TRAIN:-train.py}" "$@"
status=$?

if [ $status -eq 138 ] || [ $status -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit $status
