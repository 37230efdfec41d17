#!/usr/bin/env bash
# Runs a recipe; its run.sh calls this: launch.sh RECIPE LAUNCH_CONFIG PREPARE... -- [arguments of run.sh]
#   PREPARE...   arguments of prepare.py that make the recipe's default data, if they are not there yet; a recipe may name
#                another program, and its default data, in the variables PREPARE and SAMPLE
# Arguments of run.sh: --toy (two CPU processes, seconds), or train.py's: --set training.max_steps=3, --resume.
# GPUS=4 takes four GPUs, all of which share each row; TEXTS="FILES AND FOLDERS" are your own data, from the
# checkout's folder.
set -euo pipefail
recipe=$1 config=$2
shift 2
prepare=()
while [ "$1" != -- ]; do prepare+=("$1"); shift; done
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ " $* " == *" --toy "* ]]; then
    [ -z "${TEXTS:-}" ] || echo "--toy trains on texts of its own: TEXTS is not read." >&2
    export ACCELERATE_USE_CPU=true
    exec accelerate launch --config_file recipes/accelerate/cpu_2ranks.yaml recipes/train.py "recipes/$recipe/config.yaml" "$@"
fi
gpus=${GPUS:-$({ nvidia-smi -L || true; } 2> /dev/null | wc -l)}
if ! [[ $gpus =~ ^[1-9][0-9]*$ ]]; then
    echo "GPUS is ${GPUS:-not set}, and nvidia-smi lists no GPU. Set GPUS to the number of GPUs, or try --toy on a CPU." >&2
    exit 2
fi
data="data/$recipe.parquet"
[ -z "${TEXTS:-}" ] || [ ! -e "$data" ] || echo "$data exists: TEXTS is not read again. Remove it for other texts." >&2
# shellcheck disable=SC2086  # TEXTS is a list
[ -e "$data" ] || python "${PREPARE:-recipes/prepare.py}" ${TEXTS:-${SAMPLE:---stdlib}} "${prepare[@]}" --output "$data"
exec accelerate launch --config_file "recipes/accelerate/$config.yaml" --num_processes "$gpus" \
    --parallelism_config_cp_size "$gpus" recipes/train.py "recipes/$recipe/config.yaml" "$@"
