#!/bin/sh
# Checks and measurements that need one GPU, in four calls of under ten minutes, the most telling first:
# `sh benchmarks/gpu_session.sh 1 [SECONDS]` to 4, with the results in $OUT. A part that hangs or fails costs itself
# alone. `sh benchmarks/gpu_session.sh tests SECONDS FILES` runs these tests.
# .whl/ may have wheels that the GPU's machine lacks, and before.tgz, another gapless that call 1 measures as well
# (`git archive --prefix=before/ COMMIT gapless | gzip > .whl/before.tgz`).
set -u
limit=${2:-560}
. benchmarks/gpu_site.sh
[ -e .whl/before.tgz ] && [ ! -d "$TMP/before" ] && tar xzf .whl/before.tgz -C "$TMP"

tests() { # seconds, name, workers, files and options
    seconds=$1 name=$2 workers=$3
    shift 3
    set -- -m gpu -q -p no:benchmark -o addopts= -o "cache_dir=$TMP/cache-$name" -W default --tb=short --timeout 200 --timeout-method thread "$@"
    step "$seconds" 16 "$name" python -m pytest -n "$workers" --durations 5 "$@"
    if grep -qE "[0-9]+ (failed|error)" "$OUT/$name.txt"; then # once more alone: what still fails is no matter of load
        step 90 40 "$name-again" python -m pytest --lf --lfnf none --maxfail 6 "$@"
    fi
}
turns() { # seconds, size, options
    seconds=$1 size=$2
    shift 2
    step "$seconds" 40 "turns-$size" python benchmarks/in_turns.py --size "$size" --seconds "$((seconds - 10))" \
        --json "$OUT/turns-$size.json" "$@"
}

case ${1:-} in
1) # any accelerator: CUDA by both classes
    nvidia-smi --query-gpu=name,driver_version,memory.used,clocks.sm,power.limit --format=csv,noheader
    python -c "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__, torch.cuda.is_available())"
    tests 170 accelerator 12 tests/gpu/test_cuda_device.py tests/gpu/test_engine_cuda.py tests/gpu/test_host_tier_cuda.py
    old="--arm before=code=$TMP/before,device=cuda"
    [ -d "$TMP/before" ] || old=
    both="--arm cuda=device=cuda --arm general=device=accelerator:cuda"
    # shellcheck disable=SC2086 # words
    turns 130 0.6B $old $both --arm cuda-depth1=device=cuda,depth=1 --arm general-depth1=device=accelerator:cuda,depth=1
    # shellcheck disable=SC2086
    turns 190 8B $old $both --rounds 4
    ;;
2) # the sanitizer's catalogue against real waits; all kernels
    PYTHONPATH="$PWD/tests:$PYTHONPATH" step 180 30 san-truth python tests/gpu/san_truth.py --json "$OUT/san-truth.json"
    tests 480 kernels 14 tests/kernels
    ;;
3) # the other tests on a GPU; ranks
    tests 230 gpu 12 tests/gpu --ignore tests/gpu/test_ranks_cuda.py --ignore tests/gpu/test_cuda_device.py \
        --ignore tests/gpu/test_engine_cuda.py --ignore tests/gpu/test_host_tier_cuda.py
    step 400 70 ranks sh benchmarks/gpu_ranks.sh one 385
    ;;
4) # large shapes; ranks beside one process
    step 110 8 rows-8B python benchmarks/rows.py --size 8B --rows 1 32 256 --rounds 2
    step 110 8 rows-8B-fp8 python benchmarks/rows.py --size 8B --rows 1 32 256 --rounds 2 --quantization fp8
    step 320 40 ranks-tp sh benchmarks/gpu_ranks.sh large 305
    ;;
tests) # chosen files
    shift 2
    tests 560 chosen 12 "$@"
    ;;
*)
    echo "usage: sh benchmarks/gpu_session.sh 1|2|3|4 [SECONDS] | tests SECONDS FILES" && exit 2
    ;;
esac
[ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ] && echo quit | nvidia-cuda-mps-control
exit 0
