#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

# srun starts one torchrun on each node, and torchrun one rank on each of the node's CPUs. Two minutes before the end,
# this script gets SIGUSR1 and passes it on; the ranks save a checkpoint and end, and the job goes back into the queue.
# torchrun ends with status 1 whatever the status of the ranks was, so the script remembers that it got the signal.
export OMP_NUM_THREADS=1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --mpi=none --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_NNODES" --nproc-per-node="$SLURM_CPUS_PER_TASK" \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:${PORT:-29500}" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    "${TRAIN:-train.py}" "$@" &
srun=$!
trap 'over=1; kill -USR1 $srun' USR1
wait $srun
status=$?
while kill -0 $srun 2>/dev/null; do # the signal ended only the wait
    wait $srun
    status=$?
done

if [ $status -ne 0 ] && [ -n "$over" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit $status
