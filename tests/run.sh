#!/usr/bin/env bash
# Sets up what is missing, then runs the tests: bash tests/run.sh [arguments of pytest]
# Two processes run them, a file each at a time, since tests wait for their ranks. TEST_WORKERS=0: one, for --pdb.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # a test runs several ranks: one thread each is the fastest
exec python -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile "$@"
