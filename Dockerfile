# One image for the router and, in development, the worker with the fork runtime.
FROM python:3.11-slim-bookworm
WORKDIR /srv/readie
COPY requirements.lock pyproject.toml README.md alembic.ini ./
RUN pip install --no-cache-dir --require-hashes --requirement requirements.lock
COPY readie readie
COPY app app
COPY migrations migrations
COPY pipeline pipeline
COPY worker worker
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && useradd --system --create-home readie \
    && install -d -o readie /var/lib/readie /var/lib/readie/catalogues /var/lib/readie/worker
USER readie
CMD ["readie-router", "serve", "--host", "0.0.0.0"]
