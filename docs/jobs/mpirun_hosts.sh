#!/bin/bash
# Start ranks with Open MPI on the machines of a host file, each line of which is "HOST slots=NUMBER OF RANKS":
#
#     HOSTS=hosts ./mpirun_hosts.sh FOLDER
#
# SIGTERM or SIGUSR1 to this script saves a checkpoint and ends with status 138; start it again to continue. (mpirun
# passes SIGUSR1 on to the ranks, but answers SIGTERM by killing them after a second.)
export OMP_NUM_THREADS=1

mpirun --hostfile "${HOSTS:-hosts}" -x OMP_NUM_THREADS ${PYTHONPATH:+-x PYTHONPATH} ${MPIRUN_FLAGS:-} \
    python "${TRAIN:-train.py}" "$@" &
mpirun=$!
trap 'kill -USR1 $mpirun' TERM USR1
wait $mpirun
status=$?
while kill -0 $mpirun 2>/dev/null; do # the signal ended only the wait
    wait $mpirun
    status=$?
done
exit $status
