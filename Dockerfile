# Two images of one release: `mesh` (router, kv_store, vector_search, the command line) holds no torch; `worker`
# (gpu_worker, cpu_worker) is the same with torch, the encoder and the chat model that ships.
#   docker build --target mesh -t spillway-mesh:0.1.0 .
#   docker build --target worker -t spillway-worker:0.1.0 .
ARG PYTHON=docker.io/library/python:3.11-slim-bookworm

# -- wheels: all that takes a compiler; no later stage has one ----------------------------------------------
FROM ${PYTHON} AS wheels
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*
# The path of the images' environment, so that scripts made here name the interpreter they will run with.
RUN python -m venv /opt/spillway
ENV PATH=/opt/spillway/bin:${PATH}
WORKDIR /src
COPY requirements.lock ./
COPY scripts/setup.py scripts/image.py scripts/
# The oldest processors that can run the images: x86-64-v3 means AVX2 (2013). On ARM: --build-arg MARCH=armv8-a
ARG MARCH=x86-64-v3
RUN python scripts/image.py compiled --march "${MARCH}" --wheels /wheels
COPY . .
RUN python scripts/image.py ours --wheels /wheels \
    && pip install --no-deps --no-index --prefix /worker /wheels/*.whl \
    && cp -a /worker /mesh \
    && rm /mesh/lib/python*/site-packages/models/*/model.safetensors

# -- packages: the lock file's, in layers of their own, which a change of our code leaves as they are --------
FROM ${PYTHON} AS mesh-packages
RUN groupadd --gid 10001 spillway \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin spillway \
    && install -d -o 10001 -g 10001 -m 700 /data \
    && python -m venv --without-pip /opt/spillway
COPY --from=wheels /src/requirements.lock /usr/local/src/spillway/
COPY scripts/setup.py scripts/image.py /usr/local/src/spillway/scripts/
ENV PIP_PYTHON=/opt/spillway/bin/python PIP_NO_CACHE_DIR=1
RUN python /usr/local/src/spillway/scripts/image.py mesh
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    SPILLWAY_DATA_DIR=/data SPILLWAY_LOG_FORMAT=json SPILLWAY_HEALTH_HOST=0.0.0.0 SPILLWAY_HEALTH_PORT=9464
LABEL org.opencontainers.image.title="Spillway" \
    org.opencontainers.image.description="Chat, embeddings and vector search from one accelerator and the CPUs beside it" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /
EXPOSE 9464
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m"]
CMD ["cli.main", "--help"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9464/readyz', timeout=4)"]

FROM mesh-packages AS worker-packages
# Empty: the public index of CPU builds, or where that cannot be reached, pip's own sources. PyPI's are for CUDA.
ARG SPILLWAY_TORCH_INDEX=
RUN SPILLWAY_TORCH_INDEX="${SPILLWAY_TORCH_INDEX}" python /usr/local/src/spillway/scripts/image.py worker

# -- the images ------------------------------------------------------------------------------------------------
FROM mesh-packages AS mesh
COPY --from=wheels /mesh /opt/spillway
ENV PATH=/opt/spillway/bin:${PATH}
EXPOSE 8080
USER 10001:10001

FROM worker-packages AS worker
COPY --from=wheels /worker /opt/spillway
ENV PATH=/opt/spillway/bin:${PATH}
USER 10001:10001
