#!/usr/bin/env bash
# Pictures and words, rows of 32,768 tokens: bash recipes/vlm/run.sh [--toy]; GPUS, TEXTS and other arguments: recipes/launch.sh
export PREPARE=recipes/pictures.py SAMPLE=--drawn
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" vlm gpu_8_ddp \
    --processor google/gemma-3-4b-it --length 32768 -- "$@"
