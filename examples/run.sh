#!/usr/bin/env bash
# Sets up what is missing, then runs the main job on two CPU ranks: bash examples/run.sh [arguments of first_light.py]
source "$(dirname "${BASH_SOURCE[0]}")/../tests/setup.sh"
cd "$root"
exec python examples/first_light.py "$@"
