# docker build --target cpu -t gapless:cpu .      docker build --target cuda -t gapless:cuda .
# The wheel brings the CPU's C++ for every level of processors, so nothing is compiled at a start. Layers by how rarely
# they change: torch, the other packages, gapless.

FROM python:3.12-slim-bookworm AS base
RUN useradd --create-home --uid 1000 gapless && install -d -o 1000 -g 1000 /home/gapless/.cache/huggingface \
    && chown 1000:1000 /home/gapless/.cache
WORKDIR /etc/gapless
EXPOSE 8000
ENTRYPOINT ["gapless"]
CMD ["serve", "--host", "0.0.0.0"]
HEALTHCHECK --start-period=120s --timeout=10s CMD ["python", "-m", "gapless.cli.health"]

FROM base AS cpu-packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0
COPY pyproject.toml constraints.txt deploy/needed.py ./
# hadolint ignore=DL3013
RUN python needed.py events > needed.txt && pip install --no-cache-dir -c constraints.txt -r needed.txt

FROM cpu-packages AS wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir 'setuptools>=77'
WORKDIR /src
COPY . .
RUN PYTHONPATH=. python deploy/wheel.py --out /wheels

FROM cpu-packages AS cpu
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
WORKDIR /home/gapless
USER 1000

FROM base AS cuda-packages
# Triton compiles at start.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0
COPY pyproject.toml constraints.txt deploy/needed.py ./
# hadolint ignore=DL3013
RUN python needed.py events > needed.txt && pip install --no-cache-dir -c constraints.txt -r needed.txt

FROM cuda-packages AS cuda
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
WORKDIR /home/gapless
USER 1000
