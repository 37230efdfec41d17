#!/usr/bin/env bash
# Sets up what is missing, then runs the tests: bash tests/run.sh [--quick] [arguments of pytest]
# Two processes run them, a file each at a time, since tests wait for their ranks. TEST_WORKERS=0: one, for --pdb.
# --quick leaves out what is marked slow and keeps one case of each table: for every commit, five minutes at most.
# --qlora runs only what is marked qlora, with bitsandbytes and torchao, which are in a folder of their own: installed
# beside the other packages, they would add seconds to each import of Trainer.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # a test runs several ranks: one thread each is the fastest
for option in "$@"; do
    if [ "$option" = --qlora ]; then
        [ -e "$venv/bitsandbytes/torchao" ] || install --no-deps --target "$venv/bitsandbytes" bitsandbytes torchao
        export PYTHONPATH=$venv/bitsandbytes
    fi
done
exec python -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder --durations=25 --durations-min=2 "$@"
