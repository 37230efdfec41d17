#!/usr/bin/env bash
# LoRA on several machines, one row a machine. On each of them, with the address of the first:
#   NODES=2 NODE_RANK=0 HEAD=192.0.2.1 bash recipes/multi-node/run.sh        (the second: NODE_RANK=1)
# slurm.sbatch and skypilot.yaml set these variables. --toy: two CPU processes of this machine; with NODES, GPUS of them
# on each machine. RDZV=static: launchers meet by accelerate's static rendezvous, not by torchrun's c10d.
set -euo pipefail
if [ "${1:-}" = --toy ] && [ -z "${NODES:-}" ]; then
    exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" multi-node two_nodes_ddp_x_cp -- "$@"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
gpus=${GPUS:-8}                                          # of one machine: the size of its ring
precision=bf16
data=data/multi-node.parquet                             # every machine needs it
if [ "${1:-}" = --toy ]; then
    [ -z "${TEXTS:-}" ] || echo "--toy trains on texts of its own: TEXTS is not read." >&2
    export ACCELERATE_USE_CPU=true
    precision=no
elif [ -e "$data" ]; then
    [ -z "${TEXTS:-}" ] || echo "$data exists: TEXTS is not read again. Remove it for other texts." >&2
else
    # shellcheck disable=SC2086  # TEXTS is a list
    python recipes/prepare.py ${TEXTS:---stdlib} --tokenizer meta-llama/Llama-3.1-8B --length 131072 --pack wrapped \
        --output "$data"
fi
exec accelerate launch --config_file recipes/accelerate/two_nodes_ddp_x_cp.yaml \
    --num_machines "$NODES" --machine_rank "$NODE_RANK" --num_processes "$((NODES * gpus))" \
    --main_process_ip "$HEAD" --main_process_port "${PORT:-29500}" --rdzv_backend "${RDZV:-c10d}" \
    --mixed_precision "$precision" \
    --parallelism_config_dp_replicate_size "$NODES" --parallelism_config_cp_size "$gpus" \
    recipes/train.py recipes/multi-node/config.yaml "$@"
