#!/bin/sh
# What ranks need GPUs for, in calls of under ten minutes, the most telling step first: tests of ranks, then modes of
# gpu_ranks.py. Logs and records come back as $OUT/ranks-CALL.tgz; a step that hangs or fails costs itself alone.
#   sh benchmarks/gpu_ranks.sh one [SECONDS]   one GPU under MPS: each mode at its smallest size (not peer)
#   sh benchmarks/gpu_ranks.sh large           one GPU under MPS: the 8B and the 32B shape
#   sh benchmarks/gpu_ranks.sh two             two GPUs: tests, sums, a late rank, 8B beside one rank, deaths
#   sh benchmarks/gpu_ranks.sh two-formats     FP8 and INT4 on 8B, and the 32B shape
#   sh benchmarks/gpu_ranks.sh two-pd          prefill and decode apart at three lengths of prompts
#   sh benchmarks/gpu_ranks.sh two-dp          two engines of one server beside two servers
#   sh benchmarks/gpu_ranks.sh two-peer        vLLM beside, whose packages are in $PEER_PATH
#   sh benchmarks/gpu_ranks.sh four            four GPUs: sums, 8B and 32B by two and four ranks, deaths
#   sh benchmarks/gpu_ranks.sh four-pd         prefill and decode apart, two ranks a side
#   sh benchmarks/gpu_ranks.sh eight           eight GPUs: sums, 8B and 32B by four and eight ranks
set -u
call=${1:-} limit=${2:-560}
. benchmarks/gpu_site.sh
kept=$OUT OUT=$TMP/ranks-$call
mkdir -p "$OUT"

keep() { tar czf "$kept/ranks-$call.tgz" -C "$OUT" .; }
ranks() { # seconds, name, options of gpu_ranks.py
    seconds=$1 name=$2
    shift 2
    step "$seconds" 30 "$name" python benchmarks/gpu_ranks.py --json "$OUT/$name.json" "$@"
    keep
}
tests() { # seconds, name, options of pytest
    seconds=$1 name=$2
    shift 2
    step "$seconds" 25 "$name" python -m pytest tests/gpu/test_ranks_cuda.py -m gpu -q -o addopts= \
        -p no:cacheprovider -p no:benchmark -W default --tb=short --durations 5 --timeout 120 --timeout-method thread "$@"
    keep
}
mps() { # on or off
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    if [ "$1" = on ]; then
        nvidia-cuda-mps-control -d
    else
        echo quit | nvidia-cuda-mps-control
        rm -rf "$CUDA_MPS_PIPE_DIRECTORY" # its presence says that MPS runs
    fi
}
# A lent machine's memory grows as it is used, and gapless refuses tiers that are larger than what it has.
grow() { python -c "import sys; print(len(b'x' * (int(sys.argv[1]) << 30)) >> 30, 'GiB of memory')" "$1"; }

[ -n "$call" ] && nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
case $call in
one)
    tests 110 kernels -k "not process and not killed"
    mps on
    ranks 45 sums --only sums --device-ids 0,0
    ranks 40 late --only late --device-ids 0,0
    ranks 90 tp --only tp --device-ids 0,0 --size 0.6B --rows 1 32 --rounds 2
    tests 170 engines -n 3 -k process
    ranks 130 pd --only pd --device-ids 0 --size 0.6B --lengths 512 2048 --rounds 1 --seconds 5 --output 64 --tier 2GiB
    ranks 90 dp --only dp --device-ids 0,0 --size 0.6B --rounds 1
    mps off
    ranks 120 death --only death --device-ids 0,0 --model demo --rounds 1 --streams 24
    tests 60 killed -k killed
    ;;
large)
    mps on
    ranks 190 tp-8B --only tp --device-ids 0,0 --size 8B --rounds 2
    ranks 45 sums-4 --only sums --device-ids 0,0,0,0 --ranks 4
    ranks 210 tp-32B --only tp --device-ids 0,0 --size 32B --rows 1 32 --rounds 1
    ranks 170 tp-8B-formats --only tp --device-ids 0,0 --size 8B --rows 32 --rounds 1 --quantization fp8 int4
    mps off
    ;;
two)
    tests 120 kernels -k "not process and not killed"
    ranks 60 sums --only sums
    ranks 45 late --only late
    ranks 200 tp-8B --only tp --size 8B
    ranks 160 death --only death --size 8B --rounds 1
    tests 150 engines -n 3 -k "process or killed"
    ;;
two-formats)
    ranks 230 tp-8B-formats --only tp --size 8B --quantization fp8 int4 --rounds 2
    ranks 320 tp-32B --only tp --size 32B --rounds 2
    ;;
two-pd)
    grow 48
    ranks 500 pd --only pd --size 8B --rounds 2
    ;;
two-dp)
    ranks 280 dp-8B --only dp --size 8B
    ranks 200 dp-0.6B --only dp --size 0.6B --streams 256
    ;;
two-peer)
    ranks 280 peer-8B --only peer --size 8B --peer-path "${PEER_PATH:-}"
    ranks 280 peer-32B --only peer --size 32B --rounds 2 --peer-path "${PEER_PATH:-}"
    ;;
four)
    ranks 60 sums --only sums --ranks 2 4
    ranks 230 tp-8B --only tp --size 8B --ranks 2 4 --rounds 2
    ranks 280 tp-32B --only tp --size 32B --ranks 2 4 --rows 1 32 --rounds 1
    ranks 160 death --only death --size 0.6B --ranks 4 --rounds 1
    ;;
four-pd)
    grow 48
    ranks 500 pd --only pd --size 8B --ranks 2
    ;;
eight)
    ranks 60 sums --only sums --ranks 2 4 8
    ranks 230 tp-8B --only tp --size 8B --ranks 4 8 --rounds 2
    ranks 280 tp-32B --only tp --size 32B --ranks 4 8 --rows 1 32 --rounds 1
    ;;
*)
    sed -n '2,13p' "$0" && exit 2
    ;;
esac
exit 0
