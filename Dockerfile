# One image for webserver, daemon, code location and run workers. Engines have images of their own (vLLM's).
# docs/deployment.md says how to build and run it.
#
# BASE_IMAGE: a slim Debian with Python 3.11 or newer; name one by its digest for builds that can be repeated.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# Where packages come from, if not from the public index: `docker build --build-arg UV_DEFAULT_INDEX …` takes the value
# from the environment. Nothing of this stage gets into the image but the folder that is copied below.
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG UV_DEFAULT_INDEX
ARG UV_FIND_LINKS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_LINK_MODE=copy PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
COPY requirements.lock runtime.lock ./
RUN python3 -m venv tools \
 && awk '/^uv==/ { found = 1 } found { print } found && !/\\$/ { exit }' requirements.lock > uv.lock \
 && tools/bin/pip install --quiet --require-hashes --no-deps -r uv.lock \
 && python3 -m venv --without-pip /opt/batch-assets/env \
 && tools/bin/uv pip install --quiet -p /opt/batch-assets/env/bin/python --no-deps --require-hashes -r runtime.lock
COPY pyproject.toml workspace.yaml LICENSE README.md /opt/batch-assets/project/
COPY batch_assets /opt/batch-assets/project/batch_assets
COPY resources /opt/batch-assets/project/resources
COPY gpu_runner /opt/batch-assets/project/gpu_runner
COPY deploy/local /opt/batch-assets/project/deploy/local
COPY deploy/image ./image
RUN install -m 755 image/batch-assets image/entrypoint image/healthy /opt/batch-assets/env/bin/ \
 && python3 image/finish.py /opt/batch-assets

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="batch-assets" \
      org.opencontainers.image.description="LLM-generated datasets as Dagster assets" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# 10001: a fixed number, so that volumes keep their owner, and one that no user of a host has by chance.
RUN groupadd --gid 10001 batch-assets \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/batch-assets --shell /usr/sbin/nologin \
      batch-assets \
 && install -d -m 700 -o 10001 -g 10001 /var/lib/batch-assets /var/lib/batch-assets/home /var/lib/batch-assets/store \
      /var/lib/batch-assets/work /run/batch-assets
COPY --from=build /opt/batch-assets /opt/batch-assets
ENV PATH=/opt/batch-assets/env/bin:$PATH \
    HOME=/var/lib/batch-assets \
    DAGSTER_HOME=/var/lib/batch-assets/home \
    BATCH_ASSETS_STORE=/var/lib/batch-assets/store \
    BATCH_ASSETS_WORKDIR=/var/lib/batch-assets/work \
    DAGSTER_DISABLE_TELEMETRY=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /opt/batch-assets/project
ENTRYPOINT ["entrypoint"]
CMD ["--help"]
