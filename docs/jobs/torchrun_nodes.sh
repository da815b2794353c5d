#!/bin/bash
# Start ranks with torchrun on two nodes, without a scheduler. Run this on each node, with the number of the node and
# the name of the first:
#
#     NODE=0 HEAD=first.example.org ./torchrun_nodes.sh FOLDER      on the first
#     NODE=1 HEAD=first.example.org ./torchrun_nodes.sh FOLDER      on the second
#
# SIGTERM to either script saves a checkpoint and ends both; start both again to continue.
export OMP_NUM_THREADS=1

exec torchrun --nnodes="${NODES:-2}" --node-rank="${NODE:-0}" --nproc-per-node="${RANKS:-4}" \
    --master-addr="${HEAD:-localhost}" --master-port="${PORT:-29500}" \
    "${TRAIN:-train.py}" "$@"
