# docker build --target cpu -t gapless:cpu .      docker build --target cuda -t gapless:cuda .
# A compiler stays in both images: the CPU's C++ is built for the machine that runs it, and Triton compiles at start.

FROM python:3.12-slim-bookworm AS base
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 gapless && install -d -o 1000 -g 1000 /home/gapless/.cache/huggingface
WORKDIR /src
COPY . .
EXPOSE 8000
ENTRYPOINT ["gapless"]
CMD ["serve", "--host", "0.0.0.0"]
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]

FROM base AS cpu
# --build-arg TORCH_INDEX=URL takes torch from PyTorch's index of CPU builds; the default index has builds with CUDA.
ARG TORCH_INDEX=""
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0 \
    && pip install --no-cache-dir -c constraints.txt '.[engine,events]'
USER 1000

FROM base AS cuda
# hadolint ignore=DL3013
RUN pip install --no-cache-dir -c constraints.txt torch==2.13.0 '.[engine,events]'
USER 1000
