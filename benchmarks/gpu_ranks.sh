#!/bin/sh
# What ranks need a GPU for, in three calls of under ten minutes: `sh benchmarks/gpu_ranks.sh 1` to 3, on one GPU, with
# the results in $OUT. The most telling first: where a step fails, the next ones tell why or need no answer.
set -u
OUT=${OUT:-.}
export PYTHONPATH=.:benchmarks:${PYTHONPATH:-} CUDA_MPS_PIPE_DIRECTORY=${TMPDIR:-/tmp}/gapless-mps CUDA_MPS_LOG_DIRECTORY=${TMPDIR:-/tmp}/gapless-mps-log

step() { # seconds, name, command
    seconds=$1 name=$2
    shift 2
    echo "== $name"
    timeout -k 10 "$seconds" "$@" >"$OUT/$name.txt" 2>&1
    echo "ended with $?" >>"$OUT/$name.txt"
    tail -n 25 "$OUT/$name.txt"
}
ranks() { step "$1" "$2" python benchmarks/gpu_ranks.py --device-ids 0,0 --only "$3" $4; }
mps() { # on or off
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    if [ "$1" = on ]; then nvidia-cuda-mps-control -d; else echo quit | nvidia-cuda-mps-control; fi
}

case ${1:-} in
1)
    step 150 kernels python -m pytest tests/gpu/test_ranks_cuda.py -m gpu -q -o addopts= -p no:cacheprovider -k "not process and not killed"
    mps on
    ranks 90 sums sums "--rows 1 32 256"
    ranks 60 late late ""
    step 240 engines python -m pytest tests/gpu/test_ranks_cuda.py -m gpu -q -o addopts= -p no:cacheprovider -k "process or killed"
    mps off
    ;;
2)
    mps on
    ranks 240 tp-06b tp "--size 0.6B --rows 1 32 --rounds 3"
    ranks 300 tp-8b tp "--size 8B --rows 1 32 --rounds 2"
    mps off
    ;;
3)
    ranks 60 sums-in-turn sums "--rows 1 32"
    mps on
    ranks 150 death death "--size 0.6B --rows 32"
    ranks 60 sums-4 sums "--rows 1 32 --ranks 4 --device-ids 0,0,0,0"
    step 250 gpu-tests python -m pytest tests/gpu/test_engine_cuda.py tests/gpu/test_cuda_device.py -m gpu -q -o addopts= -p no:cacheprovider
    mps off
    ;;
*)
    echo "usage: sh benchmarks/gpu_ranks.sh 1|2|3" && exit 2
    ;;
esac
