# Two images: `router`, and `worker` with gVisor. Not built here: no container engine was at hand.
FROM python:3.11-slim-bookworm AS base
WORKDIR /srv/readie
COPY requirements.lock pyproject.toml README.md alembic.ini ./
RUN pip install --no-cache-dir --require-hashes --requirement requirements.lock
COPY readie readie
COPY app app
COPY migrations migrations
COPY pipeline pipeline
COPY worker worker
# There is no git here to ask for the last tag: docs/releasing.md
ARG VERSION=0.1.dev0
RUN SETUPTOOLS_SCM_PRETEND_VERSION=$VERSION pip install --no-cache-dir --no-deps --no-build-isolation .

# The worker, with what it restores: the root filesystem (readie-pipeline rootfs), and the checkpoints that were captured
# over it by the same release of runsc (make generation RUNTIME=runsc ROOTFS=…). Both are folders below this one. runsc
# needs root, namespaces, mounts and control groups: the container is privileged, and isolates nothing that runsc does not.
FROM base AS worker
ARG ROOTFS=generation/cpu/rootfs
ARG CHECKPOINTS=generation/cpu/checkpoints
# The image keeps no lists of packages, and without them apt names no mirror.
RUN apt-get update && echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] \
$(apt-get indextargets --format '$(SITE) $(RELEASE) $(ORIGIN)' | awk '$2 == "bookworm" && $3 == "Debian" { print $1; exit }') \
bookworm-backports main" > /etc/apt/sources.list.d/backports.list \
    && apt-get update && apt-get install --yes --no-install-recommends --target-release bookworm-backports runsc \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -m 700 /var/lib/readie/worker
COPY ${ROOTFS} /srv/rootfs
COPY ${CHECKPOINTS} /srv/checkpoints
ENV RUNTIME=runsc ROOTFS=/srv/rootfs CHECKPOINT_DIR=/srv/checkpoints WORKER_DIR=/var/lib/readie/worker
# The agent touches the file whenever a report of its has reached the router.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD find "$WORKER_DIR/reported" -newermt '-30 seconds' | grep -q .
CMD ["readie-worker", "serve"]

FROM base AS router
RUN useradd --system --create-home readie \
    && install -d -o readie /var/lib/readie /var/lib/readie/catalogues
USER readie
HEALTHCHECK --interval=2s --timeout=3s --retries=30 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8700/ready', timeout=2)"]
CMD ["readie-router", "serve", "--host", "0.0.0.0"]
