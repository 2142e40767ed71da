# Read by gpu_session.sh and gpu_ranks.sh, in the root of a checkout: the paths, the wheels of .whl/ that the GPU's
# machine lacks, and `step`, whose logs go to $OUT and which starts nothing that would outlast $limit seconds from here.
export OUT="${OUT:-.}"
TMP=${TMPDIR:-/tmp}/gapless-session END=$(($(date +%s) + limit))
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export CUDA_MPS_PIPE_DIRECTORY=${TMPDIR:-/tmp}/gapless-mps CUDA_MPS_LOG_DIRECTORY=${TMPDIR:-/tmp}/gapless-mps-log
mkdir -p "$TMP/bin" "$TMP/site"
command -v python >/dev/null || ln -sf "$(command -v python3)" "$TMP/bin/python"
export PATH="$TMP/bin:$PATH" PYTHONPATH="$PWD:$PWD/benchmarks:$TMP/site"
if ls .whl/*.whl >/dev/null 2>&1 && [ ! -e "$TMP/installed" ]; then
    python -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$TMP/site" .whl/*.whl &&
        touch "$TMP/installed"
fi

step() { # seconds at most, lines to show, name, command
    most=$1 lines=$2 name=$3 left=$((END - $(date +%s) - 15))
    shift 3
    [ "$most" -gt "$left" ] && most=$left
    if [ "$most" -lt 20 ]; then echo "== $name: no time left" && return; fi
    begin=$(date +%s)
    timeout -s INT -k 10 "$most" "$@" >"$OUT/$name.txt" 2>&1
    echo "== $name ended with $? after $(($(date +%s) - begin)) of $most s" | tee -a "$OUT/$name.txt"
    tail -n "$((lines + 1))" "$OUT/$name.txt" | head -n "$lines" | cut -c1-230
}
